"""Cut a forest into parts that fit a memory limit, in the least predicted time.

Words. A *block* v is a run of tokens without a fork, at most a given length (`blocks.Blocks`). A *part* p is a set of
blocks that runs as one forward and one backward (`part.Part`). n, P, E, Q, A: a part's tokens, boundary tokens, edges,
outgoing tokens, visible pairs (`cost.Size`). M: the limit less the resident bytes.

Steps go depth first: a part is entered, then its children with everything below them one after the other, then it is
left (`layout.to_schedule`). So when a part runs, only its ancestors hold memory, and the limit is one condition per
part:

    sum of h(a, mode_a) over the ancestors a of p  +  r(p)  <=  M

    h(p, mode)  bytes that p holds while its children run                                 (`draft.held_bytes`)
                  keep       saved(n, P, E) + store * Q
                  recompute  store * Q            the K/V other parts read, and the accumulators of their gradients
                  offload    0                    both are in host memory
    r(p)        max(forward, backward)(n, P, E) + store * Q                               (`draft.peak_bytes`)
    c(p, mode)  seconds: forward + backward [+ a K/V-only pass] [+ copies to the host]    (`draft.part_seconds`)

saved(n, P, E) contains the part's own gathered copy of its boundary, which is quadratic in the cuts along a path: the
price of fine cuts. Minimise sum c subject to all conditions.

Few blocks: exactly, over all connected parts and modes                                   (`exact.solve_exactly`)

    f(v, H) = min over connected S with top v, over modes:  c(S, mode) + sum_children f(c, H + h(S, mode))
              infinite where H + r(S) > M

Many blocks: every block above the subtrees that fit whole is a separate part, since a set that fits merged also fits
as a path, and only recomputation is counted                                              (`recurrence.choose_modes`)

    f(v, H) = 0                                                       if H + w(v) <= M, w: v's subtree as one part
            = infinite                                                if H + r(v) > M
            = min over modes: price(v, mode) + sum_children f(c, H + h(v, mode))   else

with H rounded up to M / steps. If no plan fits after rounding, the planner tries the plan that keeps least with exact
figures (`recurrence.recompute_everything`); if that fails, no plan of these blocks exists.

Then the planner merges parts within the budget: inner siblings share a part, in groups of several sizes
(`siblings.batch_siblings`), and so do leaves; chains and leaves join their parent (`merge.merge_parts`). It halves the
block length from the longest run that fits uncut (`_candidates`), and takes the fastest plan under the simulation of
the full cost model (`simulate.simulate`). It never returns a plan whose peak is above the limit. If the forest has few
blocks, the plans of the built-in strategies are candidates as well (`strategies`).

Attention on the CPU needs masks for forks, and recurrences hand states to the parts below. The planner adds both to
the chosen plan (`graph.with_final_sizes`). If they break the limit, it searches again with that many bytes in reserve;
if no plan fits then, no part gets a fork (`_without_forks`). With `sharing="auto"`, several parts may each compute a
level that they read (`sharing.unshare_levels`).
"""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Literal, Protocol, runtime_checkable

import numpy as np

from treefx.errors import InputError, MemoryLimitError
from treefx.forests.forest import Forest
from treefx.planning.cost.limit import check_limit
from treefx.planning.cost.memory import without_collections
from treefx.planning.cost.model import CostModel
from treefx.planning.search.blocks import Blocks, Counts
from treefx.planning.search.draft import Draft, total_seconds
from treefx.planning.search.exact import MOST_BLOCKS, solve_exactly
from treefx.planning.search.graph import Drafted, blocks_to_networkx, measure_drafts, read_partition, with_final_sizes
from treefx.planning.search.infeasible import explain_breaking, explain_infeasible, smallest_requirement
from treefx.planning.search.merge import merge_parts
from treefx.planning.search.outlook import Outlook
from treefx.planning.search.plan import Plan
from treefx.planning.search.recurrence import Needs, choose_modes, recompute_everything
from treefx.planning.search.sharing import unshare_levels
from treefx.planning.search.siblings import batch_siblings
from treefx.planning.search.strategies import BUILT_IN, SEARCHED, Strategy, find_strategy

__all__ = ["HasCost", "plan"]

_MANY_BLOCKS = 5_000
_FEW_BLOCKS = 200
"""Most blocks for which strategies run again with finer blocks, and built-in ones compete with the search."""
_PATIENCE = 2
_SIBLINGS = (1, 2, 4, 16)
"""Most inner siblings in one part. The planner tries each number; for many drafts the fewest and the most; for very
many the fewest alone, because groups of 16 were never faster there."""
_MANY_DRAFTS = 4_000
_VERY_MANY_DRAFTS = 6_000


@runtime_checkable
class HasCost(Protocol):
    """Require a cost model: the protocol of a profile."""

    @property
    def cost(self) -> CostModel:
        """Return the model of bytes and seconds of parts."""


def plan(
    forest: Forest,
    profile: HasCost | CostModel,
    memory_limit_bytes: float | Literal["auto"] = "auto",
    *,
    strategy: "str | Strategy" = "auto",
    sharing: Literal["all", "auto"] = "all",
) -> Plan:
    """Cut a forest into parts that run within a memory limit.

    Args:
        forest: any forest.
        profile: the result of `treefx.profile` for the compiled model, or a cost model.
        memory_limit_bytes: the most bytes of tensors at any time, parameters, buffers and gradients included.
            "auto": the free memory of the forest's device, with a reserve of a tenth.
        strategy: "auto", the fastest plan found; the name of a strategy (`treefx.planning.search.strategies`);
            or a function of a networkx.DiGraph of blocks with their costs and the limit in bytes, which returns sets
            of nodes, every one a part. Runs without a fork are one block, cut where they would not fit alone. If
            the result breaks the limit, the planner calls the function again with blocks of half the length, while
            they are few.
        sharing: "all": every shared token runs in one part. "auto": a level that several parts read is computed in
            each of them where that is predicted to take less time (`Plan.unshared` names them). The plan's `forest`,
            whose edges a loss gets, then has a token and an edge per copy, and rows as before.

    Returns:
        The plan, immutable. Its predicted peak is at most the limit.

    Raises:
        MemoryLimitError: no plan fits, or the strategy's does not; the message names the token path or the part, the
            bytes it needs and the way out.
        InputError: an argument of the wrong type or value, or a strategy's result that is no tree of parts.

    Example:
        >>> def at_forks(graph, limit):
        ...     forks = [(a, b) for a, b in graph.edges if graph.out_degree(a) > 1]
        ...     return networkx.weakly_connected_components(networkx.restricted_view(graph, [], forks))
        >>> plan = treefx.plan(forest, profile, memory_limit_bytes=24 * 2**30, strategy=at_forks)
    """
    cost = _cost_of(profile).for_forest(forest)
    limit = check_limit(memory_limit_bytes, forest.device, cost)
    if sharing not in ("all", "auto"):
        raise InputError(f"sharing must be 'all' or 'auto', got {sharing!r}")
    with without_collections():
        found = _plan(Counts(forest), cost, limit, strategy)
        if sharing == "all":
            return found
        bare = _cost_of(profile)
        return unshare_levels(found, bare, lambda other: _plan(Counts(other), bare.for_forest(other), limit, strategy))


def _plan(counts: Counts, cost: CostModel, limit: int, strategy: "str | Strategy") -> Plan:
    if strategy != "auto":
        return _by_strategy(counts, cost, limit, strategy)
    bare = replace(cost, states=None)
    found = with_final_sizes(replace(_fastest(counts, bare, limit), cost=cost))
    reserve = 0
    while found.peak_bytes > limit:
        reserve = max(reserve + found.peak_bytes - limit, reserve * 5 // 4)
        try:
            found = _fastest(counts, replace(bare, resident_bytes=cost.resident_bytes + reserve), limit)
        except MemoryLimitError as error:
            chains = _without_forks(counts, cost, limit)
            if chains is None:
                raise MemoryLimitError(f"{error}; {reserve:,} of these bytes are {_held_back(cost)}") from None
            return chains
        found = with_final_sizes(replace(found, cost=cost))
    return found


def _held_back(cost: CostModel) -> str:
    names = "for attention's masks", "for states of recurrences"
    return " and ".join(name for name, is_there in zip(names, (cost.mask_element_bytes, cost.states)) if is_there)


def _without_forks(counts: Counts, cost: CostModel, limit: int) -> Plan | None:
    """Find the plan that holds least, every block a separate part, or None if it does not fit.

    A chain needs no mask.
    """
    blocks = Blocks.of(counts, smallest_requirement(counts, cost).longest)
    needs = Needs.of(blocks, cost)
    alone = replace(needs, whole=np.where(blocks.subtree_stop > blocks.stop, np.inf, needs.whole))
    drafts = recompute_everything(blocks, alone, limit - cost.resident_bytes)
    found = None if drafts is None else with_final_sizes(measure_drafts(blocks, drafts, cost, limit))
    return found if found is not None and found.peak_bytes <= limit else None


def _fastest(counts: Counts, cost: CostModel, limit: int) -> Plan:
    """Find the fastest plan, masks and states not counted."""
    budget = limit - cost.resident_bytes
    best: Drafted | None = None
    slower = 0
    for blocks in _candidates(counts, cost, budget):
        found = min(_drafted(blocks, cost, limit), key=lambda item: item.seconds, default=None)
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
        best = next(_drafted(Blocks.of(counts, need.longest), cost, limit))
    plan = best.to_plan(counts.forest, limit, "auto")
    return min([plan, *_rivals(plan, counts, limit)], key=lambda item: item.seconds)


def _rivals(best: Plan, counts: Counts, limit: int) -> Iterator[Plan]:
    """Yield the plans of built-in strategies that keep the limit, if there are few blocks.

    Masks are not counted. A plan of one part has no faster rival.
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
    """Plan by a strategy, on the coarsest blocks with which it keeps the limit.

    Raises:
        MemoryLimitError: it never keeps the limit; the message is about the coarsest blocks.
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
        found = with_final_sizes(measure_drafts(blocks, drafts, cost, limit, name))
        if found.peak_bytes <= limit:
            return found
        refusal = refusal or MemoryLimitError(explain_breaking(found))
    assert refusal is not None
    raise refusal


def _is_enough(best: Drafted, slower: int, blocks: int) -> bool:
    """Return True if finer cuts are not worth trying.

    Finer cuts keep more of a path; otherwise they only add parts.
    """
    patience = _PATIENCE if best.layout.keep.any() else 1
    return slower >= patience or blocks > _MANY_BLOCKS or len(best.layout) == 1


def _cost_of(profile: HasCost | CostModel) -> CostModel:
    if isinstance(profile, CostModel):
        return profile
    if not isinstance(profile, HasCost):
        raise InputError(
            f"plan expects the result of treefx.profile(compiled, forest), or a CostModel, got {type(profile).__name__}"
        )
    return profile.cost


def _drafted(blocks: Blocks, cost: CostModel, limit: int) -> Iterator[Drafted]:
    """Yield parts of these blocks, measured and simulated; none above the limit."""
    for alternatives in _solutions(blocks, cost, limit - cost.resident_bytes):
        for drafts in alternatives:
            found = Drafted.of(blocks.counts, drafts, cost)
            if found.peak_bytes <= limit:
                yield found
                break


def _solutions(blocks: Blocks, cost: CostModel, budget: float) -> Iterator[list[list[Draft]]]:
    """Yield drafts that fit, per search method; alternatives of a method, fastest first."""
    needs = Needs.of(blocks, cost)
    drafts = None
    if needs.fit(blocks, budget):
        drafts = choose_modes(blocks, needs, budget) or recompute_everything(blocks, needs, budget)
    if drafts is not None:
        yield _merged(drafts, cost, budget)
    if len(blocks) <= MOST_BLOCKS:
        exact = solve_exactly(blocks, cost, budget)
        if exact is not None:
            yield [merge_parts(exact, cost, budget)]


def _merged(drafts: list[Draft], cost: CostModel, budget: float) -> list[list[Draft]]:
    """Merge drafts, by several sizes of sibling groups, fastest first; very many by one size."""
    outlook = Outlook.of(drafts, cost, budget)
    if len(outlook.drafts) > _VERY_MANY_DRAFTS:
        return [merge_parts(drafts, cost, budget, outlook)]
    sizes: tuple[int, ...] = _SIBLINGS if len(outlook.drafts) <= _MANY_DRAFTS else (_SIBLINGS[0], _SIBLINGS[-1])
    if len(drafts) == 1 and not outlook.may_batch.any():
        sizes = sizes[:1]
    made = [merge_parts(batch_siblings(drafts, cost, budget, many, outlook), cost, budget) for many in sizes]
    return sorted(made, key=lambda roots: total_seconds(cost, roots))


def _candidates(counts: Counts, cost: CostModel, budget: float) -> Iterator[Blocks]:
    """Cut the forest ever finer, by halves from the longest run that fits alone.

    Lengths that cut no further are skipped.
    """
    longest = cost.most_tokens(budget, len(counts.depth))
    seen = -1
    while longest >= counts.shortest_block or seen < 0:
        blocks = Blocks.of(counts, max(longest, 1))
        if len(blocks) != seen:
            yield blocks
        seen = len(blocks)
        longest //= 2
