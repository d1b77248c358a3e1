"""Compute the demand of all drafts at once, and exclude drafts that no merge fits."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from treefx.planning.cost.model import CostModel
from treefx.planning.search.blocks import IntArray, above_sums
from treefx.planning.search.draft import Draft, find_ends, parents_of

__all__ = ["Outlook"]

FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Outlook:
    """Hold the current bytes of drafts, in depth-first order.

    Merging only adds to sizes, so a draft that does not fit with its smallest neighbour fits with none.

    Attributes:
        drafts: all of them.
        parent: place of the draft above each, -1 at the topmost.
        room: the budget less the bytes that its ancestors hold.
        demand: `demand_of` of each draft.
        may_merge: whether a child may join the draft, or two of its children each other.
        may_batch: whether two of its children with children may join each other.
    """

    drafts: list[Draft]
    parent: list[int]
    room: FloatArray
    demand: FloatArray
    may_merge: BoolArray
    may_batch: BoolArray

    @classmethod
    def of(cls, roots: Sequence[Draft], cost: CostModel, budget: float) -> "Outlook":
        """Evaluate the cost model for all drafts."""
        drafts, parents = parents_of(roots)
        parent, end = np.array(parents), np.array(find_ends(parents))
        tokens, boundary, edges, outgoing = np.array([draft.size[:4] for draft in drafts]).T
        twice = np.array([draft.keep != "keep" for draft in drafts])
        on_host = np.array([draft.keep == "offload" for draft in drafts])
        run = cost.run_bytes_of(tokens, boundary, edges)
        run = np.where(twice, np.maximum(run, cost.kv.of(tokens, boundary, edges)), run)
        extra = np.where(twice, cost.extra_run_bytes_per_token(True), cost.extra_run_bytes_per_token(False))
        peak = run + (cost.store_bytes_per_token + extra) * outgoing
        hold = cost.store_bytes_per_token * outgoing + np.where(twice, 0.0, cost.saved.of(tokens, boundary, edges))
        hold = np.where(on_host, 0.0, hold)
        held = above_sums(end, hold)
        highest = _highest_below(held + np.maximum(peak, hold), end)
        room = budget - held
        has_children = end > np.arange(len(end)) + 1

        def fits(first: IntArray, second: IntArray, where: FloatArray) -> BoolArray:
            """Check that `first + second` tokens run in `where` bytes, below the draft's boundary."""
            known = (first < _NONE) & (second < _NONE)
            result: BoolArray = known & (cost.run_bytes_of(first + second, boundary, np.zeros_like(first)) <= where)
            return result

        least, next_least = _least_children(parent, tokens, np.ones_like(has_children))
        inner, next_inner = _least_children(parent, tokens, has_children)
        below = room - hold
        may_merge = fits(tokens, least, room) | fits(least, next_least, below)
        return cls(drafts, parents, room, highest - held, may_merge, fits(inner, next_inner, below))


_NONE = 1 << 40
"""Token count that stands for a missing child."""


def _highest_below(value: FloatArray, end: IntArray) -> FloatArray:
    """Find the largest value among each item and its descendants."""
    pairs = np.stack([np.arange(len(end)), end], axis=1).reshape(-1)
    padded = np.append(value, 0.0)
    result: FloatArray = np.maximum.reduceat(padded, pairs)[::2]
    return result


def _least_children(parent: IntArray, tokens: IntArray, chosen: BoolArray) -> tuple[IntArray, IntArray]:
    """Count the tokens of each draft's two smallest chosen children."""
    found = np.full((2, len(parent)), _NONE)
    which = np.flatnonzero(chosen & (parent >= 0))
    which = which[np.lexsort((tokens[which], parent[which]))]
    is_first = np.append(True, parent[which][1:] != parent[which][:-1])[: len(which)]
    is_second = np.append(False, is_first[:-1])[: len(which)] & ~is_first
    for row, these in zip(found, (is_first, is_second), strict=True):
        row[parent[which[these]]] = tokens[which[these]]
    return found[0], found[1]
