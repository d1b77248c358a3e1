"""Which values of a labelled graph are computed once it is rewritten."""

from __future__ import annotations

import torch
from torch import fx

from treefx.passes.labels.facts import Kind, ReadsOthers, ancestors, fact_of
from treefx.passes.labels.label_tokens import SHAPE_ONLY

__all__ = ["input_checks", "live_nodes"]

aten = torch.ops.aten
_CHECKS = (aten._assert_async.default, aten._assert_async.msg)


def live_nodes(gm: fx.GraphModule, *, checks: bool = True) -> set[fx.Node]:
    """Find nodes that reach an output, change a buffer or are checked, not only by shape.

    Args:
        gm: A labelled graph.
        checks: Whether ``input_checks`` count.
    """
    copies = gm.graph.find_nodes(op="call_function", target=aten.copy_.default)
    stack = [*gm.graph.find_nodes(op="output"), *copies, *(input_checks(gm) if checks else ())]
    seen = set(stack)
    while stack:
        node = stack.pop()
        for source in _read(node):
            if source not in seen and node.target not in SHAPE_ONLY:
                seen.add(source)
                stack.append(source)
    return seen


def input_checks(gm: fx.GraphModule) -> list[fx.Node]:
    """Find assertions about the inputs of a call alone, such as ``one_hot``'s on token ids.

    Packed values are computed here, from valid indices: their assertions are left out.
    """
    checks = [node for target in _CHECKS for node in gm.graph.find_nodes(op="call_function", target=target)]
    return [node for node in checks if all(fact_of(source).kind is not Kind.PACKED for source in _behind(node))]


def _behind(node: fx.Node) -> list[fx.Node]:
    return [source for source in ancestors(node) if source.op == "call_function"]


def _read(node: fx.Node) -> list[fx.Node]:
    """Return the reads of the rewritten node: a lifted attention does not read its masks."""
    law = fact_of(node).law if node.op == "call_function" else None
    return law.reads() if isinstance(law, ReadsOthers) else node.all_input_nodes
