"""Padded batches whose rows share prefixes, and the brute-force count of their distinct tokens."""

import random
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

__all__ = [
    "IGNORED", "PAD", "Batch", "batch_with_forks", "distinct_tokens", "distinct_with_padding", "left_padded", "padded",
    "shared_batch",
]  # fmt: skip

PAD = 0
"""Token id in padded cells; no row drawn here contains it."""
IGNORED = -100
"""Label that no loss counts."""
FIRST_TOKEN = 3
"""Rows draw from [FIRST_TOKEN, vocab): the ids below are padding, begin and end in the zoo."""

Side = Literal["right", "left"]


@dataclass(frozen=True)
class Batch:
    """One batch as a trainer hands it to a model; every tensor is [B, T], int64."""

    input_ids: Tensor
    attention_mask: Tensor | None
    labels: Tensor | None
    position_ids: Tensor | None = None

    def inputs(self) -> dict[str, Tensor]:
        """Keyword arguments of the model, those that are there."""
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return {name: value for name, value in fields.items() if value is not None}

    def without(self, *names: str) -> "Batch":
        """The same batch with the named fields left out."""
        return replace(self, **dict.fromkeys(names))

    def rows(self) -> list[list[int]]:
        """The real tokens of every row."""
        kept = torch.ones_like(self.input_ids) if self.attention_mask is None else self.attention_mask
        return [ids[mask.bool()].tolist() for ids, mask in zip(self.input_ids, kept)]


def padded(rows: list[list[int]], side: Side = "right", length: int | None = None, seed: int = 0) -> Batch:
    """Pads rows to one length; labels are the tokens, except padding and a random third of them.

    The random gaps make the weights of a token's rows differ, so that a loss which scales a shared token
    by its number of rows cannot pass. Every row keeps the label of its last token, and none has one at its
    first, which padding on the left would have to predict.
    """
    width = length if length is not None else max(map(len, rows))
    ids = torch.full((len(rows), width), PAD)
    mask = torch.zeros(len(rows), width, dtype=torch.int64)
    for b, row in enumerate(rows):
        where = slice(0, len(row)) if side == "right" else slice(width - len(row), width)
        ids[b, where] = torch.tensor(row)
        mask[b, where] = 1
    generator = torch.Generator().manual_seed(seed)
    dropped = torch.rand(ids.shape, generator=generator) < 0.33
    place = mask.cumsum(1)
    dropped = (dropped & (place < mask.sum(1, keepdim=True))) | (place == 1)
    labels = torch.where((mask == 0) | dropped, IGNORED, ids)
    return Batch(ids, mask, labels)


def shared_batch(
    rows: int, length: int, shared: int, vocab: int = 128, padding: Side | None = "right", seed: int = 0
) -> Batch:
    """Rows over two levels of forks, a duplicate, and (if padded) a row that is a prefix of another.

    Args:
        rows: B.
        length: T; at least one row fills it.
        shared: tokens common to all rows; rows of equal parity share `shared // 2` more.
        vocab: exclusive upper end of the token ids.
        padding: side of the padding; None gives full rows and no mask.
        seed: of tokens, lengths and label gaps.
    """
    draw = random.Random(seed)
    tokens = lambda count: [draw.randrange(FIRST_TOKEN, vocab) for _ in range(count)]  # noqa: E731
    stem, branches = tokens(shared), [tokens(shared // 2) for _ in range(2)]
    full = [(stem + branches[b % 2] + tokens(length))[:length] for b in range(rows)]
    if rows > 2:
        full[2] = list(full[0])
    if padding is None:
        return padded(full, seed=seed).without("attention_mask")
    lengths = [length, *(draw.randint(max(1, length // 2), length) for _ in range(rows - 1))]
    return padded([row[:n] for row, n in zip(full, lengths)], padding, length, seed)


def distinct_tokens(batch: Batch, positions: Literal["column", "own"] = "column") -> int:
    """Number of distinct (path of tokens, position) pairs under the mask, by listing them all.

    Args:
        batch: without a mask every cell counts.
        positions: "column": rows that start in different columns share nothing (positions count columns);
            "own": positions count each row's own tokens, so where a row starts does not matter.
    """
    paths = set()
    for row, ids in enumerate(batch.input_ids.tolist()):
        mask = [1] * len(ids) if batch.attention_mask is None else batch.attention_mask[row].tolist()
        start = mask.index(1)
        real = [token for token, kept in zip(ids, mask) if kept]
        key = start if positions == "column" else 0
        paths.update((key, tuple(real[: t + 1])) for t in range(len(real)))
    return len(paths)


_STARTS = [0, 3, 1, 3, 0, 5]


def left_padded(seed: int = 0) -> Batch:
    """Rows that start in several columns, the same tokens right after the padding, T = 16."""
    ids = shared_batch(rows=6, length=16, shared=8, padding=None, seed=seed).input_ids
    return padded([row[: 16 - start] for row, start in zip(ids.tolist(), _STARTS)], "left", 16, seed)


def batch_with_forks(padding: Side | None = None) -> Batch:
    """Five rows of 15 tokens, 6 of them common to all."""
    return shared_batch(rows=5, length=15, shared=6, vocab=61, padding=padding, seed=2)


def distinct_with_padding(ids: Tensor, mask: Tensor | None, window: int = 1000) -> int:
    """Prefixes of rows, padding behind them included; padding out of sight of a row's tokens counts as one."""
    found = set()
    for row, real in zip(ids.tolist(), (torch.ones_like(ids) if mask is None else mask).tolist(), strict=True):
        ends = range(1, len(row) + 1)
        found |= {(*row[:t], sum(real[:t])) if any(real[max(0, t - window) : t]) else () for t in ends}
    return len(found)
