"""Export blocks as a networkx graph, and read a strategy's partition of it as a plan.

A *partition* has networkx's meaning: sets of nodes, none empty, with every block in exactly one. Each set becomes a
part that keeps its activations; a `Group` names another mode.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from treefx.errors import InputError
from treefx.forests.forest import Forest
from treefx.planning.cost.model import CostModel
from treefx.planning.search.blocks import Blocks, Counts
from treefx.planning.search.draft import Draft, held_bytes, part_seconds, peak_bytes
from treefx.planning.search.layout import Layout, PartSizes, Play, measure_layout, play, to_schedule
from treefx.planning.search.part import Keep
from treefx.planning.search.plan import Plan
from treefx.planning.search.simulate import measure_final, simulate, to_moments, to_sizes

if TYPE_CHECKING:
    import networkx as nx

__all__ = [
    "Drafted",
    "Group",
    "Partition",
    "blocks_to_networkx",
    "measure_drafts",
    "peak_of",
    "read_partition",
    "tree_of_blocks",
    "with_final_sizes",
]


def tree_of_blocks(forest: Forest, cost: CostModel, longest: int | None = None) -> "nx.DiGraph[int]":
    """Export a forest's runs without a fork as a graph for strategies.

    The graph is that of `blocks_to_networkx`.

    Args:
        forest: any forest.
        cost: of the model, such as `treefx.profile(...).cost`.
        longest: the planner cuts runs of more tokens evenly; None: it cuts none.
    """
    counts = Counts(forest)
    return blocks_to_networkx(Blocks.of(counts, longest or len(counts.depth)), cost)


class Group(NamedTuple):
    """Name the blocks of one part and its mode."""

    blocks: Collection[int]
    keep: Keep = "keep"


Partition = Iterable[Group | Collection[int]]


def blocks_to_networkx(blocks: Blocks, cost: CostModel) -> "nx.DiGraph[int]":
    """Export the tree of blocks, parents to children, with costs of each as a separate part.

    Returns:
        Nodes numbered in packed order with `start`, `stop` (packed indices), `tokens`, `boundary` (tokens above),
        `pairs` (visible), `saved_bytes` (kept between forward and backward), `store_bytes` (K/V and their gradients,
        0 at leaves), `run_bytes` (peak) and `seconds` (forward and backward). `graph.graph` has `blocks` and `cost`.
    """
    import networkx as nx

    graph: nx.DiGraph[int] = nx.DiGraph(blocks=blocks, cost=cost)
    rows = zip(blocks.start.tolist(), blocks.stop.tolist(), blocks.subtree_stop.tolist(), strict=True)
    for block, (start, stop, end) in enumerate(rows):
        size = blocks.counts.size(start, stop, outgoing=stop - start if end > stop else 0)
        graph.add_node(
            block,
            start=start,
            stop=stop,
            tokens=size.tokens,
            boundary=size.boundary,
            pairs=size.pairs,
            saved_bytes=cost.saved(size.tokens, size.boundary, size.edges),
            store_bytes=held_bytes(cost, size, "recompute"),
            run_bytes=peak_bytes(cost, size, "keep"),
            seconds=part_seconds(cost, size, "keep", 0),
        )
    graph.add_edges_from((above, block) for block, above in enumerate(blocks.parent.tolist()) if above >= 0)
    return graph


def peak_of(graph: "nx.DiGraph[int]", partition: Partition) -> float:
    """Predict the peak in bytes of a partition of the blocks, as the planner does for plans."""
    blocks: Blocks = graph.graph["blocks"]
    drafts = read_partition(blocks, partition, "peak_of")
    return Drafted.of(blocks.counts, drafts, graph.graph["cost"]).peak_bytes


@dataclass(frozen=True, eq=False)
class Drafted:
    """Hold measured and simulated parts as columns, without an object per part.

    Attributes:
        layout: the parts.
        sizes: of the parts.
        steps: the steps in order, with memory and time.
        cost: the cost model of the simulation.
    """

    layout: Layout
    sizes: PartSizes
    steps: Play
    cost: CostModel

    @classmethod
    def of(cls, counts: Counts, drafts: list[Draft], cost: CostModel) -> "Drafted":
        """Measure the parts of a forest and play their steps."""
        layout = Layout.of_drafts(drafts)
        sizes = measure_layout(counts, layout)
        return cls(layout, sizes, play(layout, sizes, cost), cost)

    @cached_property
    def peak_bytes(self) -> int:
        """Return the same as `Plan.peak_bytes`."""
        return round(float(self.steps.peak.max()))

    @cached_property
    def seconds(self) -> float:
        """Return the same as `Plan.seconds`."""
        return float(self.steps.seconds.sum())

    def to_plan(self, forest: Forest, limit: int, strategy: str) -> Plan:
        """Build the plan with its parts."""
        schedule = to_schedule(self.layout)
        moments = to_moments(self.steps, schedule.steps)
        return Plan(forest, schedule, tuple(to_sizes(self.sizes)), tuple(moments), self.cost, limit, strategy)


def measure_drafts(blocks: Blocks, drafts: list[Draft], cost: CostModel, limit: int, strategy: str = "auto") -> Plan:
    """Simulate parts and return their plan, also above the limit."""
    return Drafted.of(blocks.counts, drafts, cost).to_plan(blocks.counts.forest, limit, strategy)


@dataclass(eq=False)
class _Quotient:
    """Hold the parts of a partition and the path of parts above each."""

    blocks: Blocks
    groups: list[Group]
    part_of: np.ndarray[Any, Any]
    path: dict[int, tuple[int, ...]] = field(default_factory=dict)


def read_partition(blocks: Blocks, partition: Partition, name: str) -> list[Draft]:
    """Read the topmost parts of a partition.

    Args:
        blocks: of the forest.
        partition: sets of blocks, or `Group`s.
        name: the strategy's, for messages.

    Raises:
        InputError: a block is in no set or in two, a set is empty or holds a number without a block, or the parts do
            not form a tree: all ancestors of a part's tokens must lie in it or on one path of parts above it.
    """
    groups = [item if isinstance(item, Group) else Group(item) for item in partition]
    quotient = _Quotient(blocks, groups, _part_of(blocks, groups, name))
    drafts = []
    for group in groups:
        spans = [(int(blocks.start[block]), int(blocks.stop[block])) for block in sorted(group.blocks)]
        drafts.append(Draft(spans, blocks.counts.size(*spans[0]), group.keep))
    roots: list[Draft] = []
    for part in sorted(range(len(groups)), key=lambda part: (_depth(blocks, groups[part]), min(groups[part].blocks))):
        path = _path(quotient, part, name)
        quotient.path[part] = (*path, part)
        (drafts[path[-1]].children if path else roots).append(drafts[part])
    return roots


def _part_of(blocks: Blocks, groups: list[Group], name: str) -> np.ndarray[Any, Any]:
    part_of = np.full(len(blocks), -1, dtype=np.int64)
    for part, group in enumerate(groups):
        inside = list(group.blocks)
        wrong = [block for block in inside if not 0 <= block < len(blocks)]
        if not inside or wrong:
            last = len(blocks) - 1
            raise InputError(f"strategy {name!r}: part {part} must hold blocks 0 to {last}, got {inside[:9]}")
        twice = part_of[inside] >= 0
        if twice.any():
            block = inside[int(np.flatnonzero(twice)[0])]
            raise InputError(f"strategy {name!r}: block {block} is in part {part_of[block]} and in part {part}")
        part_of[inside] = part
    if (part_of < 0).any():
        missing = np.flatnonzero(part_of < 0)
        raise InputError(f"strategy {name!r}: {len(missing)} of {len(blocks)} blocks are in no part, as {missing[0]}")
    return part_of


def _depth(blocks: Blocks, group: Group) -> int:
    """Count the tokens above the deepest of the group's topmost blocks.

    In this order, parts above a part come before it.
    """
    inside = set(group.blocks)
    return max(int(blocks.depth[block]) for block in inside if int(blocks.parent[block]) not in inside)


def _path(quotient: _Quotient, part: int, name: str) -> tuple[int, ...]:
    """Find the parts above a part, root first."""
    above = {int(quotient.blocks.parent[block]) for block in quotient.groups[part].blocks} - {-1}
    parents = {int(quotient.part_of[block]) for block in above} - {part}
    paths = [quotient.path.get(parent) for parent in parents]
    known = [path for path in paths if path is not None]
    longest = max(known, key=len, default=())
    if len(known) < len(paths) or not parents <= set(longest):
        raise InputError(
            f"strategy {name!r}: part {part} hangs on parts {sorted(parents)}, of which none has all others above it; "
            "parts must form a tree, so split it"
        )
    return longest


def with_final_sizes(plan: Plan) -> Plan:
    """Add masks of tiles, and states of recurrences, to a plan's moments; they depend on the places of forks."""
    if not plan.cost.mask_element_bytes and plan.cost.states is None:
        return plan
    sizes = measure_final(plan.forest, plan.parts, plan.sizes, plan.cost)
    return replace(plan, sizes=tuple(sizes), moments=tuple(simulate(plan.schedule, sizes, plan.cost)))
