"""Make the batches of ``treefx doctor --zoo``: shared prefixes, no shape twice."""

from __future__ import annotations

import itertools
import random

import torch

from treefx.data import Batch
from treefx.errors import InputError
from treefx.tools.bench.zoo.models import VOCABULARY

__all__ = ["describe_batches", "shared_rows", "zoo_batches"]

_ROWS, _LENGTHS = (2, 9), (14, 60)
"""Fewest and most of the batches beyond the first two."""


def shared_rows(rows: int = 4, length: int = 20, prefix: int = 8, seed: int = 0, left: bool = False) -> Batch:
    """Make rows of different lengths over two levels of forks and a duplicate, padded.

    No row's first token is predicted: what would predict it is padding, where padding is on the left.
    """
    draw = torch.Generator().manual_seed(seed)

    def tokens(count: int) -> list[int]:
        return torch.randint(3, VOCABULARY, (count,), generator=draw).tolist()

    stem, branches = tokens(prefix), [tokens(prefix // 2), tokens(prefix // 2)]
    full = [[*stem, *branches[row % 2], *tokens(length)][: length - 3 * (row % 3)] for row in range(rows)]
    full.append(list(full[1]))
    ids = torch.zeros(len(full), length, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, content in enumerate(full):
        place = slice(length - len(content), None) if left else slice(len(content))
        ids[row, place] = torch.tensor(content)
        mask[row, place] = 1
    unpredicted = mask.cumsum(dim=1) <= 1
    return Batch(ids, mask, ids.masked_fill((mask == 0) | unpredicted, -100))


def zoo_batches(count: int = 2) -> dict[str, Batch]:
    """Make batches by shape: the first pads right, the second left, others at random.

    Raises:
        InputError: ``count`` is below one.
    """
    if count < 1:
        raise InputError(f"the zoo needs a batch at least, got {count}")
    draw, made = random.Random(0), {}
    made[_shape(0, 5, 20)] = shared_rows()
    made[_shape(1, 4, 27)] = shared_rows(rows=3, length=27, prefix=11, seed=1, left=True)
    for seed in itertools.count(2):
        if len(made) >= count:
            return dict(itertools.islice(made.items(), count))
        rows, length, left = draw.randint(*_ROWS), draw.randint(*_LENGTHS), len(made) % 2
        shape = _shape(left, rows + 1, length)
        made.setdefault(shape, shared_rows(rows, length, length // 3, seed, left=bool(left)))
    raise AssertionError


def describe_batches(count: int) -> str:
    """Their shapes, or how many where they are many."""
    return ", ".join(zoo_batches(count)) if count <= 2 else f"{count} shapes, padded right and left in turn"


def _shape(left: int, rows: int, length: int) -> str:
    return f"{rows} x {length} {('right', 'left')[left]}"
