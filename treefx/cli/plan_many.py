"""Print many plans of ``treefx plan``: every strategy, or the shares of many ranks."""

from collections.abc import Sequence
from pathlib import Path

from treefx.output import print_json, print_line
from treefx.planning.views.compare import Attempt, comparison_table, draw_comparison
from treefx.planning.views.tables import format_bytes, format_seconds, make_figures, render_tables
from treefx.scale.step import Step

__all__ = ["show_step", "show_strategies"]


def show_strategies(attempts: Sequence[Attempt], draw: Path | None, json: bool) -> None:
    """A line per strategy, why some were refused, and the trees where a picture is asked for."""
    if draw is not None:
        draw_comparison(attempts, draw)
    if json:
        print_json([attempt.to_dict() for attempt in attempts], "treefx.plan.strategies/1")
        return
    refusals = [attempt.refusal for attempt in attempts if attempt.refusal]
    print_line(render_tables(comparison_table(attempts), *refusals))
    if draw is not None:
        print_line(f"picture: {draw}")


def show_step(step: Step, json: bool) -> None:
    """Balance, tokens computed twice and predicted time of a step on many ranks."""
    figures = step.to_dict()
    if json:
        print_json(figures, "treefx.plan.ranks/1")
        return
    duplicated = figures["duplicated_tokens"]
    rows = [
        ("ranks", f"{figures['ranks']:,}"),
        ("without rows", f"{figures['idle_ranks']:,}"),
        ("busiest / lower bound", f"{figures['balance']:.3f}"),
        ("distinct tokens", f"{figures['distinct_tokens']:,}"),
        ("computed on several ranks", f"{duplicated:,} ({duplicated / figures['distinct_tokens']:.1%})"),
        ("computed twice to fit", f"{figures['recomputed_tokens']:,}"),
        ("parts, most", f"{figures['most_parts']:,}"),
        ("peak, most", format_bytes(figures["peak_bytes"])),
        ("sent by each, once a step", format_bytes(figures["wire_bytes"])),
        ("time of the slowest", format_seconds(figures["slowest_seconds"])),
        ("time on average", format_seconds(figures["mean_seconds"])),
    ]
    if step.link_bytes_per_second is not None:
        rows.append(("exchange of gradients", format_seconds(figures["wire_seconds"])))
        rows.append(("whole step", format_seconds(figures["seconds"])))
    title = "A step" if step.link_bytes_per_second else "A step, without the time of exchanging gradients"
    print_line(render_tables(make_figures(title, ("figure", "value"), rows)))
