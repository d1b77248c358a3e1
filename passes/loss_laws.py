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

from treefx.passes import dims as algebra
from treefx.passes.dims import NoLaw
from treefx.passes.facts import Axis, Dims, Fact, Kind, fact_of
from treefx.passes.laws import Call

__all__ = ["Pick", "find_sink"]

aten = torch.ops.aten


@dataclass(frozen=True)
class Pick:
    """Entries of a packed value picked per row and token; ``ignore_index`` marks targets that nobody reads."""

    ignore_index: int | None


def find_sink(call: Call) -> Fact | None:
    """The fact of a loss that reads a packed value entry by entry, or None."""
    rule = _SINKS.get(call.node.target)
    source = call.node.args[0] if call.node.args else None
    if rule is None or not isinstance(source, fx.Node) or fact_of(source).kind is not Kind.PACKED:
        return None
    try:
        return rule(call, fact_of(source).dims or ())
    except NoLaw:
        return None


def _nll_loss(call: Call, dims: Dims) -> Fact:
    """loss = - sum_i w_i x[i, target_i]; the class dimension is the last of two, or the second of more."""
    target, weight = call.node.args[1:3]
    source = call.node_arg(0)
    classes = 1 if len(dims) > 1 else 0
    if weight is not None or algebra.has_tokens(dims[classes]) or len(dims) < 2:
        raise NoLaw("a weighted loss")
    tokens = [factor.axis for d, dim in enumerate(dims) if d != classes for factor in dim]
    if tokens != [Axis.ROW, Axis.TOKEN] or not isinstance(target, fx.Node):
        raise NoLaw("a loss over other dimensions than the tokens")
    if call.labelled(target) and fact_of(target).kind is Kind.PACKED:
        raise NoLaw("targets made of hidden states")
    ignore = call.arg(4, "ignore_index", -100)
    loss = Fact(Kind.ROW, learned=fact_of(source).learned)
    return Fact(Kind.ROW, parts=(loss, loss), law=Pick(ignore), learned=loss.learned)


def _gather(call: Call, dims: Dims) -> Fact:
    """y[b, t, i] = x[b, t, index[b, t, i]] along the last dimension."""
    source, dim, index = call.node.args[:3]
    assert isinstance(dim, int) and isinstance(index, fx.Node)
    tokens = [factor.axis for d in dims[:-1] for factor in d]
    if dim % len(dims) != len(dims) - 1 or tokens != [Axis.ROW, Axis.TOKEN] or fact_of(index).kind is Kind.PACKED:
        raise NoLaw("a gather within the packed values")
    if algebra.extent(tuple(f for d in dims[:-1] for f in d)) != index.meta["val"][..., 0].numel():
        raise NoLaw("a gather over some of the tokens")
    return Fact(Kind.ROW, law=Pick(None), learned=fact_of(call.operands[0]).learned)


_SINKS: dict[Any, Callable[[Call, Dims], Fact]] = {
    aten.nll_loss_forward.default: _nll_loss,
    aten.nll_loss2d_forward.default: _nll_loss,
    aten.gather.default: _gather,
}
