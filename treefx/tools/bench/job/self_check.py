"""Check an installation: a model of one attention layer against eager float64."""

from typing import Any

import torch
from torch.nn import functional

__all__ = ["self_check"]


class _TinyModel(torch.nn.Module):
    """Hold one causal attention layer with learned positions and a residual."""

    def __init__(self, vocab_size: int = 32, width: int = 16, heads: int = 2, longest: int = 16) -> None:
        super().__init__()
        self.heads = heads
        self.tokens = torch.nn.Embedding(vocab_size, width)
        self.places = torch.nn.Embedding(longest, width)
        self.mix = torch.nn.Linear(width, 3 * width)
        self.out = torch.nn.Linear(width, vocab_size)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Mean loss of [B, T] ids; labels of -100 are ignored."""
        hidden = self.tokens(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        shape = (*ids.shape, self.heads, -1)
        query, key, value = (part.view(shape).transpose(1, 2) for part in self.mix(hidden).chunk(3, dim=-1))
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        logits = self.out(hidden + mixed.transpose(1, 2).reshape(hidden.shape))
        return functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def self_check(inner: str = "inductor") -> float:
    """Return the largest relative error of a tiny float64 model, treefx against eager.

    Args:
        inner: ``"inductor"``, ``"aot_eager"`` or ``"eager"``.
    """
    torch.manual_seed(0)
    model = _TinyModel().double()
    ids = torch.randint(32, (4, 12))
    ids[:, :8] = ids[0, :8]
    expected = _loss_and_gradients(model, model, ids)
    options: dict[str, Any] = {"inner": inner, "min_sharing": 1.0}
    compiled = torch.compile(model, backend="treefx", options=options)
    actual = _loss_and_gradients(model, compiled, ids)
    return max(float((got - want).abs().max() / want.abs().max()) for got, want in zip(actual, expected))


def _loss_and_gradients(model: torch.nn.Module, call: Any, ids: torch.Tensor) -> list[torch.Tensor]:
    loss = call(ids, ids)
    return [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))]
