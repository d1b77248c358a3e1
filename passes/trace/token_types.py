"""Types of tokens that are zero throughout a batch: text without images.

Before, in a graph whose mask is causal but for blocks of equal types::

    mask: "b8[B, T, T]" = causal | (blocks(token_type_ids)[:, :, None] == blocks(token_type_ids)[:, None, :])

After, which constants prove causal::

    zeros: "i64[B, T]" = full([B, T], 0);  mask = causal | (blocks(zeros)[:, :, None] == blocks(zeros)[:, None, :])

A choice between values is one number where its condition is false throughout, whatever the other value is. Gemma 4
counts its blocks along columns, which no constant of another number of columns proves::

    where(zeros == 1, counts, -1)   ->   full([B, T], -1)
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, fx

from treefx.passes.trace.trace import NAME

__all__ = ["read_types_as_zeros"]

aten = torch.ops.aten
_TYPES = "token_type_ids"
_CHOICES = {aten.where.self, aten.where.ScalarSelf, aten.where.ScalarOther, aten.where.Scalar}
_FILLED = {aten.full.default, aten.scalar_tensor.default}
_COPIES = {aten._to_copy.default, aten.clone.default, aten.lift_fresh_copy.default, aten.expand.default}


def read_types_as_zeros(gm: fx.GraphModule, zero: Collection[int]) -> None:
    """Read all-zero token types as zeros, so that masks with them are causal.

    A type of image tokens makes the attention of a block of them bidirectional. Text has no such block, and its zeros
    are no values of a call any more: calls with others have another analysis (``InputValues`` is part of its key).
    """
    placeholders = gm.graph.find_nodes(op="placeholder")
    numbers = dict[fx.Node, Tensor]()
    for node in [placeholders[i] for i in sorted(zero)]:
        if _TYPES in node.meta.get(NAME, "") and node.users:
            value = node.meta["val"]
            with gm.graph.inserting_after(placeholders[-1]):
                zeros = _full(gm, value, 0)
            node.replace_all_uses_with(zeros)
            numbers[zeros] = torch.zeros([1] * value.dim(), dtype=value.dtype)
    if numbers:
        _fold_choices(gm, numbers)


def _full(gm: fx.GraphModule, like: Any, number: Any) -> fx.Node:
    """Insert a tensor like another one, with one number throughout."""
    node = gm.graph.call_function(aten.full.default, ([], number), {"dtype": like.dtype, "device": like.device})
    node.args, node.meta["val"] = (list(like.shape), number), torch.full_like(like, number)
    return node


def _fold_choices(gm: fx.GraphModule, numbers: dict[fx.Node, Tensor]) -> None:
    """Replace choices that are one number throughout.

    Args:
        gm: The traced graph.
        numbers: Values of one number throughout, each as a tensor whose dimensions have one element.
    """
    for node in list(gm.graph.nodes):
        value = node.meta.get("val")
        if node.op != "call_function" or node in numbers or not isinstance(value, Tensor):
            continue
        number = _number_of(node, numbers)
        if number is None:
            continue
        numbers[node] = number.reshape([1] * value.dim()).to(value.dtype)
        if node.target in _CHOICES:
            with gm.graph.inserting_after(node):
                folded = _full(gm, value, number.item())
            node.replace_all_uses_with(folded)
            numbers[folded] = numbers[node]


def _number_of(node: fx.Node, numbers: dict[fx.Node, Tensor]) -> Tensor | None:
    """Return the one element of a value; None if it is not known to have the same everywhere."""
    target: Any = node.target
    if target in _FILLED:
        number: Any = node.args[-1]
        return torch.tensor(number) if isinstance(number, bool | int | float) else None
    tensors = [numbers.get(x) for x in node.all_input_nodes]
    if target in _CHOICES:
        condition = tensors[0]
        chosen: Any = None if condition is None else node.args[1 if bool(condition) else 2]
        return numbers.get(chosen) if isinstance(chosen, fx.Node) else None
    if target in _COPIES:
        return tensors[0]
    tags = getattr(target, "tags", ())
    if torch.Tag.pointwise not in tags or torch.Tag.nondeterministic_seeded in tags or target._schema.is_mutable:
        return None
    if not tensors or node.kwargs or any(x is None for x in tensors):
        return None
    result: Tensor = target(*fx.node.map_arg(node.args, numbers.__getitem__))
    return result
