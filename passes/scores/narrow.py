"""Integers of few bits: operators whose results wrap around, which a formula of whole numbers does not.

``(columns * 40).to(torch.uint8)`` is no product where columns pass six; ``mask.to(torch.uint8) * causal`` is one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

__all__ = ["may_wrap_around"]

aten = torch.ops.aten
Range = tuple[float, float]
_NARROW = {torch.uint8, torch.int8, torch.int16, torch.uint16, torch.uint32}
_LARGE = (aten.mul.Tensor, aten.mul.Scalar, aten.pow.Tensor_Scalar)
"""What leaves 32 bits although its operands are columns."""


def may_wrap_around(node: fx.Node) -> bool:
    """Whether an integer operator may leave the range of its dtype, for all that is known of its operands."""
    dtype = node.meta["val"].dtype if node.op == "call_function" and "val" in node.meta else None
    if dtype not in _NARROW and not (dtype is torch.int32 and node.target in _LARGE):
        return False
    low, high = _before_wrapping(node)
    return not (torch.iinfo(dtype).min <= low and high <= torch.iinfo(dtype).max)


def _range(item: Any) -> Range:
    """Lowest and highest value of a node or number."""
    if not isinstance(item, fx.Node):
        return float(item), float(item)
    dtype = item.meta["val"].dtype
    if dtype is torch.bool:
        return 0.0, 1.0
    low, high = _before_wrapping(item) if item.op == "call_function" else (-math.inf, math.inf)
    if dtype.is_floating_point:
        return low, high
    least, most = torch.iinfo(dtype).min, torch.iinfo(dtype).max
    return (low, high) if least <= low and high <= most else (least, most)


def _before_wrapping(node: fx.Node) -> Range:
    rule = _RULES.get(node.target)
    return (-math.inf, math.inf) if rule is None else rule(node)


def _of_operands(join: Callable[[Range, Range], Range], first: int = 0) -> Callable[[fx.Node], Range]:
    def rule(node: fx.Node) -> Range:
        if node.kwargs.get("alpha", 1) != 1 or len(node.args) > first + 2:
            return -math.inf, math.inf
        return join(_range(node.args[first]), _range(node.args[first + 1]))

    return rule


def _product(x: Range, y: Range) -> Range:
    products = [0.0 if 0 in (a, b) else a * b for a in x for b in y]
    return min(products), max(products)


def _either(x: Range, y: Range) -> Range:
    return min(x[0], y[0]), max(x[1], y[1])


def _same(node: fx.Node) -> Range:
    return _range(node.args[0])


def _or_zero(node: fx.Node) -> Range:
    return _either(_range(node.args[0]), (0.0, 0.0))


def _fill(node: fx.Node) -> Range:
    return _range(node.args[1])


_RULES: dict[Any, Callable[[fx.Node], Range]] = {
    aten.add.Tensor: _of_operands(lambda x, y: (x[0] + y[0], x[1] + y[1])),
    aten.sub.Tensor: _of_operands(lambda x, y: (x[0] - y[1], x[1] - y[0])),
    aten.rsub.Scalar: _of_operands(lambda x, y: (y[0] - x[1], y[1] - x[0])),
    aten.mul.Tensor: _of_operands(_product), aten.mul.Scalar: _of_operands(_product),
    aten.minimum.default: _of_operands(lambda x, y: (min(x[0], y[0]), min(x[1], y[1]))),
    aten.maximum.default: _of_operands(lambda x, y: (max(x[0], y[0]), max(x[1], y[1]))),
    aten.where.self: _of_operands(_either, 1), aten.tril.default: _or_zero, aten.triu.default: _or_zero,
    aten.full.default: _fill, aten.full_like.default: _fill,
    **dict.fromkeys((aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default), lambda node: (0.0, 0.0)),
    **dict.fromkeys((aten.ones.default, aten.ones_like.default, aten.new_ones.default), lambda node: (1.0, 1.0)),
    **dict.fromkeys(
        (aten._to_copy.default, aten.view.default, aten.expand.default, aten.unsqueeze.default, aten.slice.Tensor,
         aten.transpose.int, aten.permute.default, aten.clone.default, aten.alias.default, aten.squeeze.dim,
         aten.select.int, aten.reshape.default, aten._unsafe_view.default, aten.lift_fresh_copy.default), _same,
    ),
}  # fmt: skip
