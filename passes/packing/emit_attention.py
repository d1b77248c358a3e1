"""Emit a lifted attention on packed tokens, heads first, with a score in packed indices."""

from __future__ import annotations

import functools
import math
from functools import reduce

import torch
from torch import Tensor, fx

from treefx.errors import UnsupportedError
from treefx.kernels.ops import attend_with_lse
from treefx.kernels.recurrence.tree_conv import find_depths
from treefx.kernels.score import Expr, Score, evaluate
from treefx.passes.labels.dims import has_tokens
from treefx.passes.labels.facts import Axis, Dims, Fact, Kind, ancestors, fact_of
from treefx.passes.labels.laws.base import LABELLED
from treefx.passes.packing.emit_blocks import boundary_of_blocks, with_outside
from treefx.passes.packing.emitters import HIDING, SIGHT, Packer, emits
from treefx.passes.packing.layout import tokens_first
from treefx.passes.packing.repeats import Collapser
from treefx.passes.scores.attention_facts import Attention
from treefx.passes.scores.conditions import is_learned, may_blind
from treefx.passes.scores.hidden import Range, bounded, is_hidden, unknown

__all__ = [
    "as_model", "asked", "asks_for_sight", "check_hidden", "depths", "heads_first", "kernel_form", "operands",
    "places", "sink_logits",
]  # fmt: skip

aten = torch.ops.aten


_ROUNDING = 1.05
"""By how much a product computed in the narrowest type may exceed the product of norms."""


@emits(Attention)
def _attention(packer: Packer, node: fx.Node, fact: Fact) -> Tensor:
    attention = fact.law
    assert isinstance(attention, Attention) and fact.dims is not None
    query, key, value = operands(packer, attention)
    check_hidden(packer, attention, query, key)
    buffers: list[Tensor] = []
    visible = [kernel_form(packer, item, buffers) for item in asked(packer, attention)]
    score = Score(kernel_form(packer, attention.score, buffers), _all(visible))
    sinks = None if attention.sinks is None else sink_logits(packer, attention.sinks, query)
    boundary = None
    if attention.blocks is not None:
        boundary = boundary_of_blocks(packer, attention.blocks, key, value, functools.partial(_at_tokens, packer))
        expressions = ("and", score.value, *([] if score.visible is None else [score.visible]))
        buffers = with_outside(expressions, buffers)
    ends = packer.metadata.subtree_end
    out, lse = attend_with_lse(query, key, value, ends, score, buffers, sinks, boundary=boundary)
    if asks_for_sight(attention):
        packer.proofs.append((SIGHT, (lse != -math.inf).all()))
    return as_model(packer, node, out)


def asked(packer: Packer, attention: Attention) -> list[Expr]:
    """The conditions on keys and on pairs that not all tokens of the call meet."""
    return [item for item in (*attention.conditions, *attention.padding) if item not in packer.redundant]


def operands(packer: Packer, attention: Attention) -> tuple[Tensor, Tensor, Tensor]:
    """Return query, key and value as [1, heads, N, features] of one dtype."""
    query = heads_first(packer, attention.query)
    key, value = heads_first(packer, attention.key), heads_first(packer, attention.value)
    if key.shape[1] != value.shape[1]:
        key, value = (
            heads_first(packer, attention.key, whole=True),
            heads_first(packer, attention.value, whole=True),
        )
        heads = max(key.shape[1], value.shape[1])
        key, value = (x.expand(-1, heads, -1, -1) for x in (key, value))
    # Some models form scores in float32 and weigh values in their own type: the operator has one.
    wide = reduce(torch.promote_types, (key.dtype, value.dtype), query.dtype)
    return query.to(wide), key.to(wide), value.to(wide)


def check_hidden(packer: Packer, attention: Attention, query: Tensor, key: Tensor) -> None:
    """Ask in each call whether its numbers let the mask hide all it should, if nothing else proves that."""
    if attention.doubt is not None:
        packer.proofs.append((HIDING, is_hidden(*attention.doubt, functools.partial(_range, packer, query, key))))


def asks_for_sight(attention: Attention) -> bool:
    """Return whether only a run can tell if each query sees a key: a parameter decides, and blind is not zero."""
    conditions = (*attention.conditions, *attention.padding)
    return not attention.zero_if_blind and any(map(is_learned, conditions)) and may_blind(conditions)


def as_model(packer: Packer, node: fx.Node, out: Tensor) -> Tensor:
    """A result [1, heads, N, features] in the dtype and the dimensions that the model has."""
    dims = fact_of(node).dims
    assert dims is not None
    out = out.to(node.meta["val"].dtype)
    return out.reshape(packer.shape(dims)) if out.dim() != len(dims) else out


def _range(packer: Packer, query: Tensor, key: Tensor, expr: Expr) -> Range:
    """Bound the range of a score's operands: |q.k| <= max |q| max |k| for products."""
    if expr[0] == "dot":
        norms = [torch.linalg.vector_norm(x.detach(), dim=-1, dtype=torch.float64).amax() for x in (query, key)]
        largest = _ROUNDING * norms[0] * norms[1]
        return bounded(-largest, largest)
    if expr[0] != "load":
        return unknown(expr)
    node = expr[1]
    value = packer.packed(node) if fact_of(node).kind in LABELLED else packer.full(node)
    return bounded(value.amin(), value.amax())


def sink_logits(packer: Packer, logit: Expr, query: Tensor) -> Tensor:
    """The logits [heads] of attention sinks."""
    buffers: list[Tensor] = []
    expr = kernel_form(packer, logit, buffers)
    zero = query.new_zeros(())
    head = torch.arange(query.shape[1], device=query.device)
    index = torch.zeros((), dtype=torch.int64, device=query.device)
    value = evaluate(expr, dot=zero, q=index, k=index, head=head, batch=index, buffers=buffers)
    return value.expand(query.shape[1]).to(query.dtype)


def _at_tokens(packer: Packer, expr: Expr) -> Tensor:
    """An expression of the key's token at each token, [N]."""
    buffers: list[Tensor] = []
    form = kernel_form(packer, expr, buffers)
    own = torch.arange(packer.metadata.tokens, device=packer.metadata.column.device)
    zero = torch.zeros_like(own)
    value = evaluate(form, dot=zero, q=own, k=own, head=zero, batch=zero, buffers=buffers)
    return value.expand(packer.metadata.tokens)


def heads_first(packer: Packer, node: fx.Node, whole: bool = False) -> Tensor:
    """A query, key or value as [1, heads, N, features], heads it was repeated over left out."""
    dims = fact_of(node).dims
    assert dims is not None
    x, dims = (packer.packed(node), dims) if whole else _without_repeats(packer, node, dims)
    token = next(i for i, dim in enumerate(dims) if any(f.axis is Axis.TOKEN for f in dim))
    if len(dims) == 3:
        x = x if token == 1 else x.transpose(1, 2)
        return x.reshape(1, -1, packer.metadata.tokens, x.shape[-1])  # heads may stand before the tokens
    return x if token == 2 else x.transpose(2, 3)


def _without_repeats(packer: Packer, node: fx.Node, dims: Dims) -> tuple[Tensor, Dims]:
    """Take one of each group of repeated heads, if the groups are contiguous (``repeat_kv``)."""
    where = next(
        (i for i, dim in enumerate(dims) if dim and dim[-1].repeated and i < len(dims) - 2 + (len(dims) == 3)),
        None,
    )
    if where is None or any(factor.repeated for factor in dims[where][:-1]):
        return packer.packed(node), dims
    collapsed = Collapser(packer, dims[where][-1]).make(node)
    if collapsed is not None:
        return collapsed, dims
    group = dims[where][-1].size
    x = packer.packed(node).unflatten(where, (-1, group)).select(where + 1, 0)
    return x, dims


def kernel_form(packer: Packer, expr: Expr, buffers: list[Tensor]) -> Expr:
    """A lifted expression in packed indices, its loads numbered."""
    if expr[0] == "dot":
        return ("dot",)
    if expr[0] in ("cq", "ck"):
        return ("load", _number(buffers, places(packer)), ("q" if expr[0] == "cq" else "k",))
    if expr[0] == "load":
        return _kernel_load(packer, expr, buffers)
    return (
        expr[0],
        *[kernel_form(packer, item, buffers) if isinstance(item, tuple) else item for item in expr[1:]],
    )


def places(packer: Packer) -> Tensor:
    """Return each token's place, [N]: its column, or its depth where columns differ by row."""
    return depths(packer) if packer.own_positions else packer.metadata.column


def depths(packer: Packer) -> Tensor:
    """Return the number of tokens above each, [N]."""
    found: Tensor = packer.once("depths", None, lambda: find_depths(packer.metadata.subtree_end))
    return found


def _kernel_load(packer: Packer, expr: Expr, buffers: list[Tensor]) -> Expr:
    node, *indices = expr[1:]
    fact = fact_of(node)
    if fact.kind is Kind.INVARIANT:
        value = packer.full(node)  # later writes of the graph must not change values saved for the backward
        number = _number(buffers, value.clone() if node in packer.changed else value)
        return ("load", number, *[kernel_form(packer, item, buffers) for item in indices])
    if fact.kind is Kind.ROW and len(indices) == 2:
        return ("load", _number(buffers, _of_tokens(packer, node)), ("q",))
    if fact.kind is Kind.ROW:
        return ("load", _number(buffers, _of_rows(packer, node)), ("q",))
    assert fact.dims is not None
    dims = fact.dims
    first = packer.once("tokens_first", node, lambda: tokens_first(packer.packed(node), dims, packer.metadata.tokens))
    token, *rest = indices
    plain = [dim for dim in fact.dims if not has_tokens(dim)]
    loaded = first.reshape([-1, *[math.prod(f.size for f in dim) for dim in plain]])
    place = ("q",) if token == ("cq",) else ("k",)
    return ("load", _number(buffers, loaded), place, *[kernel_form(packer, item, buffers) for item in rest])


def _of_tokens(packer: Packer, node: fx.Node) -> Tensor:
    """One number per token, [N], that exists in full alone."""
    row, column = packer.metadata.row, packer.metadata.column
    numbers: Tensor = packer.once("of_tokens", node, lambda: packer.full(node)[row, column])
    return numbers


def _of_rows(packer: Packer, node: fx.Node) -> Tensor:
    """One number per row, [N]: that of each token's rows, which agree on it."""
    if packer.native and packer.tokens.ids in ancestors(node):
        raise UnsupportedError(
            f"a mask depends on whole rows through {node.target}, which under treefx.use(forest) are packed; "
            "call the model on a padded batch without treefx.use"
        )

    def of_tokens() -> Tensor:
        value: Tensor = packer.full(node)
        return value.reshape(-1).expand(packer.tokens.rows)[packer.metadata.row]

    return packer.once("of_rows", node, of_tokens)


def _number(buffers: list[Tensor], tensor: Tensor) -> int:
    for number, other in enumerate(buffers):
        if other is tensor:
            return number
    buffers.append(tensor)
    return len(buffers) - 1


def _all(conditions: list[Expr]) -> Expr | None:
    result: Expr | None = None
    for condition in conditions:
        result = condition if result is None else ("and", result, condition)
    return result
