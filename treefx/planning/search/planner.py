"""Cut a forest into parts that fit a memory limit, in the least predicted time.

Words. A *block* v is a run of tokens without a fork, at most a given length (`blocks.Blocks`). A *part* p is a set of
blocks that runs as one forward and one backward (`part.Part`). n, P, E, Q, A: a part's tokens, boundary tokens, edges,
outgoing tokens, visible pairs (`cost.Size`). M: the limit less resident bytes.

Steps go depth first: a part is entered, then its children with everything below them one after the other, then it is
left (`draft.to_schedule`). So when a part runs, only its ancestors hold memory, and the limit is one condition
per part:

    sum of h(a, mode_a) over the ancestors a of p  +  r(p)  <=  M

    h(p, mode)  bytes of p while its children run                                         (`draft.held_bytes`)
                  keep       saved(n, P, E) + store * Q
                  recompute  store * Q            the K/V other parts read, and the accumulators of their gradients
                  offload    0                    both are in host memory
    r(p)        max(forward, backward)(n, P, E) + store * Q                               (`draft.peak_bytes`)
    c(p, mode)  seconds: forward + backward [+ a K/V-only pass] [+ the way to the host]   (`draft.part_seconds`)

saved(n, P, E) contains the part's own gathered copy of its boundary, which is quadratic in the cuts along a path: the
price of fine cuts. Minimise sum c subject to all conditions.

Few blocks: exactly, over all connected parts and modes                                   (`exact.solve_exactly`)

    f(v, H) = min over connected S with top v, over modes:  c(S, mode) + sum_children f(c, H + h(S, mode))
              infinite where H + r(S) > M

Many blocks: every block above subtrees that fit is a separate part, since blocks that fit merged also fit as a path,
and only recomputation is counted
(`recurrence.choose_modes`)

    f(v, H) = 0                                                       if H + w(v) <= M, w: v's subtree as one part
            = infinite                                                if H + r(v) > M
            = min over modes: price(v, mode) + sum_children f(c, H + h(v, mode))   else

with H rounded up to M / steps. Where rounding leaves nothing, the plan that keeps least is tried with exact figures
(`recurrence.recompute_everything`); where that fails no plan of these blocks exists. Then parts are merged where there
is room: inner siblings share a part, in groups of several sizes (`siblings.batch_siblings`), and so do leaves; chains
and leaves join their parent (`merge.merge_parts`). The length of blocks is searched over halvings of the longest uncut
run (`_candidates`), and the fastest plan under the simulation of the full cost model (`simulate.simulate`) is taken.
Its peak is the promise: a plan above the limit is never returned. Where the forest has few blocks, the plans of the
built-in strategies stand for election too (`strategies`). Masks that attention on the CPU takes for forks are
counted in the plan that was chosen (`simulate.measure_masks`); where they break the limit, it is sought again with as
much in reserve, and where that leaves nothing no part gets a fork (`_without_forks`).
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Literal, Protocol, runtime_checkable

import numpy as np

from treefx.errors import InputError, MemoryLimitError
from treefx.forests.forest import Forest
from treefx.planning.cost.limit import check_limit
from treefx.planning.cost.model import CostModel, Size
from treefx.planning.search.blocks import SHORTEST_BLOCK, Blocks, Counts
from treefx.planning.search.draft import Draft, in_order, total_seconds
from treefx.planning.search.exact import MOST_BLOCKS, solve_exactly
from treefx.planning.search.graph import blocks_to_networkx, measure_drafts, read_partition
from treefx.planning.search.infeasible import explain_breaking, explain_infeasible, smallest_requirement
from treefx.planning.search.merge import merge_parts
from treefx.planning.search.plan import Plan
from treefx.planning.search.recurrence import Needs, choose_modes, recompute_everything
from treefx.planning.search.siblings import batch_siblings
from treefx.planning.search.simulate import measure_masks, simulate
from treefx.planning.search.strategies import BUILT_IN, SEARCHED, Strategy, find_strategy

__all__ = ["HasCost", "plan"]

_MANY_BLOCKS = 5_000
_FEW_BLOCKS = 200
"""Blocks up to which strategies are retried with finer ones, and built-in ones compete with the search."""
_PATIENCE = 2
_SIBLINGS = (1, 2, 4, 16)
"""How many inner siblings share a part at most: each is tried, of many drafts the fewest and the most."""
_MANY_DRAFTS = 4_000


@runtime_checkable
class HasCost(Protocol):
    """Define the planner's view of a profile."""

    @property
    def cost(self) -> CostModel:
        """Bytes and seconds of parts."""


def plan(
    forest: Forest,
    profile: HasCost | CostModel,
    memory_limit_bytes: float | Literal["auto"] = "auto",
    *,
    strategy: "str | Strategy" = "auto",
) -> Plan:
    """Cut a forest into parts that run within a memory limit.

    Args:
        forest: any forest.
        profile: result of `treefx.profile` for the compiled model, or a cost model.
        memory_limit_bytes: the most bytes of tensors at any time, parameters, buffers and gradients included.
            "auto": free memory of the forest's device, with a reserve of a tenth.
        strategy: "auto", the fastest that is found; the name of a way to cut (`treefx.planning.search.strategies`);
            or a function of a networkx.DiGraph of blocks with their costs and the limit in bytes, which returns sets
            of nodes, every one a part. Runs without a fork are one block, cut where they would not fit alone; if its
            result breaks the limit, it is called again with blocks of half the length while they are few.

    Returns:
        The plan, immutable. Its predicted peak is at most the limit.

    Raises:
        MemoryLimitError: no plan fits, or the strategy's does not; the message names the token path or the part, the
            bytes it needs and the way out.
        InputError: an argument of the wrong type or value, or a strategy returned no tree of parts.

    Example:
        >>> def at_forks(graph, limit):
        ...     forks = [(a, b) for a, b in graph.edges if graph.out_degree(a) > 1]
        ...     return networkx.weakly_connected_components(networkx.restricted_view(graph, [], forks))
        >>> plan = treefx.plan(forest, profile, memory_limit_bytes=24 * 2**30, strategy=at_forks)
    """
    cost = _cost_of(profile).for_forest(forest)
    limit = check_limit(memory_limit_bytes, forest.device, cost)
    counts = Counts(forest)
    if strategy != "auto":
        return _by_strategy(counts, cost, limit, strategy)
    found = _with_masks(_fastest(counts, cost, limit))
    reserve = 0
    while found.peak_bytes > limit:
        reserve = max(found.peak_bytes - limit, 2 * reserve)
        try:
            found = _fastest(counts, replace(cost, resident_bytes=cost.resident_bytes + reserve), limit)
        except MemoryLimitError:
            chains = _without_forks(counts, cost, limit)
            if chains is None:
                raise
            return chains
        found = _with_masks(replace(found, cost=cost))
    return found


def _with_masks(found: Plan) -> Plan:
    """The plan with masks of tiles in its moments, which depend on where forks lie."""
    sizes: Sequence[Size] = found.sizes
    if found.cost.mask_element_bytes:
        sizes = measure_masks(found.forest, found.parts, sizes)
    return replace(found, sizes=tuple(sizes), moments=tuple(simulate(found.schedule, sizes, found.cost)))


def _without_forks(counts: Counts, cost: CostModel, limit: int) -> Plan | None:
    """Return the plan that holds least, one part per block, if it fits.

    There is nothing to mask in a chain.
    """
    blocks = Blocks.of(counts, smallest_requirement(counts, cost).longest)
    needs = Needs.of(blocks, cost)
    alone = replace(needs, whole=np.where(blocks.subtree_stop > blocks.stop, np.inf, needs.whole))
    drafts = recompute_everything(blocks, alone, limit - cost.resident_bytes)
    found = None if drafts is None else measure_drafts(blocks, drafts, cost, limit)
    return found if found is not None and found.peak_bytes <= limit else None


def _fastest(counts: Counts, cost: CostModel, limit: int) -> Plan:
    """The best plan without masks."""
    budget = limit - cost.resident_bytes
    best: Plan | None = None
    slower = 0
    for blocks in _candidates(counts, cost, budget):
        found = min(_plans(blocks, cost, limit), key=lambda item: item.seconds, default=None)
        if found is not None and (best is None or found.seconds < best.seconds):
            best, slower = found, 0
        elif found is not None:
            slower += 1
        if best is not None and _is_enough(best, slower, len(blocks)):
            break
    if best is None:
        need = smallest_requirement(counts, cost)
        if need.limit_bytes > limit:
            raise MemoryLimitError(explain_infeasible(counts, cost, limit, need))
        best = next(_plans(Blocks.of(counts, need.longest), cost, limit))
    return min([best, *_rivals(best, counts, limit)], key=lambda item: item.seconds)


def _rivals(best: Plan, counts: Counts, limit: int) -> Iterator[Plan]:
    """Yield plans of built-in strategies within the limit, without masks, for few blocks.

    A single part is always the fastest.
    """
    cost = best.cost
    coarsest = next(_candidates(counts, cost, limit - cost.resident_bytes))
    if len(coarsest) > _FEW_BLOCKS or len(best.parts) == 1:
        return
    for name in (name for name in BUILT_IN if name not in SEARCHED):
        with suppress(MemoryLimitError):
            found = _by_strategy(counts, replace(cost, mask_element_bytes=0.0), limit, name)
            yield replace(found, cost=cost)


def _by_strategy(counts: Counts, cost: CostModel, limit: int, strategy: "str | Strategy") -> Plan:
    """Run a strategy on the coarsest blocks with which it keeps the limit.

    Raises:
        MemoryLimitError: it does not; the message is about the coarsest ones.
    """
    name, cut = find_strategy(strategy)
    refusal: MemoryLimitError | None = None
    for blocks in _candidates(counts, cost, limit - cost.resident_bytes):
        if refusal is not None and len(blocks) > _FEW_BLOCKS:
            break
        try:
            drafts = read_partition(blocks, cut(blocks_to_networkx(blocks, cost), limit), name)
        except InputError:
            if refusal is None:
                raise
            break
        found = _with_masks(measure_drafts(blocks, drafts, cost, limit, name))
        if found.peak_bytes <= limit:
            return found
        refusal = refusal or MemoryLimitError(explain_breaking(found))
    assert refusal is not None
    raise refusal


def _is_enough(best: Plan, slower: int, blocks: int) -> bool:
    """Return whether finer cuts cannot pay: they keep more of a path, or only add parts."""
    patience = _PATIENCE if best.recomputed_tokens else 1
    return slower >= patience or blocks > _MANY_BLOCKS or len(best.parts) == 1


def _cost_of(profile: HasCost | CostModel) -> CostModel:
    if isinstance(profile, CostModel):
        return profile
    if not isinstance(profile, HasCost):
        raise InputError(
            f"plan expects the result of treefx.profile(compiled, forest), or a CostModel, got {type(profile).__name__}"
        )
    return profile.cost


def _plans(blocks: Blocks, cost: CostModel, limit: int) -> Iterator[Plan]:
    """Plans of these blocks, measured and simulated; none above the limit."""
    for alternatives in _solutions(blocks, cost, limit - cost.resident_bytes):
        for drafts in alternatives:
            found = measure_drafts(blocks, drafts, cost, limit)
            if found.peak_bytes <= limit:
                yield found
                break


def _solutions(blocks: Blocks, cost: CostModel, budget: float) -> Iterator[list[list[Draft]]]:
    """Yield drafts that fit, by the methods for so many blocks; fastest first per method."""
    needs = Needs.of(blocks, cost)
    drafts = choose_modes(blocks, needs, budget) or recompute_everything(blocks, needs, budget)
    if drafts is not None:
        few = sum(1 for _ in in_order(drafts)) <= _MANY_DRAFTS
        groups = _SIBLINGS if few else (_SIBLINGS[0], _SIBLINGS[-1])
        merged = [merge_parts(batch_siblings(drafts, cost, budget, many), cost, budget) for many in groups]
        yield sorted(merged, key=lambda roots: total_seconds(cost, roots))
    if len(blocks) <= MOST_BLOCKS:
        exact = solve_exactly(blocks, cost, budget)
        if exact is not None:
            yield [merge_parts(exact, cost, budget)]


def _candidates(counts: Counts, cost: CostModel, budget: float) -> Iterator[Blocks]:
    """Cut the forest ever finer by halves, from the longest run that fits alone.

    Stops when a cut changes nothing.
    """
    longest = cost.most_tokens(budget, len(counts.depth))
    seen = -1
    while longest >= SHORTEST_BLOCK or seen < 0:
        blocks = Blocks.of(counts, max(longest, 1))
        if len(blocks) != seen:
            yield blocks
        seen = len(blocks)
        longest //= 2
