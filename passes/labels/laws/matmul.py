"""Laws of matrix products, among them the one that turns bmm-softmax-bmm into tree attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from treefx.passes.labels import dims as algebra
from treefx.passes.labels.dims import NoLaw
from treefx.passes.labels.facts import Axis, Dims, Fact, Factor, Kind, fact_of, token_axes
from treefx.passes.labels.laws.base import Call, aligned, law
from treefx.passes.labels.uniformity import is_uniform
from treefx.passes.scores.attention_facts import lift_products, lift_sdpa

aten = torch.ops.aten


@law(aten.mm)
def mm(call: Call) -> Fact:
    """(x W)[n, j] = sum_i x[n, i] W[i, j], and the same from the left."""
    left, right = call.node.args[:2]
    return call.result(_product(call, left, right))


@law(aten.addmm)
def addmm(call: Call) -> Fact:
    """A matrix product and an invariant or token-wise bias."""
    bias, left, right = call.node.args[:3]
    dims = _product(call, left, right)
    assert isinstance(bias, fx.Node)
    if call.labelled(bias):
        dims = algebra.broadcast([dims, call.dims(bias)])
    else:
        aligned(call, bias, dims)
    return call.result(dims)


def _product(call: Call, left: Any, right: Any) -> Dims:
    """Dimensions of ``left @ right`` (two dimensions each), one of them made of tokens."""
    a, b = call.dims(left), call.dims(right)
    if call.labelled(left) and call.labelled(right):
        raise NoLaw("multiplies tokens with tokens")
    if algebra.has_tokens(a[-1]) or algebra.has_tokens(b[-2]):
        raise NoLaw("contracts over the tokens")
    return (*a[:-1], b[-1])


@law(aten.mv, aten.dot)
def mv(call: Call) -> Fact:
    """A matrix of tokens times an invariant vector."""
    left, right = call.node.args[:2]
    assert isinstance(left, fx.Node)
    dims = call.dims(left)
    if call.labelled(right) or len(dims) != 2 or algebra.has_tokens(dims[1]):
        raise NoLaw("contracts over the tokens")
    return call.result(dims[:1])


@law(aten.bmm, aten.baddbmm)
def bmm(call: Call) -> Fact:
    """Batched products: per token, per head query x key (scores), or per head probabilities x values (attention)."""
    left, right = call.node.args[-2:]
    assert isinstance(left, fx.Node) and isinstance(right, fx.Node)
    if fact_of(left).kind is Kind.SCORE:
        if call.node.target is not aten.bmm.default:
            raise NoLaw("adds to an attention output inside the product")
        return _close_attention(call, left, right)
    if not (call.labelled(left) and call.labelled(right)):
        return _add(call, _batched_by_invariant(call, left, right))
    a, b = call.dims(left), call.dims(right)
    if not algebra.same_tokens(a[0], b[0]):
        raise NoLaw("a batched product pairs different tokens")
    if algebra.has_tokens(a[2]) or algebra.has_tokens(b[1]):
        raise NoLaw("contracts over the tokens")
    batch = algebra.broadcast([(a[0],), (b[0],)])[0]
    if not algebra.has_tokens(a[1]) and not algebra.has_tokens(b[2]):
        return _add(call, (batch, a[1], b[2]))  # one small product per token
    if not _ends_in_tokens(a[1]) or [f.axis for f in b[2]] != [Axis.TOKEN]:
        raise NoLaw("a product over tokens that is not query times key")
    keys = (Factor(Axis.KEY, b[2][0].size),)
    return call.result((algebra.coalesce(batch), a[1], keys))


def _ends_in_tokens(dim: tuple[Factor, ...]) -> bool:
    """Whether a dimension runs over tokens, for each of some heads (query groups merged with the queries)."""
    return [f.axis for f in dim][-1:] == [Axis.TOKEN] and not algebra.has_tokens(dim[:-1])


def _add(call: Call, dims: Dims) -> Fact:
    """The added operand of ``baddbmm`` must run over the same tokens."""
    if call.node.target is aten.baddbmm.default:
        added: Any = call.node.args[0]
        if call.labelled(added):
            dims = algebra.broadcast([dims, call.dims(added)])
        else:
            aligned(call, added, dims)
    return call.result(dims)


def _batched_by_invariant(call: Call, left: fx.Node, right: fx.Node) -> Dims:
    """One operand is invariant: the other's batch may hold rows only where the invariant one does not vary."""
    a, b = call.dims(left), call.dims(right)
    if algebra.has_tokens(a[2]) or algebra.has_tokens(b[1]):
        raise NoLaw("contracts over the tokens")
    tokens, invariant = (a, right) if call.labelled(left) else (b, left)
    axes = token_axes((tokens[0],))
    if axes and not (axes == {Axis.ROW} and len(tokens[0]) == 1 and is_uniform(invariant, 0)):
        raise NoLaw("multiplies tokens with a matrix that varies from token to token")
    return (tokens[0], a[1], b[2])


def _close_attention(call: Call, probabilities: fx.Node, values: fx.Node) -> Fact:
    """softmax(score) V over the keys: one tree attention."""
    p, v = call.dims(probabilities), call.dims(values)
    keys, tokens = [f.axis for f in p[2]], [f.axis for f in v[1]]
    if keys != [Axis.KEY] or tokens != [Axis.TOKEN] or p[2] != (Factor(Axis.KEY, v[1][0].size),):
        raise NoLaw("a product with attention probabilities over other keys than the values'")
    if not algebra.same_tokens(p[0], v[0]) or not _ends_in_tokens(p[1]):
        raise NoLaw("a product with attention probabilities that is not probabilities times values")
    attention = lift_products(probabilities, values)
    learned = any(fact_of(node).learned for node in call.operands)
    return Fact(Kind.PACKED, (p[0], p[1], v[2]), law=attention, learned=learned)


@law(torch.ops.treefx.attention)
def attention(call: Call) -> Fact:
    """scaled_dot_product_attention of token-wise queries, keys and values: one tree attention."""
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
    return Fact(Kind.PACKED, dims, law=lift_sdpa(call.node), learned=learned)
