"""Recompute levels of a forest in several parts where sharing them would cost more.

Sharing a node across a cut costs a part for it: launches, its K/V handed out, gradients gathered. Replaying it costs
its tokens once more in every part below. If a part costs more than the copies of its node, the node is replayed, and
the planner plans the forest with the copies again. It takes the plan of less predicted time, so that a level is shared
unless sharing is predicted to be slower.

Copies are tokens like any other, and the weights of rows go with the rows, so that the plan stays exact.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from treefx.errors import MemoryLimitError
from treefx.forests.forest import Forest
from treefx.forests.subset import split_tokens
from treefx.planning.cost.model import CostModel, Seconds
from treefx.planning.search.blocks import IntArray
from treefx.planning.search.plan import Plan, Unshared

__all__ = ["unshare_levels"]


@dataclass(frozen=True, eq=False)
class _Levels:
    """Hold the nodes of a planned forest that hand K/V to other parts.

    Attributes:
        node: int64 [L], numbers of the nodes.
        group: int64 [M], the part in which each node of the forest begins.
        copies: int64 [L], parts that begin directly below, and one more if other tokens follow.
        replay, part: float64 [L], seconds of computing the copies, and of a part.
    """

    node: IntArray
    group: IntArray
    copies: IntArray
    replay: npt.NDArray[np.float64]
    part: npt.NDArray[np.float64]

    def __getitem__(self, chosen: Any) -> "_Levels":
        columns = {name: getattr(self, name)[chosen] for name in ("node", "copies", "replay", "part")}
        return replace(self, **columns)


def unshare_levels(found: Plan, cost: CostModel, make_plan: Callable[[Forest], Plan]) -> Plan:
    """Return the plan, or a faster one of the forest with some levels not shared.

    Args:
        found: the fastest plan with every level shared.
        cost: of the model, without the forest.
        make_plan: plans another forest under the same limit.
    """
    levels = _levels(found, cost)
    best = found
    for chosen in _choices(levels):
        forest = split_tokens(found.forest, chosen.node.tolist(), chosen.group.tolist())
        try:
            other = make_plan(forest)
        except MemoryLimitError:
            continue
        if other.seconds < best.seconds:
            best = replace(other, unshared=tuple(_describe(found, chosen)))
    return best


def _choices(levels: _Levels) -> Iterator[_Levels]:
    """Yield all levels whose part costs more than their copies, then the best half of them."""
    gain = levels.part - levels.replay
    worth = np.flatnonzero(gain > 0)
    worth = worth[np.argsort(-gain[worth], kind="stable")]
    for count in dict.fromkeys((len(worth), len(worth) // 2)):
        if count:
            yield levels[np.sort(worth[:count])]


def _levels(found: Plan, cost: CostModel) -> _Levels:
    nodes = found.forest.nodes
    start, stop, parent = (column.cpu().numpy() for column in (nodes.start, nodes.stop, nodes.parent))
    part_of = np.empty(found.forest.num_tokens, dtype=np.int64)
    for part in found.parts:
        part_of[part.tokens.numpy()] = part.index
    group, last = part_of[start], part_of[stop - 1]
    below = np.flatnonzero(parent >= 0)
    pairs = np.unique(np.stack([parent[below], group[below]], axis=1), axis=0)
    parts_below = np.bincount(pairs[:, 0], minlength=len(start))
    crosses = np.bincount(pairs[:, 0], weights=pairs[:, 1] != last[pairs[:, 0]], minlength=len(start)) > 0
    node = np.flatnonzero(crosses & (parts_below > 1))
    depth = found.forest.depth.cpu().numpy().astype(np.int64)[start[node]]
    tokens = stop[node] - start[node]
    seen = tokens * depth + tokens * (tokens + 1) // 2
    runs: tuple[Seconds, ...] = (cost.forward_seconds, cost.backward_seconds)
    again = sum(run.token * tokens + run.pair * seen for run in runs)
    launches = sum(run.part for run in (*runs, cost.kv_seconds))
    copies = parts_below[node]
    return _Levels(node, group, copies, (copies - 1) * again, np.full(len(node), launches))


def _describe(found: Plan, levels: _Levels) -> Iterable[Unshared]:
    forest, nodes = found.forest, found.forest.nodes
    for node, copies, replay, part in zip(
        levels.node.tolist(), levels.copies.tolist(), levels.replay.tolist(), levels.part.tolist(), strict=True
    ):
        start, stop = int(nodes.start[node]), int(nodes.stop[node])
        first = int(forest.first_rank[start])
        yield Unshared(
            row=int(forest.row_order[first]),
            rows=int(forest.multiplicity[start]),
            depth=int(forest.depth[start]),
            tokens=stop - start,
            copies=copies,
            replay_seconds=replay,
            part_seconds=part,
        )
