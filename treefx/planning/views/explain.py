"""Format a plan: a line per part, the binding step, and policies of other systems."""

from rich.table import Table

from treefx.planning.search.plan import Plan
from treefx.planning.search.policies import compare_policies
from treefx.planning.search.simulate import Moment
from treefx.planning.views.tables import format_bytes, format_seconds, make_figures, render_tables

__all__ = ["explain_plan"]

_MOST_PARTS = 60
_LEGEND = """
under       the part above, whose K/V this part reads
keep        what stays while the parts below run: activations (keep), K/V
            (recompute), K/V in host memory (offload); leaf: no part below
boundary    tokens of parts above whose K/V are read
outgoing    tokens of this part whose K/V parts below read
held above  bytes that parts above hold when the part starts
binds       the step with the peak, and its share of the limit
"""
_LEGEND_OF_POLICIES = "per distinct: tokens that run forward, over distinct tokens"


def explain_plan(plan: Plan) -> str:
    """The text of `Plan.explain`."""
    levels = [f"Not shared: {item.reason}" for item in plan.unshared]
    return render_tables(repr(plan), *levels, _parts_table(plan), _LEGEND, _policies_table(plan), _LEGEND_OF_POLICIES)


def _parts_table(plan: Plan) -> Table:
    columns = ("part", "under", "keep", "tokens", "boundary", "out-\ngoing", "held\nabove", "peak", "time", "binds")
    worst = _worst_moments(plan)
    first = {moment.step.part: moment for moment in reversed(plan.moments)}
    rows = []
    for part, size in list(zip(plan.parts, plan.sizes, strict=True))[:_MOST_PARTS]:
        moment = worst[part.index]
        seconds = sum(item.seconds for item in plan.moments if item.step.part == part.index)
        rows.append(
            (
                str(part.index),
                "-" if part.parent is None else str(part.parent),
                part.keep if part.children else "leaf",
                f"{size.tokens:,}",
                f"{size.boundary:,}",
                f"{size.outgoing:,}",
                format_bytes(first[part.index].held_bytes - plan.cost.resident_bytes),
                format_bytes(moment.peak_bytes),
                format_seconds(seconds),
                _binding(plan, moment),
            )
        )
    left = len(plan.parts) - len(rows)
    title = f"Parts of {plan.forest.num_tokens:,} tokens ({plan.forest.raw_tokens:,} raw)"
    return make_figures(title + (f"; {left} more not shown" if left else ""), columns, rows)


def _worst_moments(plan: Plan) -> list[Moment]:
    """Of every part, the moment with the highest peak."""
    worst: dict[int, Moment] = {}
    for moment in plan.moments:
        known = worst.get(moment.step.part)
        if known is None or moment.peak_bytes > known.peak_bytes:
            worst[moment.step.part] = moment
    return [worst[part.index] for part in plan.parts]


def _binding(plan: Plan, moment: Moment) -> str:
    """Name the step with the peak, and its share of the limit."""
    return f"{moment.step.kind} {moment.peak_bytes / plan.memory_limit_bytes:.0%}"


def _policies_table(plan: Plan) -> Table:
    columns = ("policy", "parts", "tokens forward", "per distinct", "peak", "fits", "time")
    rows = [
        (
            item.policy,
            f"{item.parts:,}",
            f"{item.forward_tokens:,}",
            f"{item.forward_ratio:.2f}",
            format_bytes(item.peak_bytes),
            "yes" if item.fits else "no",
            format_seconds(item.seconds),
        )
        for item in compare_policies(plan)
    ]
    title = f"The same forest under other policies, limit {format_bytes(plan.memory_limit_bytes)}"
    return make_figures(title, columns, rows)
