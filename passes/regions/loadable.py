"""Subgraphs that a second process can load from AOTAutograd's cache.

The cache writes a subgraph down as code, and reads it by calling that code with proxies. ``aten.full([1, n], 0.0)``
has no tensor among its arguments, so torch refuses the proxy ``n``: nothing could be loaded, and everything was
compiled again. Such zeros come from the backwards of slices. They are written as ``x.new_full`` of a gradient that
comes in, which is how they are kept, and back before inductor, which has no code for that, gets a copy.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx
from torch._inductor.custom_graph_pass import CustomGraphPass

from treefx.passes.regions.make_regions import subgraphs

__all__ = ["LoadableSizes", "fill_freely"]

aten = torch.ops.aten
_TANGENT = "tangents"
"""How AOTAutograd's names of incoming gradients begin."""


class LoadableSizes(CustomGraphPass):
    """Take symbolic sizes of fills in a subgraph's backward from a tensor.

    For ``joint_custom_post_pass``.
    """

    def __call__(self, graph: fx.Graph) -> None:
        tangents = [node for node in graph.find_nodes(op="placeholder") if str(node.target).startswith(_TANGENT)]
        tangents = [node for node in tangents if isinstance(node.meta.get("val"), Tensor)]
        fills = [node for node in graph.find_nodes(op="call_function", target=aten.full.default) if _has_sizes(node)]
        if not tangents or not fills:
            return
        backward = _descendants(graph, tangents)
        for node in fills:
            if all(user in backward for user in node.users):
                node.target, node.args = aten.new_full.default, (tangents[0], *node.args)

    def uuid(self) -> Any:
        """Return a constant: the pass is part of treefx, whose sources are part of the key."""
        return "treefx.regions"


def fill_freely(gm: fx.GraphModule) -> None:
    """Write the fills of ``LoadableSizes`` in a graph and its subgraphs as they were."""
    for part in (gm, *subgraphs(gm)):
        for node in part.graph.find_nodes(op="call_function", target=aten.new_full.default):
            node.target, node.args = aten.full.default, node.args[1:]
        part.recompile()


def _has_sizes(node: fx.Node) -> bool:
    """Return whether a fill's size is computed, with all its other properties given."""
    return bool(node.all_input_nodes) and {"dtype", "device"} <= node.kwargs.keys()


def _descendants(graph: fx.Graph, sources: list[fx.Node]) -> set[fx.Node]:
    found = set(sources)
    for node in graph.nodes:
        if any(item in found for item in node.all_input_nodes):
            found.add(node)
    return found
