"""Packed rows: several sequences in one row ``[1, sum T]``, or in several, as trainers without padding feed them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from tests.batches import IGNORED
from tests.models import TinyLM
from tests.oracle import Step

__all__ = [
    "AGENTS", "DocumentLM", "GivenMaskLM", "Packed", "but_for_pads", "by_document", "by_position", "causal",
    "loss_inside", "loss_of_documents", "loss_outside", "pack", "same", "trie_size",
]  # fmt: skip

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


def loss_outside(packed: Packed, **more: Any) -> Step:
    """The loss of trainers for reinforcement learning: logits changed in place, labels rolled over the row."""

    def step(model: nn.Module) -> Tensor:
        inputs = {"input_ids": packed.input_ids, "position_ids": packed.position_ids}
        logits = model(**inputs, use_cache=False, **more).logits
        logits = logits.squeeze(0).div_(0.7)
        picked = logits.log_softmax(-1).gather(-1, packed.input_ids.roll(-1, -1).view(*logits.shape[:-1], 1))
        weight = torch.linspace(-1.0, 2.0, picked.numel(), dtype=logits.dtype).view(picked.shape)
        return (weight * picked).sum()

    return step


Mask = Callable[[Tensor, Tensor], Tensor]
"""documents and positions [B, T] -> bool [B, 1, T, T], True where a query sees a key."""


class Masked(nn.Module):
    """Attention under a given mask."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        return scaled_dot_product_attention(q, k, v, attn_mask=mask)


class DocumentLM(TinyLM):
    """A model that numbers documents, and makes the mask of each block from these numbers and the positions."""

    def __init__(self, *masks: Mask) -> None:
        super().__init__(Masked, layers=len(masks), width=16)
        self.masks = masks

    def forward(  # type: ignore[override]
        self, input_ids: Tensor, documents: Tensor, position_ids: Tensor, labels: Tensor | None = None
    ) -> Tensor:
        """Logits, or the loss where there are labels."""
        assert self.place is not None
        x = self.embed(input_ids) + self.place(position_ids)
        for block, mask in zip(self.blocks, self.masks, strict=True):
            x = block(x, mask(documents, position_ids))
        logits: Tensor = self.head(self.norm(x))
        return logits if labels is None else cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


class GivenMaskLM(TinyLM):
    """One block under the mask [B, 1, T, T] of the caller, called as models of transformers are."""

    def __init__(self) -> None:
        super().__init__(Masked, layers=1, width=16)

    def forward(self, *args: Any, use_cache: bool = False, **inputs: Any) -> Any:
        return super().forward(*args, **inputs)


def causal(documents: Tensor, positions: Tensor) -> Tensor:
    """All columns up to the query's, of whatever document."""
    columns = torch.arange(documents.shape[1])
    return (columns <= columns[:, None])[None, None]


def same(documents: Tensor) -> Tensor:
    """Pairs of one document."""
    return documents[:, None, :, None] == documents[:, None, None, :]


def by_document(documents: Tensor, positions: Tensor) -> Tensor:
    """The columns of the query's document up to the query's own."""
    return causal(documents, positions) & same(documents)


def by_position(documents: Tensor, positions: Tensor) -> Tensor:
    """The last three positions of the query's document."""
    query, key = positions[:, None, :, None], positions[:, None, None, :]
    return (key <= query) & (key > query - 3) & same(documents)


def but_for_pads(documents: Tensor, positions: Tensor) -> Tensor:
    """The last three positions of the query's document, none of document 0."""
    return by_position(documents, positions) & (documents > 0)[:, None, None]


def loss_of_documents(packed: Packed, documents: Tensor | None = None) -> Step:
    """Squared logits, each place with another weight; documents are the segments, or others."""
    if documents is None:
        documents = (packed.position_ids == 0).cumsum(1)

    def step(model: nn.Module) -> Tensor:
        logits = model(packed.input_ids, documents, packed.position_ids)
        weight = torch.linspace(0.5, 2.0, logits[..., 0].numel(), dtype=logits.dtype).view(logits.shape[:2])
        return (logits.square().mean(-1) * weight).sum()

    return step
