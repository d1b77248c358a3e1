"""Laws of operators that work element by element."""

from __future__ import annotations

import torch
from torch import fx

from treefx.passes.labels import dims as algebra
from treefx.passes.labels.dims import NoLaw
from treefx.passes.labels.facts import Dims, Fact, Kind, fact_of
from treefx.passes.labels.laws.base import Call, aligned, law, law_where
from treefx.passes.labels.laws.gradients import custom_function_reason, is_pointwise

__all__ = ["lerp", "pointwise"]

aten = torch.ops.aten


@law_where(is_pointwise)
@law(
    aten._to_copy, aten.clone, aten.detach, aten.alias, aten.contiguous, aten.where, aten.lift_fresh_copy,
    aten.zeros_like, aten.ones_like, aten.full_like, aten.empty_like, aten.masked_fill, aten.bitwise_and,
    aten.bitwise_or, aten.bitwise_not, aten.logical_and, aten.logical_or, aten.logical_not, aten.addcmul, aten.addcdiv,
    aten._conj, aten._prelu_kernel, aten.pow, aten.fmod, aten.remainder, aten.floor_divide, aten.polar,
)  # fmt: skip
def pointwise(call: Call) -> Fact:
    """f(x, y)[n] = f(x[n], y[n]); invariant operands are read at the token's column."""
    labelled = [node for node in call.operands if call.labelled(node)]
    if any(fact_of(node).kind is Kind.SCORE for node in labelled):
        return _pointwise_score(call, labelled)
    dims = algebra.broadcast([call.dims(node) for node in labelled])
    others = [node for node in call.operands if not call.labelled(node)]
    for node in others:
        aligned(call, node, dims)
    full = algebra.broadcast([dims, *[_unlabelled(call.dims(node), dims) for node in others]])
    return call.result(full)


@law(aten.lerp)
def lerp(call: Call) -> Fact:
    """x + w (y - x), pointwise."""
    return pointwise(call)


def _unlabelled(dims: Dims, target: Dims) -> Dims:
    """Return an invariant operand's dimensions, with size one for those next to tokens."""
    rank = len(target)
    kept = []
    for position, dim in enumerate(dims):
        opposite = position - len(dims) + rank
        kept.append(() if opposite >= 0 and algebra.has_tokens(target[opposite]) else dim)
    return tuple(kept)


def _pointwise_score(call: Call, labelled: list[fx.Node]) -> Fact:
    """Label scores with operands of their own shape, which the lifter reads and proves."""
    scores = [node for node in labelled if fact_of(node).kind is Kind.SCORE]
    own = algebra.broadcast([call.dims(node) for node in scores])
    shape = tuple(call.node.meta["val"].shape)
    if tuple(algebra.extent(dim) for dim in own) != shape:
        raise NoLaw("widens attention scores")
    return call.result(own)


@law(torch.ops.treefx.custom_function)
def custom_function(call: Call) -> Fact:
    """Label a user's autograd.Function with pointwise bodies and a linear backward."""
    reason = custom_function_reason(str(call.node.args[1]))
    if reason is not None:
        raise NoLaw(reason)
    part = pointwise(call)
    return Fact(part.kind, parts=(part,) * len(call.node.meta["val"]), learned=part.learned)
