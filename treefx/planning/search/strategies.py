"""Register strategies that cut a tree of blocks: functions of a graph and a limit.

A strategy gets the networkx graph of `graph.blocks_to_networkx` and the memory limit in bytes, and returns a partition
of the nodes. Its result goes through the same simulation as every plan. Register one with `register`, or give it to
`treefx.plan`.

==============  =======================================================================================================
exact           all ways to cut and keep (`exact.solve_exactly`); at most `MOST_BLOCKS` blocks
recurrence      least recomputation block by block, then merging (`recurrence`, `siblings`, `merge`)
tree training   connected parts packed greedily from the leaves up to a capacity, all kept (Tree Training, arXiv
                2511.00413, as its text describes it)
one branch      every node a part, inner ones forward twice, one root-to-leaf path at a time (AReaL's DTA)
micro-batches   rows in order, as many as run together; prefixes that several batches need are parts above them,
                computed once (TRL, verl and AReaL's tree mode compute them in each: `policies`)
contiguous      rows in order in ranges of equal predicted time, as few ranges as fit
==============  =======================================================================================================
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from treefx.errors import InputError
from treefx.planning.cost.model import CostModel
from treefx.planning.search.blocks import Blocks
from treefx.planning.search.draft import Draft, in_order, total_seconds
from treefx.planning.search.exact import MOST_BLOCKS, solve_exactly
from treefx.planning.search.graph import Group, Partition, peak_of
from treefx.planning.search.merge import merge_parts
from treefx.planning.search.recurrence import Needs, choose_modes, recompute_everything
from treefx.planning.search.siblings import batch_siblings

if TYPE_CHECKING:
    import networkx as nx

__all__ = ["BUILT_IN", "SEARCHED", "Strategy", "find_strategy", "register", "strategy_names"]

Strategy: TypeAlias = "Callable[[nx.DiGraph[int], int], Partition]"

_STRATEGIES: dict[str, Strategy] = {}
_SIBLINGS = (1, 4, 16)


def register(name: str) -> Callable[[Strategy], Strategy]:
    """Register a strategy by name, for `treefx.plan` and `treefx plan --compare`.

    Example:
        >>> @treefx.planning.search.strategies.register("everything at once")
        ... def everything(graph, limit):
        ...     return [set(graph)]
    """

    def keep(strategy: Strategy) -> Strategy:
        _STRATEGIES[name] = strategy
        return strategy

    return keep


def strategy_names() -> tuple[str, ...]:
    """Return the names that `treefx.plan` knows in addition to "auto"."""
    return tuple(_STRATEGIES)


def find_strategy(strategy: Any) -> tuple[str, Strategy]:
    """Find the name and function of a strategy.

    Raises:
        InputError: no such name, or not a function.
    """
    if callable(strategy):
        return getattr(strategy, "__name__", repr(strategy)), strategy
    if strategy not in _STRATEGIES:
        names = ", ".join(repr(name) for name in ("auto", *_STRATEGIES))
        raise InputError(f"strategy must be {names} or a function (graph, limit) -> partition, got {strategy!r}")
    return strategy, _STRATEGIES[strategy]


@register("exact")
def exact(graph: "nx.DiGraph[int]", limit: int) -> Partition:
    """Find the fastest partition into connected parts."""
    blocks, cost = _source(graph)
    if len(blocks) > MOST_BLOCKS:
        raise InputError(
            f"strategy 'exact' tries every way to cut, at most {MOST_BLOCKS} blocks, got {len(blocks)}; use 'auto'"
        )
    found = solve_exactly(blocks, cost, limit - cost.resident_bytes)
    return _groups(blocks, found) if found is not None else _nodes(graph, "recompute")


@register("recurrence")
def recurrence(graph: "nx.DiGraph[int]", limit: int) -> Partition:
    """Minimize recomputation, and merge parts in the fastest way."""
    blocks, cost = _source(graph)
    budget = limit - cost.resident_bytes
    needs = Needs.of(blocks, cost)
    drafts = choose_modes(blocks, needs, budget) or recompute_everything(blocks, needs, budget)
    if drafts is None:
        return _nodes(graph, "recompute")
    merged = [merge_parts(batch_siblings(drafts, cost, budget, many), cost, budget) for many in _SIBLINGS]
    return _groups(blocks, min(merged, key=lambda roots: total_seconds(cost, roots)))


@register("tree training")
def tree_training(graph: "nx.DiGraph[int]", limit: int) -> Partition:
    """Pack parts greedily, with the largest capacity that fits, by halves."""
    return _first_that_fits(graph, limit, (_packed(graph, most) for most in _capacities(graph, limit)))


def _packed(graph: "nx.DiGraph[int]", capacity: int) -> list[Group]:
    """Merge from the leaves up: a block absorbs parts below it that fit, smallest first."""
    tokens = {block: int(graph.nodes[block]["tokens"]) for block in graph}
    part: dict[int, list[int]] = {}
    for block in sorted(graph, reverse=True):
        part[block] = [block]
        for child in sorted(graph.successors(block), key=lambda child: (tokens[child], child)):
            if tokens[block] + tokens[child] <= capacity:
                tokens[block] += tokens[child]
                part[block] += part.pop(child)
    return [Group(blocks) for blocks in part.values()]


@register("one branch")
def one_branch(graph: "nx.DiGraph[int]", limit: int) -> Partition:
    """Make every block a part that keeps only its K/V."""
    return _nodes(graph, "recompute")


@register("micro-batches")
def micro_batches(graph: "nx.DiGraph[int]", limit: int) -> Partition:
    """Fill batches with whole paths of leaves, in order, up to the largest fitting size.

    The size is found by halving.
    """
    return _first_that_fits(graph, limit, (_batched(graph, most) for most in _capacities(graph, limit)))


def _batched(graph: "nx.DiGraph[int]", capacity: int) -> list[Group]:
    seen: set[int] = set()
    batch, filled, batch_of = 0, 0, {}
    for leaf in _leaves(graph):
        path = _path_to(graph, leaf)
        added = sum(graph.nodes[block]["tokens"] for block in path if block not in seen)
        if seen and filled + added > capacity:
            batch, filled, seen = batch + 1, 0, set()
            added = sum(graph.nodes[block]["tokens"] for block in path)
        batch_of[leaf], filled = batch, filled + added
        seen.update(path)
    return _by_ranges(graph, batch_of)


@register("contiguous")
def contiguous(graph: "nx.DiGraph[int]", limit: int) -> Partition:
    """Split leaves in order into ranges of equal time: the fewest, or twice as many, ..."""
    leaves = _leaves(graph)
    most = _capacities(graph, limit)[0]
    fewest = min(-(-_tokens(graph) // most), len(leaves))
    counts = [*(fewest << power for power in range((len(leaves) // fewest).bit_length())), len(leaves)]
    return _first_that_fits(graph, limit, (_evenly(graph, leaves, count) for count in counts))


def _evenly(graph: "nx.DiGraph[int]", leaves: list[int], count: int) -> list[Group]:
    seconds = np.array([graph.nodes[block]["seconds"] for block in sorted(graph)]).cumsum()
    place = (seconds[leaves] / seconds[-1] * count).astype(np.int64).clip(max=count - 1)
    return _by_ranges(graph, dict(zip(leaves, place.tolist(), strict=True)))


def _by_ranges(graph: "nx.DiGraph[int]", range_of: dict[int, int]) -> list[Group]:
    """Group leaves by ranges; prefixes of several ranges are parts above them."""
    first, last = dict(range_of), dict(range_of)
    for block in sorted(graph, reverse=True):
        below = list(graph.successors(block))
        first[block] = min([first[child] for child in below], default=first.get(block, 0))
        last[block] = max([last[child] for child in below], default=last.get(block, 0))
    parts: defaultdict[tuple[Any, ...], list[int]] = defaultdict(list)
    key_of: dict[int, tuple[Any, ...]] = {}
    for block in sorted(graph):
        above = next(iter(graph.predecessors(block)), None)
        span = (first[block], last[block])
        parent = None if above is None else key_of[above]
        same = parent is not None and parent[:2] == span
        key = parent if same and parent is not None else (*span, None if parent is None else parts[parent][0])
        key_of[block] = key
        parts[key].append(block)
    return [Group(blocks) for blocks in parts.values()]


def _first_that_fits(graph: "nx.DiGraph[int]", limit: int, partitions: Iterator[list[Group]]) -> list[Group]:
    """Return the first partition within the limit, without repeats; else the last one."""
    seen = None
    for partition in partitions:
        if partition != seen and peak_of(graph, partition) <= limit:
            return partition
        seen = partition
    assert seen is not None
    return seen


def _tokens(graph: "nx.DiGraph[int]") -> int:
    return sum(int(graph.nodes[block]["tokens"]) for block in graph)


def _capacities(graph: "nx.DiGraph[int]", limit: int) -> list[int]:
    """List the most tokens that run alone, at most all, and its halves down to one."""
    _, cost = _source(graph)
    tokens = _tokens(graph)
    most = max(cost.most_tokens(limit - cost.resident_bytes, tokens), 1)
    return [most >> halved for halved in range(most.bit_length())]


def _source(graph: "nx.DiGraph[int]") -> tuple[Blocks, CostModel]:
    return graph.graph["blocks"], graph.graph["cost"]


def _leaves(graph: "nx.DiGraph[int]") -> list[int]:
    return [block for block in sorted(graph) if not graph.out_degree(block)]


def _path_to(graph: "nx.DiGraph[int]", block: int) -> list[int]:
    path = [block]
    while above := list(graph.predecessors(path[-1])):
        path += above
    return path


def _nodes(graph: "nx.DiGraph[int]", keep: Any) -> list[Group]:
    return [Group([block], keep) for block in sorted(graph)]


def _groups(blocks: Blocks, roots: list[Draft]) -> list[Group]:
    """Convert drafts to sets of blocks."""
    found = []
    for draft, _ in in_order(roots):
        inside = [np.arange(*np.searchsorted(blocks.start, span)) for span in draft.ranges]
        found.append(Group(np.concatenate(inside).tolist(), draft.keep))
    return found


BUILT_IN = strategy_names()
"""Names of this module's strategies."""
SEARCHED = ("exact", "recurrence")
"""Names of the strategies that "auto" consists of."""
