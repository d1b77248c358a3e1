"""Assign rows to ranks as evenly as the search finds, with duplicates as a cost.

1. *Contiguous ranges* of rows in depth-first order, as even as they go (`ranges.smallest_bound`).
2. *Cut and pack*: the ranges that compute the least twice within a bound (`ranges.fewest_duplicates`), small trees
   whole and large ones cut, go to ranks longest first (`packing.longest_first`); for several bounds.

The one with the least `max / lower bound + duplicated / distinct` is taken: a hundredth of the step's time weighs as
much as a hundredth of all tokens computed twice. How many bounds are tried depends on the numbers of rows and pieces,
never on a clock, so every process finds the same.

A rank's cost is the sum over its rows, so one long row, which cannot be cut, bounds the step. Context parallelism
removes that bound.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from treefx.errors import InputError
from treefx.scale.outline import IntArray, Outline
from treefx.scale.packing import longest_first, rank_amounts
from treefx.scale.price import Cost, FloatArray, Priced, price
from treefx.scale.ranges import fewest_duplicates, smallest_bound

__all__ = ["Split", "split"]

_BOUNDS = (1.0, 1.03, 1 / 2, 1 / 3, 1.06, 1 / 4, 2 / 3, 1.1, 1 / 6, 1 / 8)
"""Costs of a piece over the lower bound, in the order in which they are tried."""
_MOST_VISITS = 60_000
_VISITS_PER_PIECE = 5
"""Rows that cutting may visit for all bounds together, and the extra count of a piece."""
_GOOD = 1.002
"""Assignments this even, duplicates counted, are not improved."""


@dataclass(frozen=True, eq=False)
class Split:
    """Assign rows to ranks, with the cost of each rank.

    Attributes:
        rows: per rank, int64 [k], ascending row numbers in the caller's order; may be empty.
        tokens: int64 [ranks], distinct tokens of each rank.
        cost: float64 [ranks], predicted cost of each.
        lower_bound: least possible cost of the busiest rank.
        distinct_tokens: distinct tokens of all rows together.
    """

    rows: tuple[IntArray, ...]
    tokens: IntArray
    cost: FloatArray
    lower_bound: float
    distinct_tokens: int

    @property
    def balance(self) -> float:
        """Return the busiest rank's cost over the lower bound, at least 1."""
        return float(self.cost.max()) / self.lower_bound

    @property
    def duplicated(self) -> float:
        """Return the tokens computed again on further ranks, per distinct token."""
        return float(self.tokens.sum()) / self.distinct_tokens - 1.0


def split(outline: Outline, ranks: int, cost: Cost = None) -> Split:
    """Assign rows to ranks.

    Args:
        outline: the rows.
        ranks: number of processes.
        cost: see `treefx.scale.shard_rows`.

    Raises:
        InputError: `ranks` is no positive whole number, or `cost` is none.
    """
    if isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 1:
        raise InputError(f"ranks must be a whole number of at least 1, got {ranks!r}")
    priced = price(outline, cost)
    if not 0.0 < priced.lower_bound(ranks) < np.inf:
        raise InputError(f"cost must be a number above 0 for every row, got {priced.rows.min()} to {priced.rows.max()}")
    bound, ends = smallest_bound(priced, ranks)
    best = _Placed.of(priced, ends, np.arange(len(ends) - 1), ranks)
    for found in _cut_and_packed(priced, ranks, bound):
        if best.score <= _GOOD:
            break
        best = min(best, found, key=lambda placed: placed.score)
    return best.finish()


@dataclass(frozen=True, eq=False)
class _Placed:
    """Contiguous ranges of rows, the rank of each, and tokens and pairs per rank."""

    priced: Priced
    ends: IntArray
    rank_of: IntArray
    amounts: IntArray

    @classmethod
    def of(cls, priced: Priced, ends: IntArray, rank_of: IntArray, ranks: int) -> "_Placed":
        return cls(priced, ends, rank_of, rank_amounts(priced, ends, rank_of, ranks))

    @cached_property
    def score(self) -> float:
        """Return the score of an assignment, in units of the lower bound; less is better."""
        lower = self.priced.lower_bound(self.amounts.shape[1])
        busiest = float(self.priced.cost(self.amounts).max()) / lower
        return busiest + float(self.amounts[0].sum()) / self.priced.outline.tokens - 1.0

    def finish(self) -> Split:
        """The rows of every rank."""
        outline, ranks = self.priced.outline, self.amounts.shape[1]
        rank_of_row = np.repeat(self.rank_of, np.diff(self.ends))
        order = np.lexsort((outline.row, rank_of_row))
        rows, borders = outline.row[order], np.searchsorted(rank_of_row[order], np.arange(ranks + 1)).tolist()
        return Split(
            rows=tuple(rows[start:stop] for start, stop in zip(borders, borders[1:], strict=False)),
            tokens=self.amounts[0],
            cost=self.priced.cost(self.amounts),
            lower_bound=self.priced.lower_bound(ranks),
            distinct_tokens=outline.tokens,
        )


def _cut_and_packed(priced: Priced, ranks: int, contiguous: float) -> Iterator[_Placed]:
    """For several bounds, one after the other."""
    lower, longest = priced.lower_bound(ranks), float(priced.rows.max())
    bounds = [contiguous, *(max(share * lower, longest) for share in _BOUNDS)]
    visits = 0
    for bound in dict.fromkeys(bounds):
        ends = fewest_duplicates(priced, bound)
        pieces = priced.cost(priced.amounts(ends[:-1], ends[1:]))
        yield _Placed.of(priced, ends, longest_first(pieces, ranks), ranks)
        visits += len(priced.outline) + _VISITS_PER_PIECE * len(pieces)
        if visits > _MOST_VISITS:
            break
