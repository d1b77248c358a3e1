"""A plan in words: one line per part, what binds, and the policies of other systems beside it."""

import io
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console, Group
from rich.table import Table

from treefx.planning.plan import Plan
from treefx.planning.policies import compare_policies
from treefx.planning.simulate import Moment

if TYPE_CHECKING:
    from treefx.planning.profile import Profile

__all__ = ["explain_plan", "explain_profile", "format_bytes", "format_seconds", "render_tables"]

_MOST_PARTS = 60


def explain_plan(plan: Plan) -> str:
    """The text of `Plan.explain`."""
    return render_tables(repr(plan), _parts_table(plan), _policies_table(plan))


def explain_profile(profile: "Profile") -> str:
    """The text of `Profile.explain`."""
    cost = profile.cost
    lines = [
        f"Parts on {profile.device}, graphs for {profile.inner}; N tokens, P boundary tokens, A visible pairs",
        f"resident: {format_bytes(cost.resident_bytes)}; K/V per outgoing token: {cost.kv_bytes_per_token:,.0f} bytes",
    ]
    figures = [
        *((f"{name} bytes", str(expression)) for name, expression in profile.bytes.items()),
        *((f"{name} FLOPs", str(expression.evalf(4))) for name, expression in profile.flop_expressions.items()),
        *((f"{name} seconds", str(expression.evalf(3))) for name, expression in profile.seconds.items()),
    ]
    return render_tables(*lines, _left_table(("figure", "expression"), figures), _samples_table(profile))


def _left_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def _samples_table(profile: "Profile") -> Table:
    columns = ("step", "tokens", "boundary", "pairs", "bytes", "predicted", "time", "fitted")
    rows = []
    for sample in profile.samples:
        fit = getattr(profile.cost, f"{sample.kind}_seconds")
        rows.append(
            (
                sample.kind,
                f"{sample.size.tokens:,}",
                f"{sample.size.boundary:,}",
                f"{sample.size.pairs:,}",
                format_bytes(sample.bytes),
                format_bytes(sample.predicted_bytes(profile.cost)),
                format_seconds(sample.seconds),
                format_seconds(fit(sample.size)),
            )
        )
    return make_figures("Measured steps: bytes above their beginning, and time", columns, rows)


def render_tables(*items: str | Table) -> str:
    """Plain text of lines and tables, as wide as they need."""
    out = io.StringIO()
    Console(file=out, width=160, highlight=False, color_system=None).print(Group(*items))
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def make_figures(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """A table of text on the left and figures aligned to the right."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for place, column in enumerate(columns):
        table.add_column(column, justify="right" if place else "left")
    for row in rows:
        table.add_row(*row)
    return table


def _parts_table(plan: Plan) -> Table:
    columns = ("part", "under", "keep", "tokens", "boundary", "outgoing", "held above", "peak", "time", "binds")
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
    """What keeps the part from being larger: the step with the peak, and which share of the limit that is."""
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


def format_bytes(value: float) -> str:
    """Bytes with a binary unit."""
    units = ("B", "KiB", "MiB", "GiB", "TiB")
    place = 0
    while abs(value) >= 1024 and place < len(units) - 1:
        value, place = value / 1024, place + 1
    return f"{value:,.0f} B" if place == 0 else f"{value:,.2f} {units[place]}"


def format_seconds(value: float) -> str:
    """Seconds, or milliseconds where they are few."""
    return f"{value:,.2f} s" if value >= 1 else f"{value * 1e3:,.2f} ms"
