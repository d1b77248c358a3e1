"""Which values of a labelled graph are computed once it is rewritten."""

from __future__ import annotations

import torch
from torch import fx

from treefx.passes.facts import ReadsOthers, fact_of
from treefx.passes.label_tokens import SHAPE_ONLY

__all__ = ["live_nodes"]


def live_nodes(gm: fx.GraphModule) -> set[fx.Node]:
    """Nodes whose values reach an output or change a buffer; who only lends a shape does not count."""
    copies = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)
    stack = [*gm.graph.find_nodes(op="output"), *copies]
    seen = set(stack)
    while stack:
        node = stack.pop()
        for source in _read(node):
            if source not in seen and node.target not in SHAPE_ONLY:
                seen.add(source)
                stack.append(source)
    return seen


def _read(node: fx.Node) -> list[fx.Node]:
    """What a node reads once the graph is rewritten: of a lifted attention, not the masks it was made from."""
    law = fact_of(node).law if node.op == "call_function" else None
    return law.reads() if isinstance(law, ReadsOthers) else node.all_input_nodes
