"""Numbers of a call as tensors: another value compiles nothing.

Trainers pass the labels of a step (``num_items_in_batch``) or a temperature as Python numbers, another one in every
call. In compiled code a number stands as a constant; a tensor without dimensions does not.

Before, with ``number`` an integer::

    loss: "f32[]" = truediv(loss, number)

After::

    scaled: "f32[]" = number.to(torch.float32);  loss: "f32[]" = truediv(loss, scaled)

An integer that is more than a factor or a summand of floating-point tensors (the end of a slice, say) becomes the size
of a tensor without values, so that it is a symbol like the sizes of other inputs. Before::

    kept: "f64[B, n, C]" = hidden[:, -n:, :]

After, with ``number`` a tensor [n]::

    n = number.size(0);  kept: "f64[B, n, C]" = hidden[:, -n:, :]

Numbers of the model (its epsilons, its scales) stay constants, and so do other numbers that are no integers.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import SymInt, Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from treefx.passes.trace.heads import copy_graph
from treefx.passes.trace.pattern import is_number_input

__all__ = ["Numbers", "as_tensors", "numbers_as_tensors"]

Numbers = Mapping[int, Literal["value", "size"]]
"""Index of an input that was a number -> property of the tensor that replaces it."""

_ARITHMETIC = {
    operator.truediv, operator.mul, operator.add, operator.sub, operator.itruediv, operator.imul, operator.iadd,
    operator.isub, torch.div, torch.mul, torch.add, torch.sub, "div", "mul", "add", "sub",
}  # fmt: skip
_EXACT = {torch.float32, torch.float64}
"""Types in which arithmetic with a number rounds the number to the type of the other operand, as with a tensor."""

_WITHOUT_VALUES = torch.uint8
"""The type of tensors that only their size is asked of: no token ids, and no mask."""


def numbers_as_tensors(gm: fx.GraphModule, roles: Sequence[str]) -> tuple[fx.GraphModule, Numbers]:
    """Let a graph of Dynamo take numbers of the call as tensors.

    Args:
        gm: The graph, never changed.
        roles: Role of each placeholder.

    Returns:
        The graph, or a copy that takes some of its numbers as tensors, and these numbers.
    """
    placeholders = gm.graph.find_nodes(op="placeholder")
    sizes = {str(size) for node in placeholders for size in _sizes(node)}
    found: dict[int, Literal["value", "size"]] = {}
    for i, (node, role) in enumerate(zip(placeholders, roles, strict=True)):
        if role == "input" and node.users and _is_number(node, sizes):
            if all(map(_is_arithmetic, _reads(node))):
                found[i] = "value"
            elif _may_be_size(node):
                found[i] = "size"
    others = [_example(node) for i, node in enumerate(placeholders) if i not in found]
    mode = next((x.fake_mode for x in others if isinstance(x, FakeTensor)), None)
    if not found or mode is None:  # without a tensor there is nothing to pack
        return gm, {}
    copied = copy_graph(gm)
    for i, node in enumerate(copied.graph.find_nodes(op="placeholder")):
        if i in found:
            _take_tensor(node) if found[i] == "value" else _take_size(node, mode)
    copied.graph.lint()
    copied.recompile()
    return copied, found


def as_tensors(args: Sequence[Any], numbers: Numbers) -> Sequence[Any]:
    """Return the inputs with these numbers as tensors on the device of the others.

    float64 [], or a vector of that size.
    """
    if not numbers:
        return args
    device = next(x.device for i, x in enumerate(args) if isinstance(x, Tensor) and i not in numbers)

    def taken(i: int, x: Any) -> Any:
        if i not in numbers:
            return x
        if numbers[i] == "size":
            return torch.empty(x, dtype=_WITHOUT_VALUES, device=device)
        return torch.as_tensor(x, dtype=torch.float64, device=device)

    return [taken(i, x) for i, x in enumerate(args)]


def _example(node: fx.Node) -> Any:
    return node.meta.get("example_value")


def _may_be_size(node: fx.Node) -> bool:
    """Whether a number is an integer above one, which Dynamo then checks in every call."""
    example = _example(node)
    return isinstance(example, SymInt) and bool(example > 1)


def _take_size(node: fx.Node, mode: FakeTensorMode) -> None:
    """Replace a number by a tensor in its readers: a vector of that size."""
    number = node.meta["example_value"]
    with node.graph.inserting_after(node.graph.find_nodes(op="placeholder")[-1]):
        size = node.graph.call_method("size", (node, 0))
    node.replace_all_uses_with(size, delete_user_cb=lambda user: user is not size)
    size.meta["example_value"] = number
    with mode:
        node.meta["example_value"] = torch.empty(number, dtype=_WITHOUT_VALUES)


def _sizes(node: fx.Node) -> Sequence[Any]:
    example = _example(node)
    return [*example.shape, *example.stride()] if isinstance(example, Tensor) else []


def _is_number(node: fx.Node, sizes: set[str]) -> bool:
    example = _example(node)
    if isinstance(example, SymInt):
        return str(example) not in sizes and example.node.expr.is_Symbol
    return isinstance(example, Tensor) and example.dim() == 0 and is_number_input(node)


def _reads(node: fx.Node) -> list[tuple[fx.Node, fx.Node]]:
    """Return the readers of a number, and the node through which each reads it.

    Dynamo reads tensors that stand for floats by ``item``.
    """
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
    """Rewrite the readers of a number to read a tensor of the other operand's type."""
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
