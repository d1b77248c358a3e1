"""Define causal laws of choices: ``topk``, and writes at chosen places.

The largest elements are a function of all elements that are not known, so their columns are read. An index that
``topk`` gives is any of its places, and the value next to it the element there: both are functions of one open choice
(``treefx.passes.causal.state.Options``). What a model makes of them element by element is computed for every option,
so that a scatter knows the places where it writes nothing: keys that a query may not choose.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, fx

from treefx.passes.causal.domain import Step
from treefx.passes.causal.state import LARGEST_TABLE, Options, State, Unknown
from treefx.passes.causal.step import along, law, same_rows

__all__: list[str] = []

aten = torch.ops.aten


@law(aten.topk)
def _topk(step: Step) -> tuple[State, ...]:
    """The columns of all elements; each index is one of the places, the value the element there."""
    state = step.state(step.node.args[0])
    dim = along(step.arg(2, "dim", -1), state.rank, state.row)
    values, indices = step.node.meta["val"]
    column, shape = state.column.amax(dim, keepdim=True), step.shape_without(values.shape, state.row)
    results = [replace(State.of(shape, part.dtype), column=column, row=state.row) for part in (values, indices)]
    if dim != state.rank - 1:
        return tuple(results)
    spread, place = state.spread(dim), torch.arange(state.shape[dim])
    place = place.reshape([1] * state.rank + [-1])
    options = (
        Options(step.node, spread.value.unsqueeze(dim), spread.mask.unsqueeze(dim)),
        Options(step.node, place, torch.ones_like(place, dtype=torch.bool)),
    )
    return tuple(replace(result, options=item) for result, item in zip(results, options, strict=True))


@law(aten.scatter)
def _scatter(step: Step) -> State:
    """One number written where indices say: certainly, perhaps or not at all."""
    source, given, place, number = step.node.args[:4]
    if step.node.target is not aten.scatter.value or not isinstance(number, int | float):
        raise Unknown
    assert isinstance(source, fx.Node) and isinstance(place, fx.Node)
    into, index = same_rows(step, [source, place])
    row = into.row or index.row
    dim = along(given, into.rank, row)
    if any(size != index.shape[d] for d, size in enumerate(into.shape) if d != dim):
        raise Unknown
    certain, possible = _written(index, dim, into.shape[dim])
    wide = into.spread(dim)
    known = torch.full_like(wide.value[(slice(0, 1),) * into.rank], number)
    mask = certain | (wide.mask & ~possible) | (wide.mask & (wide.value == known))
    column = torch.maximum(wide.column, index.column.amax(dim, keepdim=True))
    column = torch.where(mask, 0, torch.where(possible, column, wide.column))
    return State(step.result_shape(row), column, torch.where(certain, known, wide.value), mask, row)


def _written(index: State, dim: int, size: int) -> tuple[Tensor, Tensor]:
    """Return tables of the places along a dimension that are written certainly, and perhaps."""
    spread = index.spread(dim)
    if bool(spread.mask.all()):
        certain = _meets(spread.value.unsqueeze(-1), size, dim)
        return certain, certain
    options = index.options
    if options is None or not bool(options.mask.all()):
        ones = torch.ones([size if d == dim else 1 for d in range(index.rank)], dtype=torch.bool)
        return ~ones, ones
    possible = _meets(options.value, size, dim)
    return torch.zeros_like(possible), possible


def _meets(values: Tensor, size: int, dim: int) -> Tensor:
    """Return the places [.., size, ..] that any of the values [.., k, .., options] names."""
    index = values.movedim(-1, dim).flatten(dim, dim + 1)
    sizes = [size if d == dim else other for d, other in enumerate(index.shape)]
    if torch.Size(sizes).numel() > LARGEST_TABLE or bool(((index < 0) | (index >= size)).any()):
        raise Unknown
    return torch.zeros(sizes, dtype=torch.bool).scatter_(dim, index.to(torch.int64), True)
