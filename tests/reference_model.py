"""A small float64 causal LM (grouped-query attention, RoPE, SwiGLU, RMSNorm) that runs under any visibility.

It is written for the tests of the mathematics, in plain torch without a fused kernel, so that what a token
sees, what its position is and where its gradient is scaled are arguments.
"""

from collections.abc import Callable

import torch
from torch import nn

__all__ = ["ReferenceModel", "causal_visibility", "tree_visibility"]

Hook = Callable[[str, torch.Tensor], torch.Tensor]


def causal_visibility(length: int) -> torch.Tensor:
    """bool [length, length]: query q (rows) sees key k (columns) iff k <= q."""
    return torch.ones(length, length, dtype=torch.bool).tril()


def tree_visibility(subtree_end: torch.Tensor) -> torch.Tensor:
    """bool [N, N]: query q (rows) sees key k (columns) iff k <= q < subtree_end[k]."""
    index = torch.arange(len(subtree_end))
    return (index[None, :] <= index[:, None]) & (index[:, None] < subtree_end[None, :])


def _rotate(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Rotary position embedding of x [N, heads, D] (Su et al. 2021, equation 34), halves layout."""
    half = x.shape[-1] // 2
    frequency = 10000.0 ** (-torch.arange(half, dtype=x.dtype) / half)
    angle = positions[:, None, None].to(x.dtype) * frequency
    left, right = x[..., :half], x[..., half:]
    return torch.cat([left * angle.cos() - right * angle.sin(), right * angle.cos() + left * angle.sin()], -1)


class _Attention(nn.Module):
    def __init__(self, width: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.size = heads, kv_heads, width // heads
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, kv_heads * self.size, bias=False)
        self.value = nn.Linear(width, kv_heads * self.size, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor, positions: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
        tokens, groups = len(x), self.heads // self.kv_heads
        q = _rotate(self.query(x).view(tokens, self.heads, self.size), positions)
        k = _rotate(self.key(x).view(tokens, self.kv_heads, self.size), positions)
        v = self.value(x).view(tokens, self.kv_heads, self.size)
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        scores = torch.einsum("qhd,khd->hqk", q, k) / self.size**0.5
        probs = scores.masked_fill(~visible, -torch.inf).softmax(dim=-1)
        return self.out(torch.einsum("hqk,khd->qhd", probs, v).reshape(tokens, -1))  # type: ignore[no-any-return]


class _Block(nn.Module):
    def __init__(self, width: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.attention = _Attention(width, heads, kv_heads)
        self.gate = nn.Linear(width, 2 * width, bias=False)
        self.up = nn.Linear(width, 2 * width, bias=False)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: torch.Tensor, positions: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), positions, visible)
        h = self.mlp_norm(x)
        return x + self.down(nn.functional.silu(self.gate(h)) * self.up(h))  # type: ignore[no-any-return]


class ReferenceModel(nn.Module):
    """Three blocks; `forward` takes one row of tokens and everything that a tree changes.

    Args:
        vocabulary: number of token ids.
        width: hidden size.
        heads: query heads.
        kv_heads: key and value heads, dividing `heads`.
    """

    def __init__(self, vocabulary: int = 40, width: int = 32, heads: int = 4, kv_heads: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(_Block(width, heads, kv_heads) for _ in range(3))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.double()

    def forward(
        self, tokens: torch.Tensor, positions: torch.Tensor, visible: torch.Tensor, hook: Hook | None = None
    ) -> torch.Tensor:
        """Logits [N, V] of tokens [N] at positions [N] under visible [N, N].

        `hook(name, hidden)` may replace the output of every block ("block") and the state under the head
        ("final").
        """
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, positions, visible)
            x = x if hook is None else hook("block", x)
        x = self.norm(x)
        x = x if hook is None else hook("final", x)
        return self.head(x)  # type: ignore[no-any-return]
