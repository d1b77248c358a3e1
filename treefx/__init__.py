"""treefx: compute every shared prefix of a batch of rollouts once, exactly.

The journey of one batch, by room:

1. ``backend``: Dynamo hands over the graph of the model. ``treefx.passes`` traces it, labels every value, reads masks
   and scores, proves what is causal, and writes the packed graph (``pipeline``). This happens once, for batches of all
   sizes.
2. ``runtime``: a call comes in. ``compiled_graph`` asks what it is: padded rows, a forest given by the caller
   (``forests.context``), a part of a plan, or a block of a sharded model (``runtime.blocks``).
3. ``forests``: the trie of its rows, as ``subtree_end``, ``depth`` and ``token_of``.
4. ``runtime.shapes``: the variant of the graph for this batch; its executable, compiled once, serves any number of
   tokens.
5. ``treefx.kernels``: attention over the tree, on this device.
6. ``runtime.ways.outputs``: the outputs, expanded to rows where somebody reads them.
7. ``inspection`` tells what happened; ``runtime.report`` is the record that it reads.

``planning`` runs a forest in parts that fit into memory; ``scale`` shares a step among ranks; ``rl`` samples trees and
gives credit on them; ``data`` makes batches; ``integrations`` fits all of it into trainers; ``bench`` measures;
``simulate`` predicts what communication costs; ``cli`` is the command. What a user imports lies open: ``backend``,
``config``, ``errors``, ``losses``, ``logprobs``.

Order of imports, each only of what stands before an arrow::

    errors, views -> simulate, kernels -> passes -> config, forests -> losses, logprobs -> rl -> runtime -> backend ->
    inspection -> planning -> scale -> data -> integrations -> __init__ -> output -> bench -> fuzz -> cli -> __main__
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from treefx import losses
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
from treefx.logprobs import edge_entropy, edge_logprobs

if TYPE_CHECKING:
    from treefx import integrations, kernels, rl, scale
    from treefx.config import Config
    from treefx.inspection.inspector import inspect
    from treefx.planning.execution.backward import backward
    from treefx.planning.execution.profile import profile
    from treefx.planning.search.planner import plan
    from treefx.runtime.blocks.distributed import distribute
    from treefx.runtime.converted.convert import convert

__all__ = [
    "Config",
    "ConfigError",
    "CoupledLossError",
    "Forest",
    "ForestError",
    "InputError",
    "MemoryLimitError",
    "RankError",
    "RecordError",
    "SharingWarning",
    "TreefxError",
    "UnsupportedError",
    "backward",
    "convert",
    "current_forest",
    "distribute",
    "edge_entropy",
    "edge_logprobs",
    "inspect",
    "integrations",
    "kernels",
    "losses",
    "plan",
    "profile",
    "rl",
    "scale",
    "use",
]

_LAZY = {
    "Config": "treefx.config",
    "backward": "treefx.planning.execution.backward",
    "convert": "treefx.runtime.converted.convert",
    "distribute": "treefx.runtime.blocks.distributed",
    "inspect": "treefx.inspection.inspector",
    "plan": "treefx.planning.search.planner",
    "profile": "treefx.planning.execution.profile",
}


def __getattr__(name: str) -> Any:
    # The kernels register operators and the inspector reads compiled graphs: a program that only builds
    # forests should not load what it does not use.
    if name in ("integrations", "kernels", "rl", "scale"):
        return import_module(f"treefx.{name}")
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
