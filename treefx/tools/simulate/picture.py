"""The speed-ups of all sub-layers as one picture."""

from pathlib import Path

from treefx.extras import needs
from treefx.tools.simulate.sublayer import Outcome

__all__ = ["save_picture"]

_BARS = (("t3", "T3", "#c9a227"), ("t3-mca", "T3-MCA", "#2e7d5b"), ("ideal", "ideal overlap", "#b8bec6"))
_PUBLISHED = {"t3": 1.20, "t3-mca": 1.30, "ideal": 1.35}


@needs("plot", "a picture of speed-ups")
def save_picture(outcomes: list[Outcome], path: Path) -> None:
    """Draw a group of bars per sub-layer; dotted lines are the paper's means.

    The means are over the two smaller models.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(14.0, 4.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for index, (name, label, colour) in enumerate(_BARS):
        places = [place + 0.27 * (index - 1) for place in range(len(outcomes))]
        axes.bar(places, [outcome.speedup(name) for outcome in outcomes], 0.25, color=colour, label=label)
        axes.axhline(_PUBLISHED[name], color=colour, linestyle=":", linewidth=1.2)
    axes.set_xticks(range(len(outcomes)), [outcome.sublayer.name for outcome in outcomes], rotation=90)
    for place in _ends_of_models(outcomes):
        axes.axvline(place, color="#40464d", linewidth=0.6)
    for place, text in _names_of_models(outcomes):
        axes.text(place, 1.555, text, ha="center", va="bottom", fontsize=9)
    axes.set_ylim(1.0, 1.55)
    axes.set_xlim(-0.6, len(outcomes) - 0.4)
    axes.set_ylabel("times faster than one after the other")
    axes.legend(loc="upper right", ncols=3, frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


def _names(outcomes: list[Outcome]) -> list[str]:
    return [f"{outcome.sublayer.model}, {outcome.sublayer.ranks} GPUs" for outcome in outcomes]


def _ends_of_models(outcomes: list[Outcome]) -> list[float]:
    names = _names(outcomes)
    return [place - 0.5 for place in range(1, len(names)) if names[place] != names[place - 1]]


def _names_of_models(outcomes: list[Outcome]) -> list[tuple[float, str]]:
    """Every name with the middle of its sub-layers."""
    names = _names(outcomes)
    places = {name: [place for place, other in enumerate(names) if other == name] for name in names}
    return [(sum(found) / len(found), name) for name, found in places.items()]
