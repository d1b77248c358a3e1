"""What the same forest costs under the policies of other systems, by the same cost model and limit.

=============  ======================================================================================================
separate rows  every row alone: what a trainer without prefix sharing runs
micro-batches  rows that share prefixes packed into trees up to the limit; a prefix that several micro-batches need is
               computed in each (TRL, verl, the sparse tree mode of AReaL)
one branch     one root-to-leaf path at a time, each node of the tree a part: inner nodes forward once for their K/V and
               again for their gradients (AReaL's DTA)
uncut          the whole forest as one part, whatever the limit
=============  ======================================================================================================
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from treefx.forest import Forest
from treefx.planning.blocks import Blocks, Counts
from treefx.planning.cost import CostModel, Size
from treefx.planning.draft import Draft, to_schedule
from treefx.planning.plan import Plan
from treefx.planning.simulate import measure_parts, simulate

__all__ = ["Outcome", "compare_policies"]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one policy costs.

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
        """All figures, for JSON."""
        return asdict(self)


def compare_policies(plan: Plan) -> list[Outcome]:
    """The plan, and the same forest under the policies of other systems."""
    counts = Counts(plan.forest)
    return [
        _outcome(plan, "treefx", len(plan.parts), plan.forest.num_tokens + plan.recomputed_tokens, plan),
        _scheduled(plan, counts, "uncut", _uncut(counts)),
        _batched(plan, "separate rows", [_path(counts, row) for row in range(len(plan.forest))]),
        _batched(plan, "micro-batches", micro_batches(counts, plan.cost, plan.memory_limit_bytes)),
        _scheduled(plan, counts, "one branch", _one_branch(counts)),
    ]


def micro_batches(counts: Counts, cost: CostModel, limit: float) -> list[Size]:
    """Rows in lexicographic order, each batch a tree of its own that is filled until the limit.

    Returns:
        Size of each batch; a row that does not fit alone is a batch of its own all the same.
    """
    forest, budget = counts.forest, limit - cost.resident_bytes
    order = forest.row_order.tolist()
    shared = _shared_with_previous(forest)
    batches: list[Size] = []
    for row, common in zip(order, shared, strict=True):
        whole = _path(counts, row)
        if batches:
            grown = _extend(batches[-1], whole, common)
            if cost.run_bytes(grown.tokens, 0, grown.edges) <= budget:
                batches[-1] = grown
                continue
        batches.append(whole)
    return batches


def _extend(batch: Size, row: Size, common: int) -> Size:
    """A batch and one more row, of which `common` tokens are there already."""
    return Size(
        tokens=batch.tokens + row.tokens - common,
        boundary=0,
        edges=batch.edges + row.edges - max(common - 1, 0),
        outgoing=0,
        pairs=batch.pairs + row.pairs - common * (common + 1) // 2,
    )


def _shared_with_previous(forest: Forest) -> list[int]:
    """Common prefix of each row with the one before it, in lexicographic order; 0 for the first."""
    rows = [forest.token_of[row].cpu().numpy() for row in forest.row_order.tolist()]
    shared = [0]
    for before, row in zip(rows, rows[1:], strict=False):
        size = min(len(before), len(row))
        differs = np.nonzero(before[:size] != row[:size])[0]
        shared.append(int(differs[0]) if len(differs) else size)
    return shared


def _path(counts: Counts, row: int) -> Size:
    """Size of one row alone."""
    length = int(counts.forest.row_lengths[row])
    return Size(length, 0, length - 1, 0, length * (length + 1) // 2)


def _uncut(counts: Counts) -> list[Draft]:
    tokens = len(counts.depth)
    return [Draft([(0, tokens)], counts.size(0, tokens))]


def _one_branch(counts: Counts) -> list[Draft]:
    """Every node of the tree a part, inner ones recomputed."""
    blocks = Blocks.of(counts, len(counts.depth))
    spans = zip(blocks.start.tolist(), blocks.stop.tolist(), strict=True)
    drafts = [Draft([span], counts.size(*span), "recompute") for span in spans]
    for draft, below in zip(drafts, blocks.children, strict=True):
        draft.children = [drafts[child] for child in below]
    return [drafts[root] for root in blocks.roots]


def _scheduled(plan: Plan, counts: Counts, policy: str, drafts: list[Draft]) -> Outcome:
    """Play a schedule without regard to the limit."""
    schedule = to_schedule(drafts)
    sizes = measure_parts(counts, schedule.parts)
    moments = simulate(schedule, sizes, plan.cost)
    other = Plan(plan.forest, schedule, tuple(sizes), tuple(moments), plan.cost, plan.memory_limit_bytes)
    return _outcome(plan, policy, len(schedule.parts), plan.forest.num_tokens + other.recomputed_tokens, other)


def _batched(plan: Plan, policy: str, batches: Sequence[Size]) -> Outcome:
    """Independent batches, one after the other."""
    cost = plan.cost
    peak = cost.resident_bytes + max(cost.run_bytes(size.tokens, 0, size.edges) for size in batches)
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
