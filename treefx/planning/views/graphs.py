"""Export a plan to networkx: parts, and the keys and values that cross their cuts."""

from typing import TYPE_CHECKING

import numpy as np

from treefx.planning.search.part import outgoing
from treefx.planning.search.plan import Plan

if TYPE_CHECKING:
    import networkx as nx

__all__ = ["plan_to_networkx"]


def plan_to_networkx(plan: Plan, rank: int | None = None) -> "nx.DiGraph[int]":
    """The graph that `Plan.to_networkx` documents."""
    import networkx as nx

    seconds = np.bincount([m.step.part for m in plan.moments], weights=[m.seconds for m in plan.moments])
    peaks = np.zeros(len(plan.parts))
    np.maximum.at(peaks, [m.step.part for m in plan.moments], [m.peak_bytes for m in plan.moments])
    unshared = [item.to_dict() for item in plan.unshared]
    graph: nx.DiGraph[int] = nx.DiGraph(
        strategy=plan.strategy, memory_limit_bytes=plan.memory_limit_bytes, unshared=unshared
    )
    for part, size in zip(plan.parts, plan.sizes, strict=True):
        graph.add_node(
            part.index,
            tokens=size.tokens,
            boundary=size.boundary,
            bytes=round(float(peaks[part.index])),
            seconds=float(seconds[part.index]),
            mode=part.keep if part.children else "leaf",
            rank=rank,
        )
    ends = plan.forest.subtree_end.cpu().numpy()
    for part in plan.parts:
        tokens = outgoing(plan.forest, part).numpy() if part.children else np.zeros(0, dtype=np.int64)
        for child in part.children:
            below = plan.parts[child].tokens.numpy()
            read = int((np.searchsorted(below, ends[tokens]) > np.searchsorted(below, tokens)).sum())
            graph.add_edge(part.index, child, kv_tokens=read, kv_bytes=read * plan.cost.kv_bytes_per_token)
    return graph
