"""Assign pieces to ranks, longest first, and compute the cost of each rank.

Common prefixes of a rank's pieces count once.
"""

import heapq
from collections import defaultdict

import numpy as np

from treefx.scale.outline import IntArray
from treefx.scale.price import FloatArray, Priced

__all__ = ["longest_first", "rank_amounts"]


def longest_first(cost: FloatArray, ranks: int) -> IntArray:
    """Assign each piece to the least loaded rank, longest first (Graham 1969).

    The result is at most 4/3 of the best for these pieces.

    Args:
        cost: float64 [K], of the pieces.
        ranks: how many there are.

    Returns:
        int64 [K], the rank of each.
    """
    loads = [(0.0, rank) for rank in range(ranks)]
    rank_of = np.empty(len(cost), dtype=np.int64)
    values = cost.tolist()
    for piece in np.argsort(-cost, kind="stable").tolist():
        load, rank = loads[0]
        rank_of[piece] = rank
        heapq.heapreplace(loads, (load + values[piece], rank))
    return rank_of


def rank_amounts(priced: Priced, ends: IntArray, rank_of: IntArray, ranks: int) -> IntArray:
    """int64 [2, ranks]: tokens and pairs of every rank.

    Args:
        priced: the rows.
        ends: int64 [K + 1], of contiguous ranges of them.
        rank_of: int64 [K], the rank of each range.
        ranks: how many there are.
    """
    result = np.zeros((2, ranks), dtype=np.int64)
    for total, amount in zip(result, priced.amounts(ends[:-1], ends[1:]), strict=True):
        np.add.at(total, rank_of, amount)
    for first, second in _neighbours(priced, ends, rank_of):
        common = int(priced.outline.shared[ends[first + 1] : ends[second] + 1].min())
        result[:, rank_of[second]] -= (common, common * (common + 1) // 2)
    return result


def _neighbours(priced: Priced, ends: IntArray, rank_of: IntArray) -> list[tuple[int, int]]:
    """Pieces of one tree that follow each other on a rank."""
    tree = np.cumsum(priced.outline.shared == 0)
    groups: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
    first, last = tree[ends[:-1]].tolist(), tree[ends[1:] - 1].tolist()
    found = []
    for piece, rank in enumerate(rank_of.tolist()):
        before = groups[rank, first[piece]]
        found += [(before[-1], piece)] if before else []
        groups[rank, last[piece]].append(piece)
    return found
