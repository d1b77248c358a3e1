"""Draw a forest: one bar per node over depth in tokens, coloured by its number of rows."""

from os import PathLike
from typing import Any

import numpy as np
import numpy.typing as npt

from treefx.extras import needs
from treefx.forests.forest import Forest

__all__ = ["draw_forest", "draw_links", "place_lanes"]

_BAR_HEIGHT = 0.72
_MAX_LABELLED_NODES = 40
_MAX_EDGED_NODES = 250
_INK = "#444444"


@needs("plot", "a picture of a forest")
def draw_forest(forest: Forest, path: "str | PathLike[str]") -> None:
    """Draw the forest at node level.

    x is depth in tokens and a bar's length is the node's tokens, so the drawn length of all bars is the work
    that is done; grey lines join a node to its children. Colour is multiplicity, on a log scale where it
    spans much.

    Args:
        forest: the forest.
        path: image file; the suffix (`.png`, `.svg`, `.pdf`) chooses the format.

    Raises:
        OSError: the file cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    nodes = forest.nodes
    parent = nodes.parent.cpu().numpy()
    lane = place_lanes(parent)
    height = float(np.clip(1.6 + 0.22 * (lane.max() + 1), 2.6, 24.0))
    figure = Figure(figsize=(11.0, height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    left = forest.depth[nodes.start].cpu().numpy()
    length = (nodes.stop - nodes.start).cpu().numpy()
    draw_links(axes, left, lane, parent)
    _draw_bars(figure, axes, left, length, lane, forest.multiplicity[nodes.start].cpu().numpy())
    _style(axes, forest, lane)
    figure.savefig(path, dpi=130)


def place_lanes(parent: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Place every leaf in a separate lane, and every other node between its outer children."""
    lane = np.full(len(parent), np.nan)
    is_leaf = np.ones(len(parent), dtype=bool)
    is_leaf[parent[parent >= 0]] = False
    lane[is_leaf] = np.arange(is_leaf.sum())
    low, high = lane.copy(), lane.copy()
    for node in range(len(parent) - 1, -1, -1):
        lane[node] = (low[node] + high[node]) / 2
        if parent[node] >= 0:
            low[parent[node]] = np.fmin(low[parent[node]], lane[node])
            high[parent[node]] = np.fmax(high[parent[node]], lane[node])
    return lane


def draw_links(axes: Any, left: npt.NDArray[Any], lane: npt.NDArray[np.float64], parent: npt.NDArray[np.int64]) -> None:
    """Draw a grey line from the lane of every node to the first token of each of its children.

    Args:
        axes: of matplotlib.
        left: depth of the first token of every node.
        lane: of every node.
        parent: of every node; -1 for a root.
    """
    from matplotlib.collections import LineCollection

    children = np.nonzero(parent >= 0)[0]
    start = np.stack([left[children], lane[parent[children]]], axis=1)
    stop = np.stack([left[children], lane[children]], axis=1)
    axes.add_collection(LineCollection(list(np.stack([start, stop], axis=1)), colors="#b0b0b0", linewidths=0.9))


def _draw_bars(
    figure: Any,
    axes: Any,
    left: npt.NDArray[Any],
    length: npt.NDArray[Any],
    lane: npt.NDArray[np.float64],
    multiplicity: npt.NDArray[Any],
) -> None:
    from matplotlib import colormaps
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import LogNorm, Normalize
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    most = int(multiplicity.max())
    colour = ScalarMappable(LogNorm(1, most) if most > 12 else Normalize(1, max(most, 2)), colormaps["viridis_r"])
    # A thin white edge separates nodes in one lane; among very many short bars it would hide them.
    edge = 0.7 if len(lane) <= _MAX_EDGED_NODES else 0.0
    axes.barh(lane, length, _BAR_HEIGHT, left, color=colour.to_rgba(multiplicity), edgecolor="white", linewidth=edge)
    place = {"ax": axes, "pad": 0.015, "aspect": 5 * figure.get_figheight()}
    if most > 12:
        ticks = sorted({*(2**i for i in range(most.bit_length())), most})
        ticks = [tick for tick in ticks if tick == most or tick * 1.4 < most]
        bar = figure.colorbar(colour, **place, ticks=ticks)
        bar.minorticks_off()
    else:
        bar = figure.colorbar(colour, **place, ticks=MaxNLocator(integer=True))
    bar.ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    bar.set_label("rows through the node")
    if len(lane) <= _MAX_LABELLED_NODES:
        _label_bars(axes, left, length, lane, multiplicity / most)


def _label_bars(
    axes: Any,
    left: npt.NDArray[Any],
    length: npt.NDArray[Any],
    lane: npt.NDArray[np.float64],
    darkness: npt.NDArray[np.float64],
) -> None:
    """Write token counts into the bars long enough to hold them."""
    widest = float((left + length).max())
    for x, tokens, y, dark in zip(left, length, lane, darkness, strict=True):
        if tokens > 0.012 * widest * (len(str(tokens)) + 1):
            ink = "white" if dark > 0.4 else _INK
            axes.text(x + tokens / 2, y, str(tokens), ha="center", va="center", fontsize=8, color=ink)


def _style(axes: Any, forest: Forest, lane: npt.NDArray[np.float64]) -> None:
    from matplotlib.ticker import MaxNLocator

    rows = f"{len(forest)} rows" if len(forest) > 1 else "1 row"
    axes.set_title(
        f"{rows}: {forest.raw_tokens:,} raw tokens, {forest.num_tokens:,} distinct "
        f"(ratio {forest.sharing_ratio:.2f}, overlap {forest.overlap_ratio:.1%})",
        loc="left",
        fontsize=11,
    )
    axes.set_xlabel("depth (tokens)")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_yticks([])
    axes.set_xlim(0, float(forest.depth.max()) + 1)
    axes.set_ylim(lane.max() + 0.7, lane.min() - 0.7)
    axes.spines[["top", "right", "left"]].set_visible(False)
