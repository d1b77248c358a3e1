"""Find values that are functions of a call's inputs alone, so that they are repeatable.

The run time evaluates some values outside of the graph: keys of tokens, ignored labels of a loss, buffers that prove a
mask causal. A value that is drawn, read from uninitialised memory, or made by an operator that may do either differs
each time it is evaluated, and so do all functions of it. Such a value is computed in the graph, once; evaluation
outside of the graph refuses it by the reason given here.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx
from torch._higher_order_ops.triton_kernel_wrap import triton_kernel_wrapper_functional

from treefx.passes.trace.opaque_ops import bodies_of

__all__ = ["changed_inputs", "draws", "has_effects", "impurity", "randomness", "read_operands"]

aten = torch.ops.aten
_KEY = "treefx_impurity"
_DETERMINISTIC = {"aten", "prims", "treefx", "transformers"}
"""Libraries that tag operators which draw; others need not. The one of transformers is a product."""
_TRITON = {triton_kernel_wrapper_functional}
"""Kernels draw from a seed that is an operand."""
_UNWRITTEN = {
    aten.empty, aten.empty_like, aten.empty_strided, aten.empty_permuted, aten.new_empty, aten.new_empty_strided,
    aten.resize, aten.empty_quantized,
}  # fmt: skip
_NOT_READ = {
    aten.zeros_like, aten.ones_like, aten.full_like, aten.empty_like, aten.new_zeros, aten.new_ones, aten.new_full,
    aten.new_empty, aten.new_empty_strided, aten.fill, aten.copy, aten.zero,
}  # fmt: skip
"""Their first operand gives a shape or a dtype; none of its numbers is read."""


def draws(target: Any) -> bool:
    """Whether an operator draws random numbers."""
    return torch.Tag.nondeterministic_seeded in getattr(target, "tags", ())


def impurity(node: fx.Node) -> str | None:
    """Why evaluating a value a second time may give another one; None where it is the same."""
    stack = [node]
    while stack:  # operands first, without a recursion as deep as the graph
        top = stack[-1]
        if _KEY in top.meta:
            stack.pop()
            continue
        reason = _own_impurity(top)
        missing = [source for source in read_operands(top) if _KEY not in source.meta] if reason is None else []
        if missing:
            stack += missing
            continue
        inherited = (source.meta[_KEY] for source in read_operands(top))
        top.meta[_KEY] = reason or next((item for item in inherited if item is not None), None)
        stack.pop()
    found: str | None = node.meta[_KEY]
    return found


def changed_inputs(gm: fx.GraphModule) -> dict[fx.Node, Any]:
    """Return placeholders that a functional graph writes to, and their new values.

    These are buffers and inputs that differ from call to call.
    """
    copies = gm.graph.find_nodes(op="call_function", target=aten.copy_.default)
    return {node.args[0]: node.args[1] for node in copies if isinstance(node.args[0], fx.Node)}


def has_effects(gm: fx.GraphModule) -> bool:
    """Return whether a second run differs: it draws random numbers or changes a buffer."""
    return bool(changed_inputs(gm)) or randomness(gm) is not None


def randomness(gm: fx.GraphModule) -> str | None:
    """Why a graph draws random numbers, or may; None if it draws none."""
    return next((reason for node in gm.graph.nodes if (reason := _randomness(node)) is not None), None)


def read_operands(node: fx.Node) -> list[fx.Node]:
    """Return the operands with numbers that enter a value."""
    if node.op != "call_function":
        return node.all_input_nodes  # of the output; others have none
    whole = _packet(node) in {aten.slice_scatter, aten.select_scatter} and _overwrites_all(node)
    if not whole and _packet(node) not in _NOT_READ:
        return node.all_input_nodes
    first, *others = node.args
    kept: list[fx.Node] = []
    fx.node.map_arg((others, node.kwargs), kept.append)
    return kept


def _overwrites_all(node: fx.Node) -> bool:
    target, piece = node.args[:2]
    return isinstance(target, fx.Node) and isinstance(piece, fx.Node) and _numel(target) == _numel(piece)


def _numel(node: fx.Node) -> int:
    count: int = node.meta["val"].numel()
    return count


def _packet(node: fx.Node) -> Any:
    return getattr(node.target, "overloadpacket", node.target)


def _own_impurity(node: fx.Node) -> str | None:
    """Return why an operator is not repeatable, for any operands."""
    if node.op == "call_function" and _packet(node) in _UNWRITTEN:
        return f"{node.target} is uninitialised memory"
    if isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable:
        return f"{node.target} changes its operand"
    return _randomness(node)


def _randomness(node: fx.Node) -> str | None:
    """Why an operator draws random numbers, or may."""
    target: Any = node.target
    if node.op != "call_function" or target is operator.getitem or target in _TRITON:
        return None
    if draws(target):
        return f"{target} draws random numbers"
    if target is torch.ops.treefx.custom_function.default:
        inner = [_randomness(item) for body in bodies_of(str(node.args[1])) for item in body.graph.nodes]
        return next((f"an autograd.Function in which {reason}" for reason in inner if reason is not None), None)
    if not isinstance(target, torch._ops.OpOverload) or target.namespace not in _DETERMINISTIC:
        return f"{target} is no operator of PyTorch's own and may draw random numbers"
    return None
