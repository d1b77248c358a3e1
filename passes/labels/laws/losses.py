"""Where packed values end: losses that read one entry per row and token.

``nll_loss`` and ``gather`` pick single entries out of a packed ``[N, V]`` value by targets that differ from row to row.
Expanding the picked numbers instead of the value they are picked from means that no ``[B * T, V]`` tensor is ever made.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from treefx.passes.labels import dims as algebra
from treefx.passes.labels.dims import NoLaw
from treefx.passes.labels.facts import Axis, Dims, Fact, Factor, Kind, fact_of, shape_of
from treefx.passes.labels.laws.base import Call
from treefx.passes.labels.laws.reindex import Reindexed
from treefx.passes.trace.heads import UNSCORED

__all__ = ["Pick", "find_sink"]

aten = torch.ops.aten


@dataclass(frozen=True)
class Pick:
    """Hold entries of a packed value picked per row and token.

    ``ignore_index`` marks unused targets.
    """

    ignore_index: int | None


def find_sink(call: Call) -> Fact | None:
    """The fact of a loss that reads a packed value entry by entry, or None."""
    rule = _SINKS.get(call.node.target)
    source = call.node.args[0] if call.node.args else None
    if rule is None or not isinstance(source, fx.Node):
        return None
    fact = fact_of(source)
    if fact.kind is not Kind.PACKED and not isinstance(fact.law, Reindexed):
        return None
    try:
        return rule(call, fact.dims)
    except NoLaw:
        return None


def _nll_loss(call: Call, dims: Dims | None) -> Fact:
    """Label loss = - sum_i w_i x[i, target_i].

    The class dimension is the last of two, or the second of more.
    """
    source, target, weight = call.node_arg(0), *call.node.args[1:3]
    if weight is not None or not isinstance(target, fx.Node) or fact_of(target).kind is Kind.PACKED:
        raise NoLaw("a weighted loss, or targets made of hidden states")
    if dims is None and len(shape_of(source)) != 2:
        raise NoLaw("classes in the middle of shifted logits")
    if dims is not None:
        _only_tokens([dim for d, dim in enumerate(dims) if d != 1])
        algebra.resize(dims, 1, 1)
    ignore = call.arg(4, "ignore_index", -100)
    loss = Fact(Kind.ROW, learned=fact_of(source).learned)
    return Fact(Kind.ROW, parts=(loss, loss), law=Pick(ignore), learned=loss.learned)


def _gather(call: Call, dims: Dims | None) -> Fact:
    """y[b, t, i] = x[b, t, index[b, t, i]] along the last dimension."""
    source, dim, index = call.node_arg(0), call.node.args[1], call.node_arg(2)
    shape = shape_of(source)
    assert isinstance(dim, int)
    if dim % len(shape) != len(shape) - 1 or fact_of(index).kind is Kind.PACKED or shape_of(index)[:-1] != shape[:-1]:
        raise NoLaw("a gather within the packed values, or over some of the tokens")
    if dims is not None:
        _only_tokens(list(dims[:-1]))
        algebra.resize(dims, -1, 1)
    return Fact(Kind.ROW, law=Pick(None), learned=fact_of(source).learned)


def _head(call: Call, dims: Dims | None) -> Fact:
    """y[r] = f(hidden[token_of[r]], target[r]), of every row and token."""
    target, *others = call.node.args[1:4]
    assert isinstance(target, fx.Node)
    kinds = [fact_of(item).kind for item in others if isinstance(item, fx.Node)]
    if fact_of(target).kind is Kind.PACKED or any(kind is not Kind.INVARIANT for kind in kinds):
        raise NoLaw("scores targets made of hidden states, or with weights that differ from row to row")
    if dims is not None:
        _only_tokens(list(dims[:-1]))
        algebra.resize(dims, -1, shape_of(call.node_arg(0))[-1])
    scored = Fact(Kind.ROW, learned=True)
    return Fact(Kind.ROW, parts=tuple(scored for _ in call.node.meta["val"]), law=Pick(UNSCORED), learned=True)


def _only_tokens(dims: list[tuple[Factor, ...]]) -> None:
    """Check that dimensions hold every row and token once, in order, and nothing else."""
    if [factor.axis for dim in dims for factor in dim] != [Axis.ROW, Axis.TOKEN]:
        raise NoLaw("a loss over other dimensions than the tokens")


_SINKS: dict[Any, Callable[[Call, Dims | None], Fact]] = {
    aten.nll_loss_forward.default: _nll_loss,
    aten.nll_loss2d_forward.default: _nll_loss,
    aten.gather.default: _gather,
    torch.ops.treefx.head.default: _head,
}
