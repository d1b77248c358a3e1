"""Define laws along plain dimensions: reductions, softmaxes, selections, norms."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from treefx.passes.labels import dims as algebra
from treefx.passes.labels.dims import NoLaw
from treefx.passes.labels.facts import ALONG_ROWS, Axis, Fact, Factor, Kind, fact_of
from treefx.passes.labels.laws.base import Call, find_law, law
from treefx.passes.labels.laws.pointwise import pointwise
from treefx.passes.labels.laws.shape import expand, permute, squeeze, unsqueeze, view

__all__ = ["check_statistic", "selection"]

aten = torch.ops.aten


def check_statistic(call: Call) -> None:
    """Check that a statistic of attention scores only goes back to scores.

    For instance, their maximum over the keys.

    Raises:
        NoLaw: The operator makes something else of it.
    """
    own = all(fact_of(node).kind in (Kind.SCORE, Kind.INVARIANT) for node in call.operands)
    movement = (view, permute, unsqueeze, squeeze, expand, reduction)
    if not own or find_law(call.node.target) not in (*movement, pointwise):
        raise NoLaw("reads a statistic of attention scores")


@law(
    aten.sum.dim_IntList, aten.mean.dim, aten.amax, aten.amin, aten.var.correction, aten.std.correction,
    aten.prod.dim_int, aten.logsumexp, aten.linalg_vector_norm, aten.norm.ScalarOpt_dim, aten.any.dim, aten.all.dim,
    aten.argmax, aten.argmin, aten.var_mean.correction, aten.max.dim, aten.min.dim, aten.any.dims, aten.all.dims,
)  # fmt: skip
def reduction(call: Call) -> Fact:
    """A reduction over plain dimensions."""
    source = call.node_arg(0)
    dims = call.dims(source)
    vector_norm = call.node.target in {aten.linalg_vector_norm.default, aten.norm.ScalarOpt_dim}
    given = call.arg(2 if vector_norm else 1, "dim")
    where = _where(given, len(dims))
    for d in where:
        if not algebra.is_keys(dims[d]):  # a function of scores is lifted or read in full, never run packed
            algebra.resize(dims, d, 1)
    value = call.node.meta["val"]
    first = value if isinstance(value, torch.Tensor) else value[0]
    keeps = first.dim() == len(dims)
    kept = tuple(() if d in where else dim for d, dim in enumerate(dims) if keeps or d not in where)
    if isinstance(value, torch.Tensor):
        return call.result(kept)
    return Fact(call.result(kept).kind, parts=(call.result(kept),) * len(value), learned=call.result(kept).learned)


def _where(given: Any, rank: int) -> set[int]:
    dims: Iterable[int] = range(rank) if given is None or given == [] else [given] if isinstance(given, int) else given
    return {d % rank for d in dims}


@law(
    aten._softmax, aten._log_softmax, aten._safe_softmax, aten.softmax, aten.log_softmax, aten.cumsum, aten.cumprod,
    aten.flip, aten.roll, aten.logcumsumexp,
)  # fmt: skip
def along_dimension(call: Call) -> Fact:
    """Label a function along plain dimensions; a softmax over keys is left to the lifter."""
    source = call.node_arg(0)
    dims = call.dims(source)
    given = call.arg(2, "dims") if call.node.target is aten.roll.default else call.arg(1, "dim")
    where = _where(given, len(dims))
    softmax = call.node.target in {aten._softmax.default, aten._safe_softmax.default, aten.softmax.int}
    reach = None
    for d in where:
        if softmax and algebra.is_keys(dims[d]):
            continue
        if call.node.target is aten.cumsum.default and _is_causal_sum(call, dims[d]):
            reach = ALONG_ROWS
            continue
        algebra.resize(dims, d, 1)
    return call.result(tuple(algebra.unrepeated(dim) if d in where else dim for d, dim in enumerate(dims)), reach)


def _is_causal_sum(call: Call, dim: tuple[Factor, ...]) -> bool:
    """Return whether a running sum over a row's tokens reads the past alone.

    It stays prefix-determined where computed in full.
    """
    whole = [factor.axis for factor in dim] == [Axis.TOKEN]
    return whole and call.result(()).kind is Kind.PREFIX


@law(aten.topk, aten.sort)
def selection(call: Call) -> Fact:
    """Values and indices of a selection along a plain dimension."""
    source = call.node_arg(0)
    dims = call.dims(source)
    position = 2 if call.node.target is aten.topk.default else 1
    named: Any = call.node.kwargs.get("dim", -1)
    dim = call.arg(position, "dim", -1) if call.node.target is not aten.sort.stable else named
    if algebra.is_keys(dims[dim]):
        chooses = find_law(call.node.target, of=Kind.SCORE)
        if chooses is not None:
            return chooses(call)
    part = call.result(algebra.resize(dims, dim, call.node.meta["val"][0].shape[dim]))
    return Fact(part.kind, parts=(part, part), learned=part.learned)


@law(aten.native_layer_norm, aten._fused_rms_norm)
def normalisation(call: Call) -> Fact:
    """A normalisation over trailing plain dimensions."""
    source = call.node_arg(0)
    dims = call.dims(source)
    rank = len(call.node.args[1])  # type: ignore[arg-type]
    for d in range(len(dims) - rank, len(dims)):
        algebra.resize(dims, d, 1)
    whole = call.result(dims)
    statistics = call.result(dims[: len(dims) - rank] + ((),) * rank)
    count = len(call.node.meta["val"])
    return Fact(whole.kind, parts=(whole,) + (statistics,) * (count - 1), learned=whole.learned)
