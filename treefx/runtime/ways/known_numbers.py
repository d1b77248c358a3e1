"""Numbers that Dynamo passes as tensors, as constants of a graph.

With sizes as symbols Dynamo passes the floats of a model as tensors without dimensions, and the graph reads their
number by ``item``. An inner compiler that Dynamo calls gets that number with them; one that is called with tensors
alone has a number of which it knows nothing, and an attention cannot be scaled by it.

Before, with ``scale`` an input::

    number = scale.item();  y = scaled_dot_product_attention(q, k, v, scale=number)

After, where it is 0.25 in the call that compiles::

    y = scaled_dot_product_attention(q, k, v, scale=0.25)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import fx

from treefx.passes.trace.heads import copy_graph
from treefx.passes.trace.pattern import is_number_input

__all__ = ["number_inputs", "with_numbers"]


def number_inputs(gm: fx.GraphModule) -> Sequence[int]:
    """Return the positions of inputs that a Dynamo graph only reads by ``item``."""
    return [i for i, node in enumerate(gm.graph.find_nodes(op="placeholder")) if is_number_input(node)]


def with_numbers(gm: fx.GraphModule, numbers: Mapping[int, float]) -> fx.GraphModule:
    """A copy of a graph that may be changed, and knows these inputs.

    Args:
        gm: Dynamo's graph, or a checkpointed part of it; it is not changed.
        numbers: By the positions of `number_inputs`; those inputs stay, and nothing reads them.
    """
    copied = copy_graph(gm)
    inputs = copied.graph.find_nodes(op="placeholder")
    known = {inputs[i]: number for i, number in numbers.items()}
    readers = dict.fromkeys(user for node in known for user in node.users)
    for reader in readers:
        if reader.target == "item":
            _write(reader, known[reader.args[0]])
        else:
            _write_inside(copied, reader, known)
    copied.graph.lint()
    copied.recompile()
    return copied


def _write(item: fx.Node, number: float) -> None:
    for user in list(item.users):
        user.args, user.kwargs = fx.node.map_aggregate(
            (user.args, user.kwargs), lambda x: number if x is item else x
        )  # fmt: skip
    item.graph.erase_node(item)


def _write_inside(gm: fx.GraphModule, call: fx.Node, known: Mapping[fx.Node, float]) -> None:
    """Write a checkpointed part's numbers into its call; another call may have others."""
    part: Any = call.args[0]
    inside = {i: known[x] for i, x in enumerate(call.args[1:]) if isinstance(x, fx.Node) and x in known}
    name = f"{call.name}_{part.target}"
    setattr(gm, name, with_numbers(getattr(gm, part.target), inside))
    with gm.graph.inserting_before(call):
        call.update_arg(0, gm.graph.get_attr(name))
    if not part.users:
        gm.graph.erase_node(part)
    if not gm.graph.find_nodes(op="get_attr", target=part.target):
        delattr(gm, part.target)
