"""Recognise handwritten softmaxes: exp(s) / sum exp(s), also with one more term below.

A term exp(z) next to the sum is a logit z that takes weight and has no value, an attention sink: softmax-1, or
off-by-one, is one of logit 0. For any number m of the query subtracted from the scores (their maximum), the fraction is
the same if the term has it too: exp(s - m) / (exp(z - m) + sum exp(s - m)).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from treefx.kernels.score import Expr
from treefx.passes.labels.dims import NoLaw
from treefx.passes.labels.facts import Kind, fact_of, shape_of
from treefx.passes.scores.digits import Index, offset_of_keys
from treefx.passes.scores.lift_mask import lift
from treefx.passes.scores.score_algebra import const

__all__ = ["is_quotient", "lift_quotient"]

aten = torch.ops.aten


def is_quotient(node: fx.Node) -> bool:
    """Whether a node may be such a fraction: scores over a number per query."""
    return node.target is aten.div.Tensor and all(
        isinstance(item, fx.Node) and fact_of(item).kind is Kind.SCORE for item in node.args[:2]
    )


def lift_quotient(node: fx.Node, index: Index) -> tuple[Expr, Expr | None]:
    """The score, and the logit of the sink if there is one.

    Raises:
        NoLaw: It is another fraction.
    """
    weights, total = node.args[:2]
    assert isinstance(weights, fx.Node) and isinstance(total, fx.Node)
    added = _beside_the_sum(total, weights, index)
    score, shift = _logarithm(weights, index)
    if added is None:
        return score, None
    return score, _sink(added, shift, (*index[:-1], ()))


def _beside_the_sum(total: fx.Node, weights: fx.Node, index: Index) -> Any:
    """Return the term added to the sum of the weights over all keys; None for none."""
    added: Any = None
    if total.target is aten.add.Tensor and not total.kwargs:
        first, second = total.args[:2]
        total, added = (first, second) if _is_sum_of(first, weights, index) else (second, first)  # type: ignore[assignment]
    if not _is_sum_of(total, weights, index):
        raise NoLaw("attention weights divided by something else than their sum over the keys")
    return added


def _is_sum_of(total: Any, weights: fx.Node, index: Index) -> bool:
    if not isinstance(total, fx.Node) or total.target is not aten.sum.dim_IntList or total.args[0] is not weights:
        return False
    rank = len(index)
    dims: Any = total.args[1]
    over_keys = [d % rank for d in dims] == [rank - 1] and offset_of_keys(index[-1]) == 0
    return over_keys and len(shape_of(total)) == rank and shape_of(total)[-1] == 1


def _logarithm(weights: fx.Node, index: Index) -> tuple[Expr, fx.Node | None]:
    """Return the score whose exponential a weight is, and the number subtracted from it."""
    if weights.target in (aten.masked_fill.Scalar, aten.masked_fill.Tensor) and weights.args[2] == 0:
        inner, mask = weights.args[:2]
        assert isinstance(inner, fx.Node) and isinstance(mask, fx.Node)
        score, shift = _logarithm(inner, index)
        aligned = tuple(() if size == 1 else index[d - len(shape_of(mask))] for d, size in enumerate(shape_of(mask)))
        return ("where", lift(mask, aligned), const(-math.inf), score), shift
    source = weights.args[0]
    if weights.target is not aten.exp.default or not isinstance(source, fx.Node):
        raise NoLaw(f"attention weights that pass through {weights.target} before they are divided by their sum")
    if source.target is aten.sub.Tensor and not source.kwargs:
        scores, less = source.args[:2]
        if isinstance(scores, fx.Node) and isinstance(less, fx.Node) and _is_per_query(scores, less):
            return lift(scores, index), _same_value(less)
    return lift(source, index), None


def _is_per_query(scores: fx.Node, shift: fx.Node) -> bool:
    shape = shape_of(shift)
    return len(shape) == len(shape_of(scores)) and shape[-1] == 1 and fact_of(scores).kind is Kind.SCORE


def _same_value(node: Any) -> Any:
    """Skip detach: in exact arithmetic, a shift of all logits of a query has no gradient."""
    while isinstance(node, fx.Node) and node.target in (aten.detach.default, aten.alias.default):
        node = node.args[0]
    return node


def _sink(added: Any, shift: fx.Node | None, index: Index) -> Expr:
    """z where exp(z - shift) is added to the sum of exp(score - shift)."""
    if not isinstance(added, fx.Node):
        if shift is not None or not added > 0:
            raise NoLaw("a number added to the sum of exponentials that differ from query to query by a factor")
        return const(math.log(added))
    logit = added.args[0]
    if added.target is not aten.exp.default or not isinstance(logit, fx.Node):
        raise NoLaw(f"something added to the sum of attention weights that is no exponential ({added.target})")
    if shift is None:
        return _of_head(logit, index)
    if logit.target is aten.neg.default and _same_value(logit.args[0]) is shift:
        return const(0.0)
    if logit.target is aten.sub.Tensor and not logit.kwargs and isinstance(logit.args[1], fx.Node):
        sink, subtracted = logit.args[:2]
        if _same_value(subtracted) is shift:
            return _of_head(sink, index)
    raise NoLaw("an exponential added to the sum of others that lack the same shift")


def _of_head(logit: Any, index: Index) -> Expr:
    if not isinstance(logit, fx.Node):
        return const(float(logit))
    shape = shape_of(logit)
    return lift(logit, tuple(() if size == 1 else index[d - len(shape)] for d, size in enumerate(shape)))
