"""Find contiguous ranges of rows in depth-first order, which keeps shared rows together."""

from collections import deque

import numpy as np

from treefx.scale.outline import IntArray
from treefx.scale.price import Priced

__all__ = ["fewest_duplicates", "smallest_bound"]

_PRECISION = 1e-3
_GROWTH = 1.1


def smallest_bound(priced: Priced, ranks: int) -> tuple[float, IntArray]:
    """Find the least cost, within a thousandth, that bounds `ranks` contiguous ranges.

    Returns the bound and the beginnings of the ranges.

    A shorter range never costs more, so filling each up to the bound takes the fewest ranges, and the least bound is
    found by binary search.

    Returns:
        The bound; int64 [K + 1], the ranges' ends, K <= ranks.
    """
    low = priced.lower_bound(ranks)
    found = _fill(priced, low, ranks)
    if found is not None:
        return low, found
    high = low
    while found is None:
        low, high = high, high * _GROWTH
        found = _fill(priced, high, ranks)
    while high - low > _PRECISION * low:
        middle = (low + high) / 2
        ends = _fill(priced, middle, ranks)
        if ends is None:
            low = middle
        else:
            high, found = middle, ends
    return high, found


def _fill(priced: Priced, bound: float, ranks: int) -> IntArray | None:
    """Return ranges as long as the bound allows; None if it cannot be held.

    It fails with more than `ranks` ranges, or a single row above the bound.
    """
    reach = priced.reach(bound).tolist()
    ends = [0]
    while ends[-1] < len(reach):
        if len(ends) > ranks or reach[ends[-1]] == ends[-1]:
            return None
        ends.append(reach[ends[-1]])
    return np.array(ends, dtype=np.int64)


def fewest_duplicates(priced: Priced, bound: float) -> IntArray:
    """The contiguous ranges within a bound, any number of them, that compute the least twice.

    No range crosses from one tree to the next: trees within the bound stay whole, the others are cut.

    Args:
        priced: the rows.
        bound: at least the cost of every row alone.

    Returns:
        int64 [K + 1], the ranges' ends.
    """
    borders = np.append(np.flatnonzero(priced.outline.shared == 0), len(priced.outline))
    whole = priced.cost(priced.amounts(borders[:-1], borders[1:])) <= bound
    reach, above = priced.reach(bound).tolist(), priced.cost(priced.above).tolist()
    ends = [0]
    for start, stop, fits in zip(borders.tolist(), borders[1:].tolist(), whole.tolist(), strict=False):
        ends += [stop] if fits else _cut(above, reach, start, stop)
    return np.array(ends, dtype=np.int64)


def _cut(above: list[float], reach: list[int], start: int, stop: int) -> list[int]:
    """Ends of the ranges of one tree, the rows [start, stop).

    D(j) = min over i with cost(i, j) <= bound of D(i) + above(i), above(i): the cost of the prefix that row i shares
    with the row before it. Stops never go back, so the minima are those of a sliding window: linear in the rows.
    """
    least, start_of = 0.0, {start: start}
    window: deque[tuple[float, int]] = deque()
    for row in range(start, stop):
        value = least + above[row]
        while window and window[-1][0] >= value:
            window.pop()
        window.append((value, row))
        while reach[window[0][1]] <= row:
            window.popleft()
        least, start_of[row + 1] = window[0]
    ends = [stop]
    while start_of[ends[-1]] != start:
        ends.append(start_of[ends[-1]])
    return ends[::-1]
