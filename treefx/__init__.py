"""treefx: compute every shared prefix of a batch of rollouts once, exactly."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from treefx import losses
from treefx.context import current_forest, use
from treefx.errors import ConfigError, ForestError, InputError, MemoryLimitError, TreefxError, UnsupportedError
from treefx.forest import Forest
from treefx.logprobs import edge_logprobs

if TYPE_CHECKING:
    from treefx import kernels
    from treefx.config import Config
    from treefx.distributed import distribute
    from treefx.inspector import inspect
    from treefx.planning.backward import backward
    from treefx.planning.planner import plan
    from treefx.planning.profile import profile

__all__ = [
    "Config",
    "ConfigError",
    "Forest",
    "ForestError",
    "InputError",
    "MemoryLimitError",
    "TreefxError",
    "UnsupportedError",
    "backward",
    "current_forest",
    "distribute",
    "edge_logprobs",
    "inspect",
    "kernels",
    "losses",
    "plan",
    "profile",
    "use",
]

_LAZY = {
    "Config": "treefx.config",
    "backward": "treefx.planning.backward",
    "distribute": "treefx.distributed",
    "inspect": "treefx.inspector",
    "plan": "treefx.planning.planner",
    "profile": "treefx.planning.profile",
}


def __getattr__(name: str) -> Any:
    # The kernels register operators and the inspector reads compiled graphs: a program that only builds
    # forests should not load either.
    if name == "kernels":
        return import_module("treefx.kernels")
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
