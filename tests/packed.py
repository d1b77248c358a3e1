"""Packed rows: several sequences in one row ``[1, sum T]``, or in several, as trainers without padding feed them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from tests.batches import IGNORED
from tests.oracle import Step

__all__ = ["AGENTS", "Packed", "loss_inside", "loss_outside", "pack", "trie_size"]

AGENTS = [
    [5, 6, 7, 8],
    [5, 6, 7, 9, 4],
    [5, 6, 7, 8, 3, 9, 11, 12, 13, 14],
    [5, 6, 7, 8, 3, 9, 11, 12, 13, 9],
    [5],
    [8],
]
"""A prompt with completions and turns, of which some are prefixes of others; one-token ones."""


@dataclass(frozen=True)
class Packed:
    """What a trainer passes, [B, T] each; ``attention_mask`` stays None."""

    input_ids: Tensor
    position_ids: Tensor
    labels: Tensor
    segments: tuple[tuple[int, ...], ...]
    """The sequences, padding that counts as some included."""

    def with_positions(self, positions: Tensor) -> "Packed":
        """The same row with other positions."""
        return replace(self, position_ids=positions)


def pack(*rows: Sequence[Sequence[int]], pads: int = 0, counted: bool = True) -> Packed:
    """Packs rows of sequences, filled up to the longest and ``pads`` beyond it.

    Pads have id 0, positions that count up (one more segment) or are 0 each where not ``counted`` (a segment each).
    Labels are the tokens but for the first of each sequence and the pads.
    """
    width = max(sum(map(len, row)) for row in rows) + pads
    filled = []
    for row in rows:
        rest = width - sum(map(len, row))
        filled.append([tuple(item) for item in row] + ([(0,) * rest] if counted and rest else [(0,)] * rest))
    ids = torch.tensor([[token for item in row for token in item] for row in filled])
    positions = torch.tensor([[place for item in row for place in range(len(item))] for row in filled])
    labels = torch.where((positions == 0) | (ids == 0), IGNORED, ids)
    return Packed(ids, positions, labels, tuple(item for row in filled for item in row))


def trie_size(packed: Packed) -> int:
    """Number of distinct prefixes of the segments, counted one by one."""
    return len({item[: end + 1] for item in packed.segments for end in range(len(item))})


def loss_inside(packed: Packed, **more: Any) -> Step:
    """The model's own loss of the row; it shifts over the ends of sequences."""
    inputs = {"input_ids": packed.input_ids, "position_ids": packed.position_ids, "labels": packed.labels}
    return lambda model: model(**inputs, use_cache=False, **more).loss


def loss_outside(packed: Packed) -> Step:
    """The loss of trainers for reinforcement learning: logits changed in place, labels rolled over the row."""

    def step(model: nn.Module) -> Tensor:
        logits = model(input_ids=packed.input_ids, position_ids=packed.position_ids, use_cache=False).logits
        logits = logits.squeeze(0).div_(0.7)
        picked = logits.log_softmax(-1).gather(-1, packed.input_ids.roll(-1, -1).view(*logits.shape[:-1], 1))
        weight = torch.linspace(-1.0, 2.0, picked.numel(), dtype=logits.dtype).view(picked.shape)
        return (weight * picked).sum()

    return step
