"""Compute the cost of contiguous ranges of rows in depth-first order on one rank.

A range computes its first row wholly, and only the new suffix of every other row. So tokens and visible pairs of [i, j)
are differences of cumulative sums, plus the recomputed prefix that row i shares with row i - 1.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from treefx.errors import InputError
from treefx.planning.cost.model import CostModel, Seconds, Size
from treefx.planning.search.planner import HasCost
from treefx.scale.outline import IntArray, Outline

__all__ = ["Cost", "FloatArray", "Priced", "price"]

FloatArray = npt.NDArray[np.float64]
Cost: TypeAlias = CostModel | HasCost | Callable[[Size], float] | None
"""A profile or its cost model; a function of a rank's tokens and visible pairs; None: a rank costs its tokens."""

_SLACK = 1.0 + 1e-9


@dataclass(frozen=True, eq=False)
class Priced:
    """Hold the rows of an outline and the cost of ranges of them.

    Attributes:
        outline: the rows.
        linear: seconds per token and per pair; None where `function` has to be asked.
        function: cost of a size; never less for a larger one.
    """

    outline: Outline
    linear: tuple[float, float] | None
    function: Callable[[Size], float]

    @cached_property
    def sums(self) -> IntArray:
        """int64 [2, R + 1]: tokens and pairs that the first rows add, each to those before it."""
        added = _amounts(self.outline.length) - self.above
        return np.concatenate([np.zeros((2, 1), dtype=np.int64), np.cumsum(added, axis=1)], axis=1)

    @cached_property
    def above(self) -> IntArray:
        """Return int64 [2, R]: tokens and pairs of the prefix that every row shares with the last."""
        return _amounts(self.outline.shared)

    def amounts(self, start: IntArray, stop: IntArray) -> IntArray:
        """int64 [2, K]: tokens and pairs of the ranges [start, stop)."""
        result: IntArray = self.sums[:, stop] - self.sums[:, start] + self.above[:, start]
        return result

    def cost(self, amounts: npt.NDArray[np.number]) -> FloatArray:
        """float64 [K], of tokens and pairs [2, K]."""
        if self.linear is not None:
            result: FloatArray = self.linear[0] * amounts[0] + self.linear[1] * amounts[1]
            return result
        return np.array([self._ask(tokens, pairs) for tokens, pairs in amounts.T.tolist()], dtype=np.float64)

    def _ask(self, tokens: float, pairs: float) -> float:
        return float(self.function(Size(int(tokens), 0, int(tokens), 0, int(pairs)))) if tokens else 0.0

    @cached_property
    def rows(self) -> FloatArray:
        """float64 [R]: every row alone."""
        return self.cost(_amounts(self.outline.length))

    def lower_bound(self, ranks: int) -> float:
        """Bound the cost of the busiest of `ranks` from below.

        The bound is an even share without duplicates, or the longest row.
        """
        return max(float(self.cost(self.sums[:, -1:] / ranks)[0]), float(self.rows.max()))

    def reach(self, bound: float) -> IntArray:
        """Return int64 [R]: the largest stop of a range from every row that costs at most `bound`."""
        if self.linear is None:
            return self._reach_by_asking(bound * _SLACK)
        sums, above = self.cost(self.sums), self.cost(self.above)
        found: IntArray = np.searchsorted(sums, sums[:-1] - above + bound * _SLACK, side="right") - 1
        return found

    def _reach_by_asking(self, bound: float) -> IntArray:
        """The same for any function that grows: stops never go back, so it is asked twice per row."""
        sums, above = self.sums.T.tolist(), self.above.T.tolist()
        stop, found = 0, []
        for start, (tokens, pairs) in enumerate(above):
            stop = max(stop, start)
            tokens, pairs = tokens - sums[start][0], pairs - sums[start][1]
            while stop < len(above) and self._ask(sums[stop + 1][0] + tokens, sums[stop + 1][1] + pairs) <= bound:
                stop += 1
            found.append(stop)
        return np.array(found, dtype=np.int64)


def price(outline: Outline, cost: Cost) -> Priced:
    """The rows of an outline with their costs.

    Raises:
        InputError: `cost` is no cost of a rank.
    """
    if cost is None:
        return _linear(outline, 1.0, 0.0)
    if not isinstance(cost, CostModel) and isinstance(cost, HasCost):
        cost = cost.cost
    if isinstance(cost, CostModel):
        forward, backward = cost.forward_seconds, cost.backward_seconds
        return _linear(outline, forward.token + backward.token, forward.pair + backward.pair)
    if isinstance(cost, Seconds):
        return _linear(outline, cost.token, cost.pair)
    if not callable(cost):
        raise InputError(
            "cost must be the result of treefx.profile, a CostModel, a function of a Size (tokens, pairs) or None, got "
            f"{type(cost).__name__}"
        )
    return Priced(outline, None, cost)


def _linear(outline: Outline, token: float, pair: float) -> Priced:
    return Priced(outline, (token, pair), lambda size: token * size.tokens + pair * size.pairs)


def _amounts(length: IntArray) -> IntArray:
    """int64 [2, K]: tokens and visible pairs of the first `length` tokens of a path."""
    return np.stack([length, length * (length + 1) // 2])
