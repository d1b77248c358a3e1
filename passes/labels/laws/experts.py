"""Define laws of mixtures of experts: sort slots, grouped products, inverse sort.

The sort mixes tokens, but only as a permutation: every slot keeps its token, and the inverse permutation restores the
order. The histogram of experts is a statistic of the batch; nothing but a grouped product may read it, since packed and
unpacked batches have different ones (a load-balancing loss must see each token as often as its rows do).
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from treefx.passes.labels import dims as algebra
from treefx.passes.labels.body import is_grouped
from treefx.passes.labels.dims import NoLaw
from treefx.passes.labels.facts import Axis, Fact, Factor, Kind, fact_of, plain_dims, shape_of
from treefx.passes.labels.laws.base import Call, law
from treefx.passes.labels.laws.gradients import overwrites_by_mask
from treefx.passes.labels.laws.pointwise import pointwise
from treefx.passes.labels.laws.reductions import selection

__all__ = ["SlotRole", "Slots", "floor_divide", "of_statistic", "statistic"]

aten = torch.ops.aten


class SlotRole(enum.Enum):
    """Name the content of a one-dimensional value over slots."""

    ORDER = "slot -> token * choices + choice"
    TOKEN = "slot -> token"
    INVERSE = "token * choices + choice -> slot"
    STATISTIC = "expert -> number of slots, or its running sum"


@dataclass(frozen=True)
class Slots:
    """The role of a value and the labelled dimension that was sorted."""

    role: SlotRole
    sorted_dim: tuple[Factor, ...]

    @property
    def choices(self) -> int:
        """Experts per token."""
        return algebra.extent([factor for factor in self.sorted_dim if factor.axis is Axis.PLAIN])


def _slots(node: Any) -> Slots | None:
    found = fact_of(node).law if isinstance(node, fx.Node) else None
    return found if isinstance(found, Slots) else None


def statistic(call: Call) -> bool:
    """Whether an operand is a statistic of the batch."""
    return any((slots := _slots(node)) is not None and slots.role is SlotRole.STATISTIC for node in call.operands)


@law(aten.sort)
def sort(call: Call) -> Fact:
    """Label a sort of all slots by expert: a permutation of slots, so it runs packed."""
    source = call.node_arg(0)
    dims = call.dims(source)
    if len(dims) != 1 or not algebra.has_tokens(dims[0]):
        return selection(call)
    if [factor.axis for factor in dims[0][:2]] != [Axis.ROW, Axis.TOKEN] or any(
        algebra.has_tokens((f,)) for f in dims[0][2:]
    ):
        raise NoLaw("sorts over the tokens")
    slot = (Factor(Axis.SLOT, algebra.extent(dims[0])),)
    learned = fact_of(source).learned
    order = Fact(Kind.PACKED, (slot,), law=Slots(SlotRole.ORDER, dims[0]), learned=learned)
    return Fact(Kind.PACKED, parts=(Fact(Kind.PACKED, (slot,), learned=learned), order), learned=learned)


@law(aten.floor_divide)
def floor_divide(call: Call) -> Fact:
    """The token of a slot is its index in the order divided by the choices per token."""
    source, divisor = call.node.args[:2]
    fact, slots = pointwise(call), _slots(source)
    if slots is not None and slots.role is SlotRole.ORDER and divisor == slots.choices:
        return Fact(fact.kind, fact.dims, law=Slots(SlotRole.TOKEN, slots.sorted_dim), learned=fact.learned)
    return fact


@law(aten.index)
def index(call: Call) -> Fact:
    """Label reads through an order, its tokens or its inverse; or a table lookup."""
    source, indices = call.node.args[:2]
    assert isinstance(source, fx.Node) and isinstance(indices, list | tuple)
    given = [item for item in indices if isinstance(item, fx.Node)]
    if len(given) == 1 and call.labelled(source) and fact_of(given[0]).kind is Kind.INVARIANT:
        return _choose(call, source, indices.index(given[0]), given[0])
    if len(indices) != 1 or not isinstance(indices[0], fx.Node):
        raise NoLaw("indexes tokens with several indices")
    chosen = indices[0]
    if not call.labelled(source) and call.labelled(chosen):
        return Fact(
            call.result(()).kind,
            call.dims(chosen) + plain_dims(shape_of(source)[1:]),
            learned=call.result(()).learned,
        )
    slots, dims = _slots(chosen), call.dims(source)
    if slots is None:
        raise NoLaw("indexes tokens with data")
    slot = (Factor(Axis.SLOT, algebra.extent(slots.sorted_dim)),)
    tokens = tuple(factor for factor in slots.sorted_dim if factor.axis is not Axis.PLAIN)
    expected = {SlotRole.ORDER: slots.sorted_dim, SlotRole.TOKEN: tokens, SlotRole.INVERSE: slot}[slots.role]
    if not algebra.same_tokens(dims[0], expected):
        raise NoLaw("indexes other tokens than were sorted")
    return call.result(((slots.sorted_dim if slots.role is SlotRole.INVERSE else slot), *dims[1:]))


def _choose(call: Call, source: fx.Node, dim: int, chosen: fx.Node) -> Fact:
    """The same entries of a plain dimension for every token, such as ``x[..., [-1], :]``."""
    if chosen.meta["val"].dtype is torch.bool:
        raise NoLaw("keeps as many entries as a mask has")
    dims = algebra.resize(call.dims(source), dim, 1)
    return call.result((*dims[:dim], *plain_dims(shape_of(chosen)), *dims[dim + 1 :]))


@law(aten.index_put)
def index_put(call: Call) -> Fact:
    """Writing 0, 1, 2, ... through an order gives its inverse; a number where a mask holds is a choice per element."""
    if overwrites_by_mask(call.node):
        return pointwise(call)
    target, indices, values = call.node.args[:3]
    accumulate = call.arg(3, "accumulate", False)
    slots = _slots(indices[0]) if isinstance(indices, list | tuple) and len(indices) == 1 else None
    counts = isinstance(values, fx.Node) and values.target is aten.arange.default
    if slots is None or slots.role is not SlotRole.ORDER or not counts or accumulate or not call.labelled(target):
        raise NoLaw("writes tokens at indices made of data")
    fact = call.result((slots.sorted_dim,))
    return Fact(fact.kind, fact.dims, law=Slots(SlotRole.INVERSE, slots.sorted_dim), learned=fact.learned)


@law(aten.histc, aten.bincount)
def histogram(call: Call) -> Fact:
    """The number of slots per expert is a statistic of the batch."""
    source = call.node_arg(0)
    dims = call.dims(source)
    if len(dims) != 1 or Axis.PLAIN in {f.axis for f in dims[0]} and Axis.ROW not in {f.axis for f in dims[0]}:
        raise NoLaw("a histogram of something other than slots")
    fact = call.result(())
    return Fact(Kind.PACKED, None, law=Slots(SlotRole.STATISTIC, dims[0]), learned=fact.learned)


def of_statistic(call: Call) -> Fact:
    """Label running sums and casts of a statistic; a grouped product reads one as offsets."""
    target = call.node.target
    if is_grouped(target):
        return _grouped_product(call)
    source: Any = call.node.args[0]
    if target in (aten.cumsum.default, aten._to_copy.default) and len(call.operands) == 1:
        return fact_of(source)
    raise NoLaw("a statistic of the batch would count every shared token once")


def _grouped_product(call: Call) -> Fact:
    """(x W_e)[s] for the expert e of slot s."""
    source, weight, offsets = call.node.args[:3]
    assert isinstance(source, fx.Node) and isinstance(weight, fx.Node)
    slots = _slots(offsets)
    dims = call.dims(source)
    sorted_slots = [factor.axis for factor in dims[0]] == [Axis.SLOT]
    if slots is None or not sorted_slots or call.labelled(weight) or len(shape_of(weight)) != 3:
        raise NoLaw("a grouped product whose groups are not those of the sorted slots")
    return Fact(Kind.PACKED, (dims[0], *plain_dims(shape_of(weight)[2:])), learned=True)
