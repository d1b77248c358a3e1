"""Compare strategies on one forest and limit, as a table and as pictures."""

from collections.abc import Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Any

from rich.table import Table

from treefx.errors import InputError, MemoryLimitError
from treefx.extras import needs
from treefx.forests.draw import place_lanes
from treefx.forests.forest import Forest
from treefx.planning.cost.model import CostModel
from treefx.planning.search.plan import Plan
from treefx.planning.search.planner import plan as make_plan
from treefx.planning.search.strategies import strategy_names
from treefx.planning.views.draw import draw_tree
from treefx.planning.views.tables import format_bytes, format_seconds, make_figures

__all__ = ["Attempt", "compare_strategies", "comparison_table", "draw_comparison"]


@dataclass(frozen=True)
class Attempt:
    """Hold one strategy's result on a forest.

    Attributes:
        strategy: its name.
        plan: the plan; None where it was refused.
        refusal: why.
    """

    strategy: str
    plan: Plan | None
    refusal: str

    def to_dict(self) -> dict[str, Any]:
        """The figures, for JSON."""
        if self.plan is None:
            return {"strategy": self.strategy, "refusal": self.refusal}
        found = self.plan
        return {
            "strategy": self.strategy,
            "parts": len(found.parts),
            "forward_tokens": found.forest.num_tokens + found.recomputed_tokens,
            "peak_bytes": found.peak_bytes,
            "seconds": found.seconds,
        }


def compare_strategies(forest: Forest, cost: CostModel, limit: int) -> list[Attempt]:
    """Plans by "auto" and by every registered strategy."""
    return [_attempt(forest, cost, limit, name) for name in ("auto", *strategy_names())]


def _attempt(forest: Forest, cost: CostModel, limit: int, name: str) -> Attempt:
    try:
        return Attempt(name, make_plan(forest, cost, limit, strategy=name), "")
    except (MemoryLimitError, InputError) as error:
        return Attempt(name, None, str(error))


def comparison_table(attempts: Sequence[Attempt]) -> Table:
    """One line per strategy; refusals are named below by `refusal`."""
    rows = []
    for attempt in attempts:
        found = attempt.plan
        if found is None:
            rows.append((attempt.strategy, "refused", "", "", ""))
            continue
        figures = (f"{len(found.parts):,}", f"{found.forest.num_tokens + found.recomputed_tokens:,}")
        name = attempt.strategy if attempt.strategy == found.strategy else f"{attempt.strategy} ({found.strategy})"
        rows.append((name, *figures, format_bytes(found.peak_bytes), format_seconds(found.seconds)))
    columns = ("strategy", "parts", "tokens forward", "peak", "time")
    return make_figures("The same forest cut by every strategy", columns, rows)


@needs("plot", "a picture of plans")
def draw_comparison(attempts: Sequence[Attempt], path: "str | PathLike[str]") -> None:
    """Draw the tree once per strategy that keeps the limit, a colour per part.

    Args:
        attempts: from `compare_strategies`.
        path: image file; the suffix (`.png`, `.svg`, `.pdf`) chooses the format.

    Raises:
        InputError: no strategy keeps the limit.
        OSError: the file cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    drawn = [(attempt.strategy, attempt.plan) for attempt in attempts if attempt.plan is not None]
    if not drawn:
        raise InputError(f"no strategy keeps the limit, so there is nothing to draw: {attempts[0].refusal}")
    lane = place_lanes(drawn[0][1].forest.nodes.parent.cpu().numpy())
    height = min(max(1.2 + 0.1 * float(lane.max() + 1), 1.8), 8.0)
    figure = Figure(figsize=(11.0, height * len(drawn)), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(drawn), 1, squeeze=False)[:, 0]
    for axes, (name, found) in zip(panels, drawn, strict=True):
        draw_tree(axes, found, lane)
        parts = f"{len(found.parts)} part{'s' * (len(found.parts) != 1)}"
        axes.set_title(f"{name}: {parts}, {format_seconds(found.seconds)}", loc="left", fontsize=10)
    refused = [attempt.strategy for attempt in attempts if attempt.plan is None]
    if refused:
        figure.supxlabel(
            f"refused, for reasons that the table names: {', '.join(refused)}", fontsize=9, x=0.01, ha="left"
        )
    figure.savefig(path, dpi=110)
