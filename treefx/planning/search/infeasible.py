"""Explain why no plan fits: the path with the highest demand, its bytes, and a way out."""

from dataclasses import dataclass

import numpy as np

from treefx.planning.cost.model import CostModel
from treefx.planning.search.blocks import Blocks, Counts, above_sums
from treefx.planning.search.part import Keep
from treefx.planning.search.plan import Plan
from treefx.planning.search.recurrence import Needs

__all__ = ["Requirement", "explain_breaking", "explain_infeasible", "smallest_requirement"]


@dataclass(frozen=True)
class Requirement:
    """Hold the least memory a forest can run in, and the tokens that need it.

    Attributes:
        limit_bytes: the smallest limit for which there is a plan.
        longest: block length of that plan.
        start, stop: the tokens [start, stop) that run at the peak.
        held_bytes: least bytes held by their ancestors then.
        run_bytes: bytes of the run itself.
    """

    limit_bytes: int
    longest: int
    start: int
    stop: int
    held_bytes: int
    run_bytes: int


def smallest_requirement(counts: Counts, cost: CostModel) -> Requirement:
    """Find the least memory of any plan, over the block lengths that the planner tries."""
    found = _requirement(counts, cost, counts.shortest_block)
    longest = 2 * counts.shortest_block
    while longest < 2 * len(counts.depth):
        # Longer blocks run in more, but hold fewer copies of their boundaries.
        other = _requirement(counts, cost, longest)
        found = min(found, other, key=lambda item: item.limit_bytes)
        longest *= 2
    return found


def _requirement(counts: Counts, cost: CostModel, longest: int) -> Requirement:
    blocks = Blocks.of(counts, longest)
    needs = Needs.of(blocks, cost)
    mode: Keep = "offload" if "offload" in needs.hold else "recompute"
    own, held = needs.own[mode], above_sums(blocks.end, needs.hold[mode])
    worst = int((held + own).argmax())
    return Requirement(
        limit_bytes=int(np.ceil(cost.resident_bytes + held[worst] + own[worst])) + 1,
        longest=longest,
        start=int(blocks.start[worst]),
        stop=int(blocks.stop[worst]),
        held_bytes=round(held[worst]),
        run_bytes=round(own[worst]),
    )


def explain_infeasible(counts: Counts, cost: CostModel, limit: int, need: Requirement) -> str:
    """Write the text of the refusal."""
    forest = counts.forest
    depth, last = int(counts.depth[need.start]), int(counts.depth[need.stop - 1])
    row = int(forest.row_order[forest.first_rank[need.start]])
    rows = int(forest.multiplicity[need.start])
    others = f" and {rows - 1} more" if rows > 1 else ""
    ways = [f"raise the limit to at least {need.limit_bytes:,} bytes"]
    if need.held_bytes > need.run_bytes:
        ways.append(f"shorten the path above these tokens ({depth:,} tokens)")
        if cost.host_bytes_per_second is None:
            ways.append("let K/V go to host memory (a cost model with host_bytes_per_second)")
    if cost.resident_bytes > limit // 2:
        ways.append("keep parameters in a smaller dtype or on more devices")
    return (
        f"memory_limit_bytes={limit:,} expected room for every token path, but tokens {depth:,} to {last:,} of row "
        f"{row}{others} need {need.limit_bytes:,} bytes even if everything above them is recomputed: "
        f"{round(cost.resident_bytes):,} for parameters, gradients and the forest, {need.held_bytes:,} for the K/V of "
        f"their {depth:,} ancestors and {need.run_bytes:,} to run; {', or '.join(ways)}"
    )


def explain_breaking(found: Plan) -> str:
    """Write the refusal of a strategy's plan: the part that needs most."""
    worst = max(found.moments, key=lambda moment: moment.peak_bytes)
    part, forest = found.parts[worst.step.part], found.forest
    first, last = int(part.tokens[0]), int(part.tokens[-1])
    row = int(forest.row_order[forest.first_rank[first]])
    return (
        f"strategy {found.strategy!r} breaks memory_limit_bytes={found.memory_limit_bytes:,}: the {worst.step.kind} of "
        f"part {part.index} of {len(found.parts)} ({len(part):,} tokens, packed {first:,} to {last:,}, the first of "
        f"row {row}) needs {found.peak_bytes:,} bytes, {round(worst.held_bytes):,} of them held when it starts; raise "
        "the limit to that, cut finer or above it, or use strategy='auto'"
    )
