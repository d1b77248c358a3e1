"""treefx: compute every shared prefix of a batch of rollouts once, exactly.

How one batch travels, by package:

1. ``backend``: Dynamo calls the backend with the graph of the model. ``treefx.passes`` traces it, labels every value,
   lifts masks and scores, proves causality, and writes the packed graph (``pipeline``). This happens once, for batches
   of all sizes.
2. ``runtime``: a call comes in. ``compiled_graph`` sorts it: padded rows, a forest given by the caller
   (``forests.context``) or a part of a plan.
3. ``forests``: the trie of its rows, as ``subtree_end``, ``depth`` and ``token_of``.
4. ``runtime.shapes``: the variant of the graph for this batch; its executable, compiled once, serves any number of
   tokens.
5. ``treefx.kernels``: attention over the tree, on this device.
6. ``runtime.ways.rows``: the outputs, expanded to rows when the caller reads them.
7. ``inspection`` reports the run from the record in ``runtime.records``.

``planning`` runs a forest in parts that fit into memory; ``scale`` splits a step over ranks; ``rl`` samples trees and
gives credit on them; ``data`` loads batches; ``integrations`` are adapters for trainers; ``cli`` is the command;
``tools`` measure and fuzz the library, which never imports them. Users import ``backend``,
``config``, ``errors``, ``losses``, ``logprobs``, ``overlap``; ``documents`` checks JSON files, ``arguments`` checks
numbers; ``extras`` names the extra of a missing library and the version; ``torch_patches`` replaces symbols of PyTorch;
``inputs`` reads sizes and values of a call; ``reason_codes`` lists every reason for running on rows, ``refusal_codes``
every refusal.

Order of imports, each only of what stands before an arrow::

    extras, reason_codes, views -> refusal_codes -> errors -> arguments, documents, kernels, torch_patches -> inputs
    -> passes -> config, forests, overlap -> losses, logprobs -> rl -> runtime -> backend -> inspection -> planning
    -> scale -> data -> integrations -> __init__ -> output -> tools -> cli -> __main__
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from treefx import data, integrations, kernels, losses, overlap, rl, scale
    from treefx.config import Config
    from treefx.errors import (
        ConfigError,
        CoupledLossError,
        ForestError,
        InputError,
        MemoryLimitError,
        RankError,
        RecordError,
        SharingWarning,
        TreefxError,
        UnsupportedError,
    )
    from treefx.forests.context import current_forest, use
    from treefx.forests.forest import Forest
    from treefx.inspection.explain import explain
    from treefx.inspection.inspector import inspect
    from treefx.inspection.observation.observed import Observation, observed
    from treefx.inspection.report.diff import diff
    from treefx.inspection.report.report import Report
    from treefx.logprobs import edge_entropy, edge_logprobs
    from treefx.planning.execution.backward import backward, forward_backward
    from treefx.planning.execution.profile import profile
    from treefx.planning.search.planner import plan
    from treefx.runtime.converted.convert import convert, is_converted, unconvert
    from treefx.runtime.observed.hooks import observe, unobserve

    __version__: str

__all__ = [
    "Config",
    "ConfigError",
    "CoupledLossError",
    "Forest",
    "ForestError",
    "InputError",
    "MemoryLimitError",
    "Observation",
    "RankError",
    "RecordError",
    "Report",
    "SharingWarning",
    "TreefxError",
    "UnsupportedError",
    "__version__",
    "backward",
    "convert",
    "current_forest",
    "data",
    "diff",
    "edge_entropy",
    "edge_logprobs",
    "explain",
    "forward_backward",
    "inspect",
    "integrations",
    "is_converted",
    "kernels",
    "losses",
    "observe",
    "observed",
    "overlap",
    "plan",
    "profile",
    "rl",
    "scale",
    "unconvert",
    "unobserve",
    "use",
]

_LAZY = {
    "Config": "treefx.config",
    "Forest": "treefx.forests.forest",
    "Observation": "treefx.inspection.observation.observed",
    "Report": "treefx.inspection.report.report",
    "backward": "treefx.planning.execution.backward",
    "convert": "treefx.runtime.converted.convert",
    "current_forest": "treefx.forests.context",
    "diff": "treefx.inspection.report.diff",
    "edge_entropy": "treefx.logprobs",
    "edge_logprobs": "treefx.logprobs",
    "explain": "treefx.inspection.explain",
    "forward_backward": "treefx.planning.execution.backward",
    "inspect": "treefx.inspection.inspector",
    "is_converted": "treefx.runtime.converted.convert",
    "observe": "treefx.runtime.observed.hooks",
    "observed": "treefx.inspection.observation.observed",
    "plan": "treefx.planning.search.planner",
    "profile": "treefx.planning.execution.profile",
    "unconvert": "treefx.runtime.converted.convert",
    "unobserve": "treefx.runtime.observed.hooks",
    "use": "treefx.forests.context",
}
"""Where each public function and class is defined; errors are in ``treefx.errors``."""

_MODULES = ("data", "integrations", "kernels", "losses", "overlap", "rl", "scale")
"""Public modules: each is an attribute, and importable by the same name."""


def __getattr__(name: str) -> Any:
    # Lazy: a command's --help, or a program that only builds forests, must not wait for unused imports.
    if name == "__version__":
        value: Any = import_module("treefx.extras").installed_version()
    elif name in _MODULES:
        value = import_module(f"treefx.{name}")
    elif name in __all__:
        value = getattr(import_module(_LAZY.get(name, "treefx.errors")), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
