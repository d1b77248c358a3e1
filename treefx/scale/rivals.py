"""Compute the busiest rank's cost under other ways to share rows, for comparison.

========================  =============================================================================================
whole trees, LPT          longest first (Graham 1969), no tree is cut
whole trees, KK           largest differencing (Karmarkar and Karp 1982, for k sets; used by verl)
rows, LPT                 every row alone, no prefix is shared
========================  =============================================================================================
"""

import heapq

import numpy as np

from treefx.scale.outline import Outline
from treefx.scale.packing import longest_first
from treefx.scale.price import Cost, FloatArray, price

__all__ = ["largest_differencing", "rival_balances"]


def rival_balances(outline: Outline, ranks: int, cost: Cost = None) -> dict[str, float]:
    """By name, the busiest rank's cost over the lower bound that `split` is measured by."""
    priced = price(outline, cost)
    ends = np.append(np.flatnonzero(outline.shared == 0), len(outline))
    trees = priced.cost(priced.amounts(ends[:-1], ends[1:]))
    lower = priced.lower_bound(ranks)
    return {
        "whole trees, LPT": _busiest(trees, ranks) / lower,
        "whole trees, KK": float(largest_differencing(trees, ranks).max()) / lower,
        "rows, LPT": _busiest(priced.rows, ranks) / lower,
    }


def _busiest(cost: FloatArray, ranks: int) -> float:
    return float(np.bincount(longest_first(cost, ranks), weights=cost, minlength=ranks).max())


def largest_differencing(cost: FloatArray, ranks: int) -> FloatArray:
    """float64 [ranks]: loads after the largest differencing method.

    Every piece begins as a separate partition, with all ranks but one empty. The two of the largest spread become
    one: the fullest rank of one with the emptiest of the other, and so on.
    """
    heap = []
    for number, value in enumerate(cost.tolist()):
        loads = np.zeros(ranks)
        loads[-1] = value
        heap.append((-value, number, loads))
    heapq.heapify(heap)
    number = len(heap)
    while len(heap) > 1:
        _, _, first = heapq.heappop(heap)
        _, _, second = heapq.heappop(heap)
        loads = np.sort(first + second[::-1])
        heapq.heappush(heap, (float(loads[0] - loads[-1]), number, loads))
        number += 1
    result: FloatArray = heap[0][2]
    return result
