"""Define laws of operators that end an attention: softmax-bmm and SDPA.

SDPA is ``scaled_dot_product_attention``.

They need the lifter, so they are registered from here; ``treefx.passes.labels.laws`` knows none of it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import fx

from treefx.passes.labels import dims as algebra
from treefx.passes.labels.constants import constants_of
from treefx.passes.labels.dims import NoLaw
from treefx.passes.labels.facts import ALONG_ROWS, Axis, Fact, Factor, Kind, fact_of, shape_of
from treefx.passes.labels.laws.base import Call, law
from treefx.passes.labels.laws.matmul import ends_in_tokens
from treefx.passes.scores import choices as _choices  # noqa: F401  (registers laws)
from treefx.passes.scores.attention_facts import Attention, lift_products, lift_sdpa
from treefx.passes.scores.flash_facts import lift_flash
from treefx.passes.trace.flash import is_flash

aten = torch.ops.aten


@law(aten.bmm, aten.baddbmm, of=Kind.SCORE)
def close_attention(call: Call) -> Fact:
    """softmax(score) V over the keys: one tree attention."""
    probabilities, values = call.node.args[-2:]
    assert isinstance(probabilities, fx.Node) and isinstance(values, fx.Node)
    if call.node.target is not aten.bmm.default:
        raise NoLaw("adds to an attention output inside the product")
    p, v = call.dims(probabilities), call.dims(values)
    keys, tokens = [f.axis for f in p[2]], [f.axis for f in v[1]]
    if keys != [Axis.KEY] or tokens != [Axis.TOKEN] or p[2] != (Factor(Axis.KEY, v[1][0].size),):
        raise NoLaw("a product with attention probabilities over other keys than the values'")
    if not algebra.same_tokens(p[0], v[0]) or not ends_in_tokens(p[1]):
        raise NoLaw("a product with attention probabilities that is not probabilities times values")
    attention = _lifted(call, lambda: lift_products(probabilities, values))
    learned = any(fact_of(node).learned for node in call.operands)
    return Fact(Kind.PACKED, (p[0], p[1], v[2]), law=attention, learned=learned)


@law(torch.ops.treefx.attention, torch.ops.treefx.flash)
def attention(call: Call) -> Fact:
    """Attention of token-wise queries, keys and values by one operator: one tree attention."""
    query, key, value = call.node.args[:3]
    assert isinstance(query, fx.Node) and isinstance(key, fx.Node) and isinstance(value, fx.Node)
    if not all(call.labelled(node) for node in (query, key, value)):
        raise NoLaw("attends with values that are not token-wise")
    q, k, v = call.dims(query), call.dims(key), call.dims(value)
    for dims in (q, k, v):
        if len(dims) != 4 or [f.axis for f in dims[0]] != [Axis.ROW] or [f.axis for f in dims[2]] != [Axis.TOKEN]:
            raise NoLaw(f"attention expects [rows, heads, tokens, features], got {dims}")
        if algebra.has_tokens(dims[1]) or algebra.has_tokens(dims[3]):
            raise NoLaw("attention with tokens in its head or feature dimension")
    learned = any(fact_of(node).learned for node in call.operands)
    dims = (q[0], algebra.coalesce(q[1]), q[2], v[3])
    lift = lift_flash if is_flash(call.node.target) else lift_sdpa
    return Fact(Kind.PACKED, dims, law=_lifted(call, lambda: lift(call.node)), learned=learned)


@law(torch.ops.treefx.segments)
def segments(call: Call) -> Fact:
    """Label numbers of the segments of a single row; with several rows they are not read."""
    rows, columns = shape_of(call.node)
    return Fact(Kind.PREFIX, ((Factor(Axis.ROW, rows),), (Factor(Axis.TOKEN, columns),)), law=ALONG_ROWS)


def _lifted(call: Call, lift: Callable[[], Attention]) -> Attention:
    """An attention in its lifted form; one that has none may see other segments."""
    try:
        return lift()
    except NoLaw as reason:
        constants_of(call.node).segments.leak = str(reason)
        raise
