"""Find the sizes that Dynamo's graph reads of its inputs, and write sizes into its operators as symbols."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import SymInt, Tensor, fx

from treefx.inputs.sizes import SizedInputs
from treefx.passes.trace.flash import ends_of_segments

__all__ = ["inline_sizes", "is_number_input", "sized_inputs"]


def sized_inputs(gm: fx.GraphModule) -> SizedInputs:
    """Return what Dynamo's graph says of the sizes of its inputs."""
    nodes = dict(enumerate(gm.graph.find_nodes(op="placeholder")))
    examples = {i: node.meta.get("example_value") for i, node in nodes.items()}
    tensors = {i: tuple(x.shape) for i, x in examples.items() if isinstance(x, Tensor)}
    numbers = frozenset(i for i in tensors if _is_number(nodes[i]))
    names = {node.name for node in ends_of_segments(gm)}
    return SizedInputs(
        frozenset(tensors),
        {i: x for i, x in tensors.items() if i not in numbers and any(isinstance(size, SymInt) for size in x)},
        frozenset(i for i in tensors if nodes[i].name in names),
        numbers,
        {i: x.node.expr if nodes[i].users else None for i, x in examples.items() if isinstance(x, SymInt)},
    )


def _is_number(node: fx.Node) -> bool:
    """Whether only the size of a vector is asked for (``treefx.runtime.whole.numbers``)."""
    asked = [(user.op, user.target, user.args) for user in node.users]
    return asked == [("call_method", "size", (node, 0))] and node.meta["example_value"].dim() == 1


def inline_sizes(gm: fx.GraphModule) -> None:
    """Write sizes into operators as symbols, and erase the nodes that computed them.

    Asking a tensor for its size then does not count as reading it, and laws see sizes where numbers are.
    """
    for node in gm.graph.nodes:
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), _size_or_node)
        node.args, node.kwargs = args, kwargs
    for node in reversed(gm.graph.nodes):
        if node.op == "call_function" and isinstance(node.meta.get("val"), SymInt):
            gm.graph.erase_node(node)
        elif _takes_everything(node):
            node.replace_all_uses_with(node.args[0])
            gm.graph.erase_node(node)
    gm.recompile()


def _takes_everything(node: fx.Node) -> bool:
    """A slice from the first to the last: torch writes none where sizes are numbers."""
    source: Any = node.args[0] if node.args else None
    if node.target is not torch.ops.aten.slice.Tensor or source.op == "placeholder":
        return False
    given: list[Any] = [*node.args[2:5], *[None, None, 1][len(node.args[2:5]) :]]
    start, end, step = given
    return start in (None, 0) and step == 1 and (end is None or (isinstance(end, int) and end >= sys.maxsize))


def _size_or_node(node: fx.Node) -> Any:
    value = node.meta.get("val")
    if not isinstance(value, SymInt):
        return node
    return int(value) if value.node.expr.is_Integer else value


def is_number_input(node: fx.Node) -> bool:
    """Return whether Dynamo's graph only reads an input by ``item``, as floats when dynamic."""
    return bool(node.users) and all(_asks_for_number(user, node) for user in node.users)


def _asks_for_number(user: fx.Node, node: fx.Node) -> bool:
    if user.target is torch.ops.higher_order.tag_activation_checkpoint:
        body: Any = user.args[0]
        inside = getattr(user.graph.owning_module, body.target).graph.find_nodes(op="placeholder")
        return all(is_number_input(own) for own, given in zip(inside, user.args[1:], strict=True) if given is node)
    return (user.op, user.target) == ("call_method", "item")
