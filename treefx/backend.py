"""Define the backend: ``torch.compile(model, backend="treefx", options={...})``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import fx

from treefx.config import Config
from treefx.passes.trace.heads import tell_masks
from treefx.passes.trace.library_calls import hold_calls
from treefx.runtime.compiled_graph import CompiledGraph
from treefx.runtime.dynamo import keep_graphs_whole, role_of
from treefx.runtime.observed.observed_graph import ObservedGraph
from treefx.runtime.records import register
from treefx.runtime.shapes import forget_shapes

__all__ = ["treefx"]


def treefx(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | Config | None = None,
    mode: str | None = None,
) -> CompiledGraph | ObservedGraph:
    """Compile a Dynamo graph so that shared prefixes are computed once.

    Args:
        gm: Dynamo's graph; parameters and buffers are among its inputs.
        example_inputs: One example per placeholder.
        options: Fields of ``treefx.Config`` by name, or a ``Config``.
        mode: ``torch.compile(mode=...)``; the same as the option of that name.

    Raises:
        ConfigError: An unknown option or mode.
    """
    if not isinstance(options, Config):
        options = {"mode": mode or "default", **(options or {})}
    config = Config.from_options(options)
    placeholders = gm.graph.find_nodes(op="placeholder")
    roles = [role_of(node, example) for node, example in zip(placeholders, example_inputs, strict=True)]
    if config.observe:
        return ObservedGraph(gm, roles)
    gm = tell_masks(gm)
    hold_calls(gm)
    graph = CompiledGraph(gm, roles, config)
    register(graph)
    return graph


keep_graphs_whole()
setattr(treefx, "reset", forget_shapes)  # torch.compiler.reset calls it
