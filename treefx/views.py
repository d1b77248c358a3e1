"""Find the views and checks of forests, plans and profiles; models never import views."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

__all__ = ["find_view"]

_VIEWS = {
    "draw_forest": "treefx.forests.draw",
    "validate_forest": "treefx.forests.validate",
    "explain_plan": "treefx.planning.views.explain",
    "explain_profile": "treefx.planning.views.explain_profile",
    "draw_plan": "treefx.planning.views.draw",
    "measure_plan": "treefx.planning.views.measured",
    "plan_to_networkx": "treefx.planning.views.graphs",
    "write_report": "treefx.inspection.html",
    "describe_first_call": "treefx.inspection.first_call",
}


def find_view(name: str) -> Callable[..., Any]:
    """Load a view on first use: a function that takes the shown object first."""
    view: Callable[..., Any] = getattr(import_module(_VIEWS[name]), name)
    return view
