"""Find operators of narrow numbers, whose results wrap around or are rounded.

A formula of whole numbers does neither.

``(columns * 40).to(torch.uint8)`` is no product where columns pass six; ``mask.to(torch.uint8) * causal`` is one. In
bfloat16, column 257 is not after column 256.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from treefx.kernels.score import Expr, walk
from treefx.passes.labels.constants import constants_of
from treefx.passes.scores.score_algebra import as_loaded

__all__ = ["compares_rounded", "may_wrap_around"]

aten = torch.ops.aten
Range = tuple[float, float]
_NARROW = {torch.uint8, torch.int8, torch.int16, torch.uint16, torch.uint32}
_ROUNDED = {torch.float16, torch.bfloat16}
_COMPARISONS = {
    aten.eq.Tensor, aten.eq.Scalar, aten.ne.Tensor, aten.ne.Scalar, aten.lt.Tensor, aten.lt.Scalar, aten.le.Tensor,
    aten.le.Scalar, aten.gt.Tensor, aten.gt.Scalar, aten.ge.Tensor, aten.ge.Scalar,
}  # fmt: skip
_WHOLE = {
    "cq", "ck", "b", "head", "add", "sub", "mul", "neg", "abs", "min", "max", "floordiv", "mod", "int", "float",
    "where", "eq", "ne", "lt", "le", "gt", "ge", "and", "or", "not",
}  # fmt: skip
"""Operators from whole numbers to whole numbers."""
_OF_32_BITS = {aten.mul.Tensor, aten.mul.Scalar, aten.pow.Tensor_Scalar, aten._to_copy.default}
"""Operators that may leave 32 bits on columns."""
_MAKES_OTHERS = _OF_32_BITS | {
    aten.add.Tensor, aten.add.Scalar, aten.sub.Tensor, aten.sub.Scalar, aten.rsub.Tensor, aten.rsub.Scalar,
    aten.neg.default, aten.abs.default, aten.arange.default, aten.arange.start, aten.arange.start_step,
}  # fmt: skip
"""All others give numbers that their operands have."""
_KNOWN = 2.0**62
"""Bounds below this are those of a formula; larger ones only come from 64 bits."""


def may_wrap_around(node: fx.Node) -> bool:
    """Return whether an integer operator may leave its dtype's range, by known bounds."""
    dtype: Any = getattr(node.meta.get("val"), "dtype", None) if node.op == "call_function" else None
    watched = _MAKES_OTHERS if dtype in _NARROW else _OF_32_BITS if dtype is torch.int32 else frozenset()
    if node.target not in watched:
        return False
    low, high = _before_wrapping(node)
    if dtype is torch.int32 and node.target is aten._to_copy.default and max(-low, high) > _KNOWN:
        return False  # positions of 64 bits that a caller counts in, as many as there are tokens
    return not (torch.iinfo(dtype).min <= low and high <= torch.iinfo(dtype).max)


def compares_rounded(node: fx.Node, operands: Sequence[Expr]) -> bool:
    """Return whether an operator compares columns or integers in a type that rounds them.

    ``columns * 0.1`` in all types, the columns themselves in half precision.
    """
    types = {item.meta["val"].dtype for item in node.all_input_nodes} if node.target in _COMPARISONS else set()
    if not any(dtype.is_floating_point for dtype in types) or any(
        item[0] == "dot" for x in operands for item in walk(x)
    ):
        return False
    return any(_counts(item) and (bool(types & _ROUNDED) or not _is_whole(item)) for item in operands)


def _counts(expr: Expr) -> bool:
    """Return whether an expression computes with columns, or integers other than 0 and 1."""
    expr = as_loaded(expr)
    if expr[0] == "load":
        dtype = expr[1].meta["val"].dtype
        return not (dtype.is_floating_point or dtype is torch.bool) and expr[1] not in constants_of(expr[1]).binary
    return expr[0] in ("cq", "ck") or any(_counts(item) for item in expr[1:] if isinstance(item, tuple))


def _is_whole(expr: Expr) -> bool:
    """Whether an expression and all its parts are whole numbers."""
    if expr[0] == "const":
        return float(expr[1]).is_integer()
    if expr[0] == "load":
        return not expr[1].meta["val"].dtype.is_floating_point
    return expr[0] in _WHOLE and all(map(_is_whole, expr[1:]))


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


def _arange(node: fx.Node) -> Range:
    ends = (0, node.args[0]) if node.target is aten.arange.default else node.args[:2]
    return _either(_range(ends[0]), _range(ends[1]))


_RULES: dict[Any, Callable[[fx.Node], Range]] = {
    aten.add.Tensor: _of_operands(lambda x, y: (x[0] + y[0], x[1] + y[1])),
    aten.sub.Tensor: _of_operands(lambda x, y: (x[0] - y[1], x[1] - y[0])),
    aten.rsub.Scalar: _of_operands(lambda x, y: (y[0] - x[1], y[1] - x[0])),
    aten.mul.Tensor: _of_operands(_product), aten.mul.Scalar: _of_operands(_product),
    aten.minimum.default: _of_operands(lambda x, y: (min(x[0], y[0]), min(x[1], y[1]))),
    aten.maximum.default: _of_operands(lambda x, y: (max(x[0], y[0]), max(x[1], y[1]))),
    aten.where.self: _of_operands(_either, 1), aten.tril.default: _or_zero, aten.triu.default: _or_zero,
    aten.full.default: _fill, aten.full_like.default: _fill, aten.arange.default: _arange,
    aten.arange.start: _arange, aten.arange.start_step: _arange,
    **dict.fromkeys((aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default), lambda node: (0.0, 0.0)),
    **dict.fromkeys((aten.ones.default, aten.ones_like.default, aten.new_ones.default), lambda node: (1.0, 1.0)),
    **dict.fromkeys(
        (aten._to_copy.default, aten.view.default, aten.expand.default, aten.unsqueeze.default, aten.slice.Tensor,
         aten.transpose.int, aten.permute.default, aten.clone.default, aten.alias.default, aten.squeeze.dim,
         aten.select.int, aten.reshape.default, aten.index.Tensor, aten._unsafe_view.default,
         aten.lift_fresh_copy.default), _same,
    ),
}  # fmt: skip
