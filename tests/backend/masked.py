"""A model whose attentions are given functions of a padding mask and of token ids, and batches with padding for it."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.batches import IGNORED, PAD
from tests.oracle import Step

__all__ = [
    "HEADS",
    "LM",
    "LOWEST",
    "SPECIAL",
    "VOCAB",
    "WIDTH",
    "Attend",
    "batch_of",
    "causal",
    "distinct",
    "model_of",
    "plain",
    "scores",
    "step_of",
]


VOCAB, WIDTH, HEADS = 32, 16, 2
SPECIAL = 7
"""A token without attention to it."""
LOWEST = torch.finfo(torch.float64).min
Attend = Callable[..., Tensor]
"""q, k, v [B, H, T, D], ids and mask [B, T], more inputs -> [B, H, T, D]."""


class LM(nn.Module):
    """An embedding, one attention per given function, and a head; returns the loss."""

    def __init__(self, *attends: Attend) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(VOCAB, WIDTH), nn.Embedding(64, WIDTH)
        self.qkv = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH) for _ in attends)
        self.head, self.attends = nn.Linear(WIDTH, VOCAB), attends
        self.register_buffer("lowest", torch.tensor(LOWEST, dtype=torch.float64))

    def forward(self, ids: Tensor, mask: Tensor, labels: Tensor, *more: Tensor) -> Tensor:
        x = self.embed(ids) + self.place(torch.arange(ids.shape[1], device=ids.device))
        for project, attend in zip(self.qkv, self.attends):
            q, k, v = project(x).view(*ids.shape, 3 * HEADS, -1).transpose(1, 2).chunk(3, 1)
            x = x + attend(q, k, v, ids, mask, *more).transpose(1, 2).flatten(2)
        return F.cross_entropy(self.head(x)[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def model_of(*attends: Attend) -> nn.Module:
    torch.manual_seed(0)
    return LM(*attends).double()


def batch_of(side: str, *, special: bool = True, predicted: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """ids, mask and labels of four rows of 12 that share eight tokens, some padded by three; the fourth is special.

    With ``predicted`` the first token of a row that is padded on the left is predicted, from padding.
    """
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(8, VOCAB, (4, 12), generator=generator)
    ids[:, :8] = ids[0, :8]
    if special:
        ids[:, 3] = SPECIAL
    mask = torch.ones_like(ids)
    if side == "right":
        mask[1:3, 9:] = 0
    elif side == "left":
        ids[1:3] = ids[1:3].roll(3, 1)
        mask[1:3, :3] = 0
    elif side == "holes":
        mask[1, 4], mask[2, 0] = 0, 0
    ids = ids.masked_fill(mask == 0, PAD)
    labels = ids.masked_fill(mask == 0, IGNORED)
    if not predicted:
        labels[mask.cumsum(1) == 1] = IGNORED
    return ids, mask, labels


def distinct(keys: Tensor, mask: Tensor) -> int:
    """Number of prefixes of the rows under a mask."""
    rows = [row[kept.bool()].tolist() for row, kept in zip(keys, mask)]
    return len({tuple(row[: t + 1]) for row in rows for t in range(len(row))})


def step_of(*inputs: Any) -> Step:
    return lambda model: model(*inputs)


def causal(q: Tensor) -> Tensor:
    place = torch.arange(q.size(-2), device=q.device)
    return place <= place[:, None]


def scores(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.mT * q.size(-1) ** -0.5


def plain(q: Tensor, k: Tensor, v: Tensor, ids: Tensor, mask: Tensor, *more: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)
