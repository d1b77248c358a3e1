"""Define laws of matrix products without attention probabilities.

The others are in ``treefx.passes.scores.attention_laws``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from treefx.passes.labels import dims as algebra
from treefx.passes.labels.dims import NoLaw
from treefx.passes.labels.facts import Axis, Dims, Fact, Factor, Kind, fact_of, token_axes
from treefx.passes.labels.laws.base import Call, aligned, find_law, law
from treefx.passes.labels.uniformity import is_uniform_along

aten = torch.ops.aten


@dataclass(frozen=True)
class OwnKeys:
    """Mark a product of a token's vectors with all keys of its row, repeated per query."""


@dataclass(frozen=True)
class WeighsKeys:
    """The law of a product per token that sums its scores over heads."""


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
    """Batched products: per token, or per head query x key (scores)."""
    left, right = call.node.args[-2:]
    assert isinstance(left, fx.Node) and isinstance(right, fx.Node)
    if fact_of(left).kind is Kind.SCORE:
        return _of_scores(call)
    if not (call.labelled(left) and call.labelled(right)):
        return _add(call, _batched_by_invariant(call, left, right))
    a, b = call.dims(left), call.dims(right)
    if call.node.target is aten.bmm.default and _repeats_keys(a, b):
        return call.result((a[0], a[1], (Factor(Axis.KEY, b[2][0].size),)), law=OwnKeys())
    if not algebra.same_tokens(a[0], b[0]):
        raise NoLaw("a batched product pairs different tokens")
    if algebra.has_tokens(a[2]) or algebra.has_tokens(b[1]):
        raise NoLaw("contracts over the tokens")
    if fact_of(right).kind is Kind.SCORE and call.node.target is aten.bmm.default and _weighs_keys(a, b):
        return call.result((algebra.coalesce(a[0]), a[1], b[2]), law=WeighsKeys())
    batch = algebra.broadcast([(a[0],), (b[0],)])[0]
    if not algebra.has_tokens(a[1]) and not algebra.has_tokens(b[2]):
        return _add(call, (batch, a[1], b[2]))  # one small product per token
    if not ends_in_tokens(a[1]) or [f.axis for f in b[2]] != [Axis.TOKEN]:
        raise NoLaw("a product over tokens that is not query times key")
    keys = (Factor(Axis.KEY, b[2][0].size),)
    return call.result((algebra.coalesce(batch), a[1], keys))


def _repeats_keys(a: Dims, b: Dims) -> bool:
    """Return whether vectors of one token meet all keys of its row, repeated per query.

    Vectors are [B * T, n, D], keys [B * T, D, T].
    """
    queries, keys = [f.axis for f in a[0]], [f.axis for f in b[0]]
    repeated = keys == [Axis.ROW, Axis.PLAIN] and b[0][1].repeated and queries == [Axis.ROW, Axis.TOKEN]
    if not repeated or [f.size for f in a[0]] != [f.size for f in b[0]] or [f.axis for f in b[2]] != [Axis.TOKEN]:
        return False
    return not any(algebra.has_tokens(dim) for dim in (a[1], a[2], b[1]))


def _weighs_keys(a: Dims, b: Dims) -> bool:
    """Return whether a token's scores [B * T, heads, T] are summed with weights over heads.

    Weights are [B * T, n, heads].
    """
    tokens = token_axes((a[0],)) == {Axis.ROW, Axis.TOKEN}
    return tokens and not algebra.has_tokens(a[1]) and algebra.is_keys(b[2])


def _of_scores(call: Call) -> Fact:
    """Leave functions of attention scores to the laws that lift them."""
    found = find_law(call.node.target, of=Kind.SCORE)
    if found is None:
        raise NoLaw("multiplies attention scores")
    return found(call)


def ends_in_tokens(dim: tuple[Factor, ...]) -> bool:
    """Return whether a dimension runs over tokens, for each of some heads.

    Query groups may be merged with the queries.
    """
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
    """Label a product with an invariant operand.

    The other's batch may hold rows only where the invariant one does not vary.
    """
    a, b = call.dims(left), call.dims(right)
    if algebra.has_tokens(a[2]) or algebra.has_tokens(b[1]):
        raise NoLaw("contracts over the tokens")
    tokens, invariant = (a, right) if call.labelled(left) else (b, left)
    if token_axes((tokens[0],)) and not _varies_beside_rows(invariant, tokens[0]):
        raise NoLaw("multiplies tokens with a matrix that varies from token to token")
    return (tokens[0], a[1], b[2])


def _varies_beside_rows(matrices: fx.Node, batch: tuple[Factor, ...]) -> bool:
    """Return whether invariant matrices differ along other digits of the batch than the rows, as one per head does.

    One that is equal along all of several digits is no such matrix: it is the first state of a recurrence, whose scan
    reads it.
    """
    axes, sizes = [factor.axis for factor in batch], [factor.size for factor in batch]
    if token_axes((batch,)) != {Axis.ROW} or axes.count(Axis.ROW) != 1:
        return False
    uniform = [is_uniform_along(matrices, 0, sizes, digit) for digit in range(len(sizes))]
    return uniform[axes.index(Axis.ROW)] and (len(sizes) == 1 or not all(uniform))
