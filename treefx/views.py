"""Where forests, plans and profiles find what shows and checks them: views import what they show, never the reverse."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

__all__ = ["find_view"]

_VIEWS = {
    "draw_forest": "treefx.draw",
    "validate_forest": "treefx.validate",
    "explain_plan": "treefx.planning.explain",
    "explain_profile": "treefx.planning.explain_profile",
    "draw_plan": "treefx.planning.draw",
}


def find_view(name: str) -> Callable[..., Any]:
    """A function that takes what it shows first; loaded when somebody looks."""
    view: Callable[..., Any] = getattr(import_module(_VIEWS[name]), name)
    return view
