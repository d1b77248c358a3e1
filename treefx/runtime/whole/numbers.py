"""Numbers of a call as tensors, where the graph only calculates with them: another value compiles nothing.

Trainers pass the labels of a step (``num_items_in_batch``) or a temperature as Python numbers, another one in every
call. In compiled code a number stands as a constant; a tensor without dimensions does not.

Before, with ``number`` an integer::

    loss: "f32[]" = truediv(loss, number)

After::

    scaled: "f32[]" = number.to(torch.float32);  loss: "f32[]" = truediv(loss, scaled)

Numbers of the model (its epsilons, its scales) stay constants, and so does what is more than a factor or a summand of
floating-point tensors: a size, an exponent, an argument of another operator.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import SymInt, Tensor, fx

from treefx.passes.trace.heads import copy_graph
from treefx.passes.trace.pattern import is_number_input

__all__ = ["as_tensors", "numbers_as_tensors"]

_ARITHMETIC = {
    operator.truediv, operator.mul, operator.add, operator.sub, operator.itruediv, operator.imul, operator.iadd,
    operator.isub, torch.div, torch.mul, torch.add, torch.sub, "div", "mul", "add", "sub",
}  # fmt: skip
_EXACT = {torch.float32, torch.float64}
"""Types in which arithmetic with a number rounds the number to the type of the other operand, as with a tensor."""


def numbers_as_tensors(gm: fx.GraphModule, roles: Sequence[str]) -> tuple[fx.GraphModule, frozenset[int]]:
    """Let a graph of Dynamo take numbers of the call as tensors.

    Args:
        gm: The graph, never changed.
        roles: What each placeholder is.

    Returns:
        The graph, or a copy that takes some of its numbers as tensors [], and the positions of these.
    """
    placeholders = gm.graph.find_nodes(op="placeholder")
    sizes = {str(size) for node in placeholders for size in _sizes(node)}
    found = frozenset(
        i
        for i, (node, role) in enumerate(zip(placeholders, roles, strict=True))
        if role == "input" and node.users and _is_number(node, sizes) and all(map(_is_arithmetic, _reads(node)))
    )
    if not found:
        return gm, found
    copied = copy_graph(gm)
    for i, node in enumerate(copied.graph.find_nodes(op="placeholder")):
        if i in found:
            _take_tensor(node)
    copied.graph.lint()
    copied.recompile()
    return copied, found


def as_tensors(args: Sequence[Any], numbers: frozenset[int]) -> Sequence[Any]:
    """The inputs of a call with those numbers as float64 tensors [], where the other tensors are."""
    if not numbers:
        return args
    device = next(x.device for i, x in enumerate(args) if isinstance(x, Tensor) and i not in numbers)
    return [torch.as_tensor(x, dtype=torch.float64, device=device) if i in numbers else x for i, x in enumerate(args)]


def _sizes(node: fx.Node) -> Sequence[Any]:
    example = node.meta.get("example_value")
    return [*example.shape, *example.stride()] if isinstance(example, Tensor) else []


def _is_number(node: fx.Node, sizes: set[str]) -> bool:
    example = node.meta.get("example_value")
    if isinstance(example, SymInt):
        return str(example) not in sizes and example.node.expr.is_Symbol
    return isinstance(example, Tensor) and example.dim() == 0 and is_number_input(node)


def _reads(node: fx.Node) -> list[tuple[fx.Node, fx.Node]]:
    """Who reads a number, and through which node: Dynamo asks tensors that stand for floats for their item."""
    direct = [(user, node) for user in node.users if user.target != "item"]
    return direct + [(user, item) for item in node.users if item.target == "item" for user in item.users]


def _is_arithmetic(read: tuple[fx.Node, fx.Node]) -> bool:
    """Whether a number is a factor or a summand of a floating-point tensor, and nothing else."""
    user, number = read
    if user.target not in _ARITHMETIC or user.kwargs or len(user.args) != 2 or user.args.count(number) != 1:
        return False
    return _other(user, number) is not None


def _other(user: fx.Node, number: fx.Node) -> Tensor | None:
    (other,) = (item for item in user.args if item is not number)
    example = other.meta.get("example_value") if isinstance(other, fx.Node) else None
    return example if isinstance(example, Tensor) and example.dtype in _EXACT else None


def _take_tensor(node: fx.Node) -> None:
    """Rewrite what reads a number: it gets a tensor of the type of its other operand."""
    for user, number in _reads(node):
        other = _other(user, number)
        assert other is not None
        with node.graph.inserting_before(user):
            typed = node.graph.call_method("to", (node, other.dtype))
        user.replace_input_with(number, typed)
        mode = other.fake_mode  # type: ignore[attr-defined]
        typed.meta["example_value"] = mode.from_tensor(torch.zeros((), dtype=other.dtype))
        node.meta["example_value"] = mode.from_tensor(torch.zeros((), dtype=torch.float64))
    for item in [user for user in node.users if user.target == "item"]:
        node.graph.erase_node(item)
