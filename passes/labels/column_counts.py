"""Find values of tokens that depend on the number of columns of a row.

Rows by themselves have a number of columns each, the packed row of a forest has yet another. A graph may run on that
row only if no value of a token depends on the number. Harmless::

    x + place[:T];  arange(T) as positions;  tril(ones(T, T)) as a mask;  x.view(1, T, heads, width)

Refused::

    x * T / 5;  x * arange(T).max();  x * ones(T).sum();  arange(T).flip(0);  x[..., :T].sum(-1)

A graph that is labelled with the number of columns as a symbol shows them all.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import SymBool, SymFloat, SymInt, Tensor, fx
from torch.utils._pytree import tree_leaves

from treefx.passes.labels.corners import first_dependent
from treefx.passes.labels.facts import Axis, Kind, fact_of, shape_of
from treefx.passes.labels.purity import read_operands
from treefx.passes.trace import flash as _flash  # noqa: F401  (registers it)
from treefx.passes.trace import opaque_ops as _opaque_ops  # noqa: F401  (registers attention)

__all__ = ["find_column_count"]

aten = torch.ops.aten
_ATTENTION = {torch.ops.treefx.attention.default, torch.ops.treefx.flash.default}
_EXTENTS = {
    aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.expand.default, aten.new_zeros.default,
    aten.new_ones.default, aten.new_empty.default, torch.ops.treefx.segments.default,
}  # fmt: skip
"""A size among their arguments says how far the result extends."""
_MOVES = {
    *_EXTENTS, aten.slice.Tensor, aten.constant_pad_nd.default, aten.permute.default, aten.transpose.int,
    aten.t.default, aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.squeeze.default,
    aten.clone.default, aten.alias.default, aten.detach.default, aten._to_copy.default, aten.copy_.default,
    aten.cat.default, aten.select.int, aten.new_full.default, aten.repeat.default, aten.index.Tensor,
    aten.index_select.default, aten.gather.default, aten.embedding.default, aten.tril.default, aten.triu.default,
    aten.cumsum.default,
}  # fmt: skip
"""Operators that join no elements of an operand, or leading ones only, besides pointwise ones."""


def find_column_count(gm: fx.GraphModule) -> fx.Node | None:
    """Find the first operator that makes a token's value depend on the columns; else None.

    Args:
        gm: A labelled graph of one row with a symbolic number of columns.
    """
    found = (_dependent(node) for node in _computed(gm))
    return next((node for node in found if node is not None), None)


def _computed(gm: fx.GraphModule) -> Iterator[fx.Node]:
    """Yield the nodes that reach an output or a buffer, in order."""
    stack = [*gm.graph.find_nodes(op="output"), *gm.graph.find_nodes(op="call_function", target=aten.copy_.default)]
    read = set(stack)
    while stack:
        sources = [source for source in read_operands(stack.pop()) if source not in read]
        read.update(sources)
        stack += sources
    return (node for node in gm.graph.nodes if node in read and node.op in ("call_function", "output"))


def _dependent(node: fx.Node) -> fx.Node | None:
    """Return the operator that makes a value depend on the number of columns.

    Its operands of tokens do not.
    """
    if node.op == "call_function" and fact_of(node).kind is Kind.INVARIANT:
        return None  # its readers look at it
    fixed = [source for source in read_operands(node) if _is_fixed(source)]
    for source in fixed:
        if (found := first_dependent(source)) is not None:
            return found
    if node.op == "call_function" and (_takes_count(node) or _joins_columns(node)):
        return node
    return None


def _is_fixed(node: fx.Node) -> bool:
    return node.op == "call_function" and fact_of(node).kind is Kind.INVARIANT


def _takes_count(node: fx.Node) -> bool:
    """Return whether a number of columns is an argument other than an extent of the result."""
    if node.target in _EXTENTS:
        return False
    args = list(node.args)
    if node.target is aten.slice.Tensor and len(args) > 2:
        source, dim = node.args[:2]
        assert isinstance(source, fx.Node) and isinstance(dim, int)
        if str(shape_of(source)[dim]) == str(shape_of(node)[dim]):
            return False  # x[:, -T:] of T columns is x, for every T
        if len(args) > 3 and _is_symbol(shape_of(source)[dim]):
            args[3] = None  # the end
    if node.target is aten.constant_pad_nd.default:
        args[1] = list(node.args[1])[::2]  # type: ignore[arg-type]  # how much stands in front
    return any(map(_is_symbol, tree_leaves((args, node.kwargs))))


def _joins_columns(node: fx.Node) -> bool:
    """Return whether an operator joins elements along a dimension of columns, not tokens.

    Along tokens and keys, laws and attention define the reads.
    """
    target: Any = node.target
    operands = node.args[:3] if target in _ATTENTION else read_operands(node)
    values = [x for x in operands if isinstance(x, fx.Node) and isinstance(x.meta.get("val"), Tensor)]
    pointwise = torch.Tag.pointwise in getattr(target, "tags", ())
    if not pointwise and target not in _MOVES and any(map(_has_plain_columns, values)):
        return True
    if fact_of(node).kind is not Kind.ROW or target in _MOVES or not isinstance(node.meta.get("val"), Tensor):
        return False
    of_tokens = max((_count_symbols(x) for x in values if not _is_fixed(x)), default=0)
    return _count_symbols(node) > of_tokens and any(map(_is_fixed, values))


def _has_plain_columns(node: fx.Node) -> bool:
    factors = [factor for dim in fact_of(node).dims or () for factor in dim]
    return any(factor.axis is Axis.PLAIN and _is_symbol(factor.size) for factor in factors)


def _count_symbols(node: fx.Node) -> int:
    return sum(map(_is_symbol, shape_of(node)))


def _is_symbol(size: Any) -> bool:
    """Whether a number is or is made of a number of columns."""
    return isinstance(size, SymInt | SymFloat | SymBool)
