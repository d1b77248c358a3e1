"""Compute the cost of a forest under the policies of other systems.

Cost model and limit are the same.

=============  ======================================================================================================
separate rows  every row alone, as in a trainer without prefix sharing
micro-batches  rows that share prefixes packed into trees up to the limit; a prefix that several micro-batches need is
               computed in each (TRL, verl, the sparse tree mode of AReaL)
one branch     one root-to-leaf path at a time, each node of the tree a part: inner nodes forward once for their K/V and
               again for their gradients (AReaL's DTA)
uncut          the whole forest as one part, without a limit
=============  ======================================================================================================
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from treefx.errors import InputError
from treefx.forests.forest import Forest
from treefx.forests.subset import select_rows
from treefx.kernels.cpu.rectangles import mask_elements
from treefx.planning.cost.model import CostModel, Size
from treefx.planning.search.blocks import Blocks, Counts
from treefx.planning.search.draft import Draft
from treefx.planning.search.graph import Drafted, with_final_sizes
from treefx.planning.search.plan import Plan

__all__ = ["Outcome", "compare_policies", "plan_policy"]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Hold the cost of one policy.

    Attributes:
        policy: its name.
        parts: number of runs with a backward.
        forward_tokens: tokens that run forward, those that only make K/V among them.
        forward_ratio: the same per distinct token.
        peak_bytes: predicted peak.
        fits: whether that is within the limit.
        seconds: predicted time.
    """

    policy: str
    parts: int
    forward_tokens: int
    forward_ratio: float
    peak_bytes: int
    fits: bool
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """Return all figures, for JSON."""
        return asdict(self)


def compare_policies(plan: Plan) -> list[Outcome]:
    """Compare the plan with the same forest under the policies of other systems."""
    counts = Counts(plan.forest)
    return [
        _outcome(plan, "treefx", len(plan.parts), plan.forest.num_tokens + plan.recomputed_tokens, plan),
        _scheduled(plan, counts, "uncut", _uncut(counts)),
        _batched(plan, "separate rows", [_path(counts, row) for row in range(len(plan.forest))]),
        _batched(plan, "micro-batches", [size for _, size in _micro_batches(plan, counts)]),
        _scheduled(plan, counts, "one branch", _one_branch(counts)),
    ]


def plan_policy(plan: Plan, policy: str) -> list[Plan]:
    """Return plans that carry out a policy.

    Run them one after the other with `treefx.forward_backward`, and add losses and gradients.

    Args:
        plan: of treefx.
        policy: as `compare_policies` names it. Losses that are sums over edges add up to the forest's.

    Raises:
        InputError: there is no such policy.
    """
    counts = Counts(plan.forest)
    if policy == "treefx":
        return [plan]
    if policy == "uncut":
        return [_played(plan, counts, _uncut(counts))]
    if policy == "one branch":
        return [_played(plan, counts, _one_branch(counts))]
    if policy not in ("separate rows", "micro-batches"):
        raise InputError(f"policy must be one that compare_policies names, got {policy!r}")
    is_rows = policy == "separate rows"
    groups = [[row] for row in range(len(plan.forest))] if is_rows else [x for x, _ in _micro_batches(plan, counts)]
    trees = [select_rows(plan.forest, rows) for rows in groups]
    return [_played(replace(plan, forest=tree), Counts(tree), _uncut(Counts(tree))) for tree in trees]


def _micro_batches(plan: Plan, counts: Counts) -> list[tuple[list[int], Size]]:
    """Fill batches with rows in lexicographic order up to the limit, each a separate tree.

    As in a plan, the bytes of masks and states are known once the batches are, and are then held in reserve.

    Returns:
        Rows and size of each batch; a row that does not fit alone is still a separate batch.
    """
    cost, reserve = plan.cost, 0.0
    budget = plan.memory_limit_bytes - cost.resident_bytes
    while True:
        batches = _filled(counts, cost, budget - reserve)
        if cost.mask_element_bytes or cost.states is not None:
            batches = [(rows, _final_size(counts.forest, rows, size)) for rows, size in batches]
        above = max((_run_bytes(cost, size) - budget for rows, size in batches if len(rows) > 1), default=0.0)
        if above <= 0:
            return batches
        reserve = max(above, 2 * reserve)


def _run_bytes(cost: CostModel, size: Size) -> float:
    """Bytes of a tree that runs at once."""
    mask, shape = cost.mask_element_bytes * size.mask, (size.tokens, 0, size.edges)
    if cost.states is None:
        return cost.run_bytes(*shape) + mask
    more = cost.states.run_bytes(size)
    handed = float(cost.states.handed_bytes(size))
    return float(max(cost.forward(*shape) + more["forward"], cost.backward(*shape) + more["backward"]) + handed + mask)


def _final_size(forest: Forest, rows: Sequence[int], size: Size) -> Size:
    """Add the elements of the masks that the tree of some rows takes, and its chains."""
    if len(rows) == 1:
        return size
    ends = forest.subtree_end.cpu().numpy()
    tokens = np.unique(np.concatenate([forest.token_of[row].cpu().numpy() for row in rows]))
    own_ends = np.searchsorted(tokens, ends[tokens])
    chains = int(np.count_nonzero(np.diff(own_ends, prepend=-1)))
    return size._replace(mask=mask_elements(own_ends), chains=chains - 1)


def _filled(counts: Counts, cost: CostModel, budget: float) -> list[tuple[list[int], Size]]:
    """Fill batches up to a number of bytes, without masks and states."""
    forest = counts.forest
    batches: list[tuple[list[int], Size]] = []
    for row, common in zip(forest.row_order.tolist(), _shared_with_previous(forest), strict=True):
        whole = _path(counts, row)
        if batches:
            rows, size = batches[-1]
            grown = _extend(size, whole, common)
            if cost.run_bytes(grown.tokens, 0, grown.edges) <= budget:
                batches[-1] = [*rows, row], grown
                continue
        batches.append(([row], whole))
    return batches


def _extend(batch: Size, row: Size, common: int) -> Size:
    """Add a row to a batch that already holds `common` of its tokens."""
    return Size(
        tokens=batch.tokens + row.tokens - common,
        boundary=0,
        edges=batch.edges + row.edges - max(common - 1, 0),
        outgoing=0,
        pairs=batch.pairs + row.pairs - common * (common + 1) // 2,
    )


def _shared_with_previous(forest: Forest) -> list[int]:
    """Return the common prefix of each row with the previous one, in lexicographic order.

    It is 0 for the first.
    """
    rows = [forest.token_of[row].cpu().numpy() for row in forest.row_order.tolist()]
    shared = [0]
    for before, row in zip(rows, rows[1:], strict=False):
        size = min(len(before), len(row))
        differs = np.nonzero(before[:size] != row[:size])[0]
        shared.append(int(differs[0]) if len(differs) else size)
    return shared


def _path(counts: Counts, row: int) -> Size:
    """Measure one row alone."""
    length = int(counts.forest.row_lengths[row])
    return Size(length, 0, length - 1, 0, length * (length + 1) // 2)


def _uncut(counts: Counts) -> list[Draft]:
    tokens = len(counts.depth)
    return [Draft([(0, tokens)], counts.size(0, tokens))]


def _one_branch(counts: Counts) -> list[Draft]:
    """Make every node of the tree a part; inner ones are recomputed."""
    blocks = Blocks.of(counts, len(counts.depth))
    spans = zip(blocks.start.tolist(), blocks.stop.tolist(), strict=True)
    drafts = [Draft([span], counts.size(*span), "recompute") for span in spans]
    for block, draft in enumerate(drafts):
        draft.children = [drafts[child] for child in blocks.children(block)]
    return [drafts[root] for root in blocks.roots]


def _scheduled(plan: Plan, counts: Counts, policy: str, drafts: list[Draft]) -> Outcome:
    other = _played(plan, counts, drafts)
    return _outcome(plan, policy, len(other.parts), plan.forest.num_tokens + other.recomputed_tokens, other)


def _played(plan: Plan, counts: Counts, drafts: list[Draft]) -> Plan:
    """Simulate a schedule of the plan's forest, without regard to the limit."""
    played = Drafted.of(counts, drafts, plan.cost).to_plan(plan.forest, plan.memory_limit_bytes, plan.strategy)
    return with_final_sizes(played)


def _batched(plan: Plan, policy: str, batches: Sequence[Size]) -> Outcome:
    """Predict the cost of independent batches, one after the other."""
    cost = plan.cost
    peak = cost.resident_bytes + max(_run_bytes(cost, size) for size in batches)
    return Outcome(
        policy=policy,
        parts=len(batches),
        forward_tokens=sum(size.tokens for size in batches),
        forward_ratio=sum(size.tokens for size in batches) / plan.forest.num_tokens,
        peak_bytes=round(peak),
        fits=peak <= plan.memory_limit_bytes,
        seconds=sum(cost.forward_seconds(size) + cost.backward_seconds(size) for size in batches),
    )


def _outcome(plan: Plan, policy: str, parts: int, forward_tokens: int, other: Plan) -> Outcome:
    return Outcome(
        policy=policy,
        parts=parts,
        forward_tokens=forward_tokens,
        forward_ratio=forward_tokens / plan.forest.num_tokens,
        peak_bytes=other.peak_bytes,
        fits=other.peak_bytes <= plan.memory_limit_bytes,
        seconds=other.seconds,
    )
