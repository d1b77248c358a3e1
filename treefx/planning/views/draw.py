"""Draw a plan: the tree coloured by part, and memory over time under the limit."""

from os import PathLike
from typing import Any

import numpy as np

from treefx.extras import needs
from treefx.forests.draw import draw_links, place_lanes
from treefx.planning.search.plan import Plan
from treefx.planning.views.tables import format_bytes, format_seconds

__all__ = ["draw_plan", "draw_tree"]

_BAR_HEIGHT = 0.72
_HATCH = {"keep": "", "recompute": "///", "offload": "..."}
_SMALL_PEAK = 0.5
"""Share of the limit below which the memory axis ends above the peak, not above the limit."""
_LIMIT, _HELD, _PEAK = "#c0392b", "#8fb3d9", "#2c5f8a"


@needs("plot", "a picture of a plan")
def draw_plan(plan: Plan, path: "str | PathLike[str]") -> None:
    """Draw the tree by depth, a colour per part, above the predicted memory of every step.

    Numbers are those of the parts in `Plan.explain`, on the longest bar of each part that has room. Hatched bars are
    parts with recomputed activations (/) or with K/V in host memory (.).

    Args:
        plan: the plan.
        path: image file; the suffix (`.png`, `.svg`, `.pdf`) chooses the format.

    Raises:
        OSError: the file cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    lane = place_lanes(plan.forest.nodes.parent.cpu().numpy())
    tree_height = float(np.clip(1.6 + 0.18 * (lane.max() + 1), 2.4, 16.0))
    figure = Figure(figsize=(11.0, tree_height + 3.4), layout="constrained")
    FigureCanvasAgg(figure)
    tree, memory = figure.subplots(2, 1, height_ratios=[tree_height, 3.0])
    draw_tree(tree, plan, lane)
    _draw_memory(memory, plan)
    figure.savefig(path, dpi=130)


def draw_tree(axes: Any, plan: Plan, lane: Any) -> None:
    """The tree on some axes, a colour per part; `lane` of every node."""
    colours = _colours(len(plan.parts))
    nodes, bars = plan.forest.nodes, _bars(plan, lane)
    draw_links(axes, plan.forest.depth[nodes.start].cpu().numpy(), lane, nodes.parent.cpu().numpy())
    _number_parts(axes, bars, float(plan.forest.depth.max()) + 1)
    for part, left, width, y in bars:
        keep = plan.parts[part].keep
        axes.barh(
            y, width, _BAR_HEIGHT, left, color=colours[part], hatch=_HATCH[keep], edgecolor="white", linewidth=0.5
        )
    recomputed = f", {plan.recomputed_tokens:,} computed twice (hatched)" if plan.recomputed_tokens else ""
    axes.set_title(
        f"{plan.forest.num_tokens:,} tokens in {len(plan.parts)} parts, one colour each{recomputed}",
        loc="left",
        fontsize=11,
    )
    axes.set_xlabel("depth (tokens)")
    axes.set_yticks([])
    axes.set_xlim(0, float(plan.forest.depth.max()) + 1)
    axes.set_ylim(lane.max() + 0.7, lane.min() - 0.7)
    axes.spines[["top", "right", "left"]].set_visible(False)


def _number_parts(axes: Any, bars: list[tuple[int, int, int, float]], widest: float) -> None:
    """Write the number of every part into its longest bar, if the bar has room for it."""
    from matplotlib.patheffects import withStroke

    longest: dict[int, tuple[int, int, int, float]] = {}
    for bar in bars:
        if bar[0] not in longest or bar[2] > longest[bar[0]][2]:
            longest[bar[0]] = bar
    for part, left, width, y in longest.values():
        if width > 0.012 * widest * (len(str(part)) + 1):
            outline = [withStroke(linewidth=1.5, foreground="white")]
            axes.text(left + width / 2, y, str(part), ha="center", va="center", fontsize=7, path_effects=outline)


def _bars(plan: Plan, lane: Any) -> list[tuple[int, int, int, float]]:
    """Runs of tokens of one node and one part: part, depth of the first token, tokens, lane."""
    forest = plan.forest
    part_of = np.empty(forest.num_tokens, dtype=np.int64)
    for part in plan.parts:
        part_of[part.tokens.numpy()] = part.index
    is_first = np.append(True, part_of[1:] != part_of[:-1])
    is_first[forest.nodes.start.cpu().numpy()] = True
    start = np.nonzero(is_first)[0]
    width = np.diff(np.append(start, len(part_of)))
    node = np.searchsorted(forest.nodes.start.cpu().numpy(), start, side="right") - 1
    depth = forest.depth.cpu().numpy()[start]
    rows = zip(part_of[start].tolist(), depth.tolist(), width.tolist(), lane[node].tolist(), strict=True)
    return list(rows)


def _colours(count: int) -> list[Any]:
    """Colours of which neighbours differ."""
    from matplotlib import colormaps

    palette = colormaps["tab20"].colors  # type: ignore[attr-defined]
    return [palette[(7 * index) % len(palette)] for index in range(count)]


def _draw_memory(axes: Any, plan: Plan) -> None:
    total = plan.seconds
    scale, second = (1.0, "s") if total >= 1.0 else (1e3, "ms")
    seconds = scale * np.cumsum([0.0, *(moment.seconds for moment in plan.moments)])
    peak = [moment.peak_bytes for moment in plan.moments]
    left = [plan.moments[0].held_bytes, *(moment.left_bytes for moment in plan.moments)]
    unit = 2.0 ** (10 * max(int(np.log2(max(plan.peak_bytes, 1)) // 10), 0))
    name = format_bytes(unit).split()[1]
    axes.stairs(np.array(peak) / unit, seconds, fill=True, color=_PEAK, alpha=0.55, label="peak of the step")
    axes.step(seconds, np.array(left) / unit, where="post", color="black", linewidth=1.0, label="held after the step")
    limit = f"limit {format_bytes(plan.memory_limit_bytes)}"
    is_small = plan.peak_bytes < _SMALL_PEAK * plan.memory_limit_bytes
    if is_small:
        limit += f", above the axis: the peak is {plan.peak_bytes / plan.memory_limit_bytes:.0%} of it"
    axes.axhline(plan.memory_limit_bytes / unit, color=_LIMIT, linestyle="--", label=limit)
    axes.axhspan(0, plan.cost.resident_bytes / unit, color=_HELD, alpha=0.4, label="parameters and gradients")
    axes.set_ylim(0, 1.12 * (plan.peak_bytes if is_small else plan.memory_limit_bytes) / unit)
    axes.set_xlim(0, seconds[-1])
    axes.set_xlabel(f"predicted time ({second}), {format_seconds(total)} in all")
    axes.set_ylabel(f"memory ({name})")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.28), ncols=4, frameon=False, fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
