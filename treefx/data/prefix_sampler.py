"""Order rows so that every batch of a fixed number of rows shares prefixes.

For trainers that cut a sampler's stream into batches themselves.

Batches are filled from the leaves of the prefix tree up, as `TreeBatchSampler` fills a budget of tokens: at every node,
deepest first, as many full batches are made as there are rows, and the rest goes up. So rows meet where they have most
in common, and a group as large as a batch is one batch.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from torch.utils.data import Sampler

from treefx.arguments import check_whole, is_whole
from treefx.errors import InputError
from treefx.forests.forest import Forest

__all__ = ["PrefixSampler", "cut_into_batches"]


class PrefixSampler(Sampler[int]):
    """Yield row numbers for a `DataLoader`, so that each ``rows`` of them share prefixes.

    A trainer makes its batches of them; how many batches there are and how many rows each has stays as it was. They
    come in random order, which differs from epoch to epoch after `set_epoch` and is the same on all ranks: a loader
    that deals whole batches out to ranks keeps them together.

    Args:
        sequences: the token ids of every row.
        rows: rows of a batch.
        seed: of the order.

    Raises:
        InputError: there are no rows, or no room for any in a batch.

    Example:
        >>> order = list(PrefixSampler([[1, 2, 3], [7, 8, 9], [1, 2, 4], [7, 8, 5]], rows=2))
        >>> sorted(sorted(order[start : start + 2]) for start in (0, 2))
        [[0, 2], [1, 3]]
    """

    def __init__(self, sequences: Sequence[Any], rows: int, *, seed: int = 0) -> None:
        if not len(sequences) or not is_whole(rows, 1):
            raise InputError(f"expected rows to sample and at least 1 row per batch, got {len(sequences)} and {rows!r}")
        check_whole(seed, "seed")
        self.forest = Forest.from_sequences(sequences)
        self.rows, self.seed, self.epoch = rows, seed, 0

    def set_epoch(self, epoch: int) -> None:
        """Change the order of rows.

        Call it with the same number on all ranks, as for `DistributedSampler`.
        """
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        """Row numbers; the batch with fewer rows, if there is one, is the last."""
        random = np.random.default_rng([self.seed, self.epoch])
        batches = cut_into_batches(self.forest, self.rows, random)
        full = [batch for batch in batches if len(batch) == self.rows]
        order = [full[i] for i in random.permutation(len(full))]
        return (row for batch in [*order, *batches[len(full) :]] for row in batch)

    def __len__(self) -> int:
        """Number of rows."""
        return len(self.forest)


def cut_into_batches(forest: Forest, rows: int, random: np.random.Generator) -> list[list[int]]:
    """Cut all rows of a forest into batches of exactly ``rows`` rows; the last may be smaller.

    Args:
        forest: of the rows.
        rows: rows of a batch.
        random: which rows of a group meet, and which small groups do.

    Returns:
        Row numbers of each batch; every row is in one batch.
    """
    nodes = forest.nodes
    parent = nodes.parent.tolist()
    last = forest.flat_token_of[forest.row_offsets[1:] - 1].cpu().numpy()
    ends = np.searchsorted(nodes.start.cpu().numpy(), last, side="right") - 1
    waiting: list[list[list[int]]] = [[] for _ in range(len(nodes) + 1)]  # the last entry is for -1, above the roots
    for row in random.permutation(len(forest)).tolist():
        waiting[ends[row]].append([row])
    batches: list[list[int]] = []
    for node in range(len(nodes) - 1, -1, -1):
        rest = _fill(waiting[node], rows, batches)
        waiting[node] = []
        if rest:
            waiting[parent[node]].append(rest)
    roots = [waiting[-1][i] for i in random.permutation(len(waiting[-1]))]
    rest = _fill(roots, rows, batches)
    return [*batches, rest] if rest else batches


def _fill(bundles: list[list[int]], rows: int, batches: list[list[int]]) -> list[int]:
    """Fill batches with bundles, the largest first; split one only where none fits.

    The rest is one bundle.
    """
    left = sorted(bundles, key=len, reverse=True)
    batch: list[int] = []
    while left:
        room = rows - len(batch)
        fitting = next((at for at, bundle in enumerate(left) if len(bundle) <= room), None)
        bundle = left.pop(-1 if fitting is None else fitting)
        batch += bundle[:room]
        if bundle[room:]:
            left.append(bundle[room:])  # no bundle was smaller
        if len(batch) == rows:
            batches.append(batch)
            batch = []
    return batch
