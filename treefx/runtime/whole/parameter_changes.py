"""Changes of parameters that read nothing of the call, made before the graph instead of in it.

A model that keeps weights within bounds in its forward writes to ``weight.data``, or under ``torch.no_grad``. A
functional graph has no words for such a change (``treefx.passes.trace.unseen_changes``), but where its operands are
numbers and nothing has read the parameter before it, the same change before the whole graph gives the same results.

Before::

    data = weight.data;  data.clamp_(-1.0, 1.0);  y = linear(x, weight)

After, with the change called before the graph::

    y = linear(x, weight)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from treefx.passes.trace.heads import copy_graph
from treefx.passes.trace.unseen_changes import changed_in_place, memory_of

__all__ = ["Changes", "changes_first"]

_CHANGES = {"clamp_", "clamp_min_", "clamp_max_", "mul_", "div_", "add_", "sub_", "fill_", "zero_"}
"""Methods in place whose operands may be numbers."""
_SAME = {getattr(torch._C._autograd, "_get_data_attr", None), "detach"}
"""What returns the memory of its operand."""


class Changes:
    """The changes of a graph, run on its inputs."""

    def __init__(self, gm: fx.GraphModule) -> None:
        self._gm = gm

    def __call__(self, args: Sequence[Any]) -> None:
        """Change the parameters among the inputs of a call."""
        with torch.no_grad():
            self._gm(*args)


def changes_first(gm: fx.GraphModule, roles: Sequence[str]) -> tuple[fx.GraphModule, Changes | None]:
    """Take changes of parameters out of a graph of Dynamo.

    Args:
        gm: The graph, never changed.
        roles: What each placeholder is.

    Returns:
        The graph and None, or a copy without the changes and what makes them.
    """
    found = _movable(gm, roles)
    if not found:
        return gm, None
    names = {node.name for node in found}
    rest, first = copy_graph(gm), copy_graph(gm)
    for node in reversed([node for node in rest.graph.nodes if node.name in names]):
        node.replace_all_uses_with(node.args[0])
        rest.graph.erase_node(node)
    kept = {node for node in first.graph.nodes if node.name in names}
    (output,) = first.graph.find_nodes(op="output")
    output.args = ((),)
    for node in reversed(list(first.graph.nodes)):
        if node.op not in ("placeholder", "output") and node not in kept and not node.users:
            first.graph.erase_node(node)
    for graph in (rest, first):
        graph.graph.lint()
        graph.recompile()
    return rest, Changes(first)


def _movable(gm: fx.GraphModule, roles: Sequence[str]) -> list[fx.Node]:
    """The changes of parameters that nothing before them reads, and that autograd does not see."""
    placeholders = gm.graph.find_nodes(op="placeholder")
    parameters = {memory_of(node) for node, role in zip(placeholders, roles, strict=True) if role == "parameter"}
    read, found, grad_enabled = set[int | None](), list[fx.Node](), True
    for node in gm.graph.nodes:
        if node.target is torch._C._set_grad_enabled:
            grad_enabled = bool(node.args[0])
        if node.op == "placeholder" or node.target in _SAME:
            continue
        changed = changed_in_place(node)
        memory = None if changed is None else memory_of(node.args[0])
        if memory in parameters and memory not in read and _is_change_by_numbers(node):
            if not (grad_enabled and changed is not None and changed.requires_grad):
                found.append(node)
                continue
        read.update(memory_of(source) for source in node.all_input_nodes)
    return found


def _is_change_by_numbers(node: fx.Node) -> bool:
    operands = (*node.args[1:], *node.kwargs.values())
    if node.op != "call_method" or node.target not in _CHANGES or not all(_is_number(item) for item in operands):
        return False
    source: Any = node.args[0]
    while isinstance(source, fx.Node) and source.target in _SAME | _CHANGES:
        source = source.args[0]
    return isinstance(source, fx.Node) and source.op == "placeholder"


def _is_number(item: Any) -> bool:
    return item is None or isinstance(item, (int, float))
