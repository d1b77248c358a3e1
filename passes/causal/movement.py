"""Causal laws of operators that move elements: the operator itself is run on the tables."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from treefx.passes.causal.domain import Step, one_row
from treefx.passes.causal.state import LARGEST_TABLE, RowDigit, State, Unknown
from treefx.passes.causal.step import along, law, same_rows, shifted, with_dim
from treefx.passes.labels.facts import shape_of

__all__: list[str] = []

aten = torch.ops.aten


@law(aten.view, aten.reshape, aten._unsafe_view)
def _view(step: Step) -> State:
    """A view keeps the order of elements, and so the distance between neighbouring rows."""
    source = step.node.args[0]
    state, new = step.state(source), shape_of(step.node)
    row = None
    if state.row is not None:
        row = _regrouped_row(state.row, step.rows, shape_of(source), new)  # type: ignore[arg-type]
    shape = step.shape_without(new, row)
    return state.mapped(lambda table: _regrouped(table, state.shape, shape), shape, row)


def _regrouped_row(row: RowDigit, rows: int, old: Sequence[int], new: Sequence[int]) -> RowDigit:
    """Find the rows by their distance; a single row, which several dimensions may hold, in the smallest of these."""
    distance = row.inner * math.prod(old[row.dim + 1 :])
    found = []
    for d, size in enumerate(new):
        after = math.prod(new[d + 1 :])
        inner = distance // after if after else 0
        if inner and distance % after == 0 and size % (inner * rows) == 0:
            found.append((size // (inner * rows), RowDigit(d, inner)))
    if not found:
        raise Unknown
    return min(found, key=operator.itemgetter(0))[1]


def _regrouped(table: Tensor, old: Sequence[int], new: Sequence[int]) -> Tensor:
    """A view of a table; groups of dimensions along which nothing varies stay of size one."""
    sizes: list[int] = []
    expanded: list[int] = []
    i = j = 0
    while i < len(old) or j < len(new):
        first, start = i, j
        left = old[i] if i < len(old) else 1
        right = new[j] if j < len(new) else 1
        i, j = i + 1, j + 1
        while left != right:
            if left < right and i < len(old):
                left, i = left * old[i], i + 1
            elif right < left and j < len(new):
                right, j = right * new[j], j + 1
            else:
                raise Unknown  # an empty value
        varies = any(size > 1 for size in table.shape[first : min(i, len(old))])
        expanded += old[first:i] if varies else [1] * len(old[first:i])
        sizes += new[start:j] if varies else [1] * len(new[start:j])
    if math.prod(expanded) > LARGEST_TABLE:
        raise Unknown
    return table.expand(expanded).reshape(sizes)


@law(aten.permute, aten.transpose, aten.t, aten.movedim)
def _permute(step: Step) -> State:
    state = step.state(step.node.args[0])
    labels = torch.empty([2 + i for i in range(state.rank)], device="meta")
    order = [size - 2 for size in step.node.target(labels, *step.node.args[1:]).shape]  # type: ignore[operator]
    row = None if state.row is None else RowDigit(order.index(state.row.dim), state.row.inner)
    return state.mapped(lambda table: table.permute(order), [state.shape[d] for d in order], row)


@law(aten.unsqueeze)
def _unsqueeze(step: Step) -> State:
    return with_dim(step.state(step.node.args[0]), int(step.node.args[1]))  # type: ignore[arg-type]


@law(aten.squeeze)
def _squeeze(step: Step) -> State:
    source: Any = step.node.args[0]
    state, given, full = step.state(source), step.arg(1, "dim"), shape_of(source)
    where = range(len(full)) if given is None else [given] if isinstance(given, int) else given
    gone = sorted({d % len(full) for d in where if full[d] == 1})
    if state.row is not None and state.row.dim in gone:
        raise Unknown
    row = None if state.row is None else shifted(state.row, -sum(d < state.row.dim for d in gone))
    kept = [d for d in range(state.rank) if d not in gone]
    return state.mapped(lambda table: table.squeeze(gone), [state.shape[d] for d in kept], row)


@law(aten.expand)
def _expand(step: Step) -> State:
    state, full = step.state(step.node.args[0]), shape_of(step.node)
    new = len(full) - state.rank
    row = shifted(state.row, new)
    return state.mapped(lambda table: table.reshape([1] * new + list(table.shape)), step.shape_without(full, row), row)


@law(aten.slice)
def _slice(step: Step) -> State:
    source: Any = step.node.args[0]
    state = step.state(source)
    if shape_of(step.node) == shape_of(source):
        return state
    dim = along(step.arg(1, "dim", 0), state.rank, state.row)
    rest = step.node.args[2:]
    return state.spread(dim).mapped(
        lambda table: aten.slice.Tensor(table, dim, *rest), step.result_shape(state.row), state.row
    )


@law(aten.select)
def _select(step: Step) -> State:
    state = step.state(step.node.args[0])
    return _without_dim(state, along(step.node.args[1], state.rank, state.row), int(step.node.args[2]))  # type: ignore[arg-type]


def _without_dim(state: State, dim: int, index: int) -> State:
    row = state.row if state.row is None or state.row.dim < dim else shifted(state.row, -1)
    shape = [*state.shape[:dim], *state.shape[dim + 1 :]]
    return state.spread(dim).mapped(lambda table: table.select(dim, index), shape, row)


@law(aten.split, aten.split_with_sizes, aten.chunk, aten.tensor_split)
def _split(step: Step) -> tuple[State, ...]:
    state = step.state(step.node.args[0])
    dim = along(step.arg(2, "dim", 0), state.rank, state.row)
    spread, start, pieces = state.spread(dim), 0, []
    for piece in step.node.meta["val"]:
        size = piece.shape[dim]
        shape = [*state.shape[:dim], size, *state.shape[dim + 1 :]]
        pieces.append(spread.mapped(_narrowed(dim, start, size), shape, state.row))
        start += size
    return tuple(pieces)


def _narrowed(dim: int, start: int, size: int) -> Callable[[Tensor], Tensor]:
    return lambda table: table.narrow(dim, start, size)


@law(aten.unbind)
def _unbind(step: Step) -> tuple[State, ...]:
    state = step.state(step.node.args[0])
    dim = along(step.arg(1, "dim", 0), state.rank, state.row)
    return tuple(_without_dim(state, dim, i) for i in range(state.shape[dim]))


@law(aten.cat, aten.stack)
def _cat(step: Step) -> State:
    given: Any = step.node.args[0]
    pieces = [node for node in given if tuple(shape_of(node)) != (0,)]
    states = same_rows(step, pieces)
    stacks = step.node.target is aten.stack.default
    rank = states[0].rank
    dim = int(step.arg(1, "dim", 0)) % (rank + stacks)
    if stacks:
        states = [with_dim(state, dim) for state in states]
    row = next((state.row for state in states if state.row is not None), None)
    along(dim, rank + stacks, row)
    return _joined(states, dim, step.result_shape(row), row)


def _joined(states: Sequence[State], dim: int, shape: Sequence[int], row: RowDigit | None) -> State:
    spread = [state.spread(dim) for state in states]

    def join(tables: list[Tensor]) -> Tensor:
        sizes = [max(table.shape[d] for table in tables) if d != dim else -1 for d in range(len(shape))]
        return torch.cat([table.expand(sizes) for table in tables], dim)

    column, mask = join([state.column for state in spread]), join([state.mask for state in spread])
    value, floored = join([state.value for state in spread]), join([state.is_floored() for state in spread])
    return State(tuple(shape), column, value, mask, row, floored=floored)


@law(aten.constant_pad_nd)
def _pad(step: Step) -> State:
    state, pads, fill = step.state(step.node.args[0]), step.arg(1, "pad"), step.arg(2, "value", 0)
    dims = [along(-1 - i, state.rank, state.row) for i in range(len(pads) // 2) if pads[2 * i] or pads[2 * i + 1]]
    spread = state.spread(*dims)
    pad = [amount for i in range(len(pads) // 2) for amount in pads[2 * i : 2 * i + 2]]

    def padded(table: Tensor, value: Any) -> Tensor:
        return aten.constant_pad_nd.default(table, pad, value)  # type: ignore[no-any-return]

    column, value, mask = padded(spread.column, 0), padded(spread.value, fill), padded(spread.mask, True)
    floored = padded(spread.is_floored(), True)
    return State(step.result_shape(state.row), column, value, mask, state.row, floored=floored)


@law(aten.flip, aten.roll)
def _flip(step: Step) -> State:
    state, rolls = step.state(step.node.args[0]), step.node.target is aten.roll.default
    given = step.arg(2, "dims", ()) if rolls else step.arg(1, "dims")
    if not given:
        raise Unknown  # rolls over all dimensions as one
    dims = [along(dim, state.rank, state.row) for dim in given]
    args = (step.node.args[1], dims) if rolls else (dims,)
    return state.spread(*dims).mapped(
        lambda table: step.node.target(table, *args),  # type: ignore[operator]
        state.shape,
        state.row,
    )


@law(aten.repeat)
def _repeat(step: Step) -> State:
    repeats: Any = step.node.args[1]
    state = step.state(step.node.args[0])
    while state.rank < len(repeats):
        state = with_dim(state, 0)
    dims = [along(d, state.rank, state.row) for d, count in enumerate(repeats) if count != 1 and state.shape[d] > 1]
    if state.row is not None and repeats[state.row.dim] != 1:
        raise Unknown
    counts = [count if d in dims else 1 for d, count in enumerate(repeats)]
    return state.spread(*dims).mapped(lambda table: table.repeat(counts), step.result_shape(state.row), state.row)


@law(aten.repeat_interleave)
def _repeat_interleave(step: Step) -> State:
    count = step.arg(1, "repeats")
    if not isinstance(count, int) or step.arg(2, "dim") is None:
        raise Unknown
    state = step.state(step.node.args[0])
    dim = along(step.arg(2, "dim"), state.rank, state.row)
    return state.spread(dim).mapped(
        lambda table: table.repeat_interleave(count, dim), step.result_shape(state.row), state.row
    )


@law(aten.unfold)
def _unfold(step: Step) -> State:
    state = step.state(step.node.args[0])
    dim = along(step.node.args[1], state.rank, state.row)
    window: Any = step.node.args[2:4]
    return state.spread(dim).mapped(lambda table: table.unfold(dim, *window), step.result_shape(state.row), state.row)


@law(aten.diagonal)
def _diagonal(step: Step) -> State:
    state = step.state(step.node.args[0])
    offset, *given = step.arg(1, "offset", 0), step.arg(2, "dim1", 0), step.arg(3, "dim2", 1)
    dims = [along(d, state.rank, state.row) for d in given]
    row = None if state.row is None else shifted(state.row, -sum(d < state.row.dim for d in dims))
    return state.spread(*dims).mapped(lambda table: table.diagonal(offset, *dims), step.result_shape(row), row)


@law(aten.tril, aten.triu)
def _triangle(step: Step) -> State:
    """Outside the triangle the value is known to be zero."""
    state, diagonal = step.state(step.node.args[0]), int(step.arg(1, "diagonal", 0))
    dims = [along(d, state.rank, state.row) for d in (-2, -1)]
    cut = torch.tril if step.node.target is aten.tril.default else torch.triu
    inside = cut(torch.ones([state.shape[d] for d in dims], dtype=torch.bool), diagonal)
    spread = state.spread(*dims)
    column, value = (torch.where(inside, table, 0) for table in (spread.column, spread.value))
    mask = spread.mask | ~inside
    return State(state.shape, column, value.to(state.value.dtype), mask, state.row, floored=spread.is_floored())


@law(aten.slice_scatter, aten.select_scatter)
def _scatter(step: Step) -> State:
    """The second operand written into a slice of the first."""
    target, source, given = step.node.args[0], step.node.args[1], step.arg(2, "dim", 0)
    into, part = step.state(target), step.state(source)
    dim = int(given) % into.rank
    selects = step.node.target is aten.select_scatter.default
    row = into.row or (part.row if part.row is None or not selects or part.row.dim < dim else shifted(part.row, 1))
    along(dim, into.rank, row)
    if row is not None:
        assert isinstance(target, fx.Node) and isinstance(source, fx.Node)
        into = one_row(step, target, into.rank - row.dim, row.inner)
        part = one_row(step, source, into.rank - row.dim - (selects and dim > row.dim), row.inner)
    part = with_dim(part, dim) if selects else part
    args = (dim, int(step.node.args[3])) if selects else (dim, *step.node.args[3:])  # type: ignore[arg-type]
    return _written(step, into, part, dim, args, row)


def _written(step: Step, into: State, part: State, dim: int, args: Sequence[Any], row: RowDigit | None) -> State:
    wide, narrow = into.spread(dim), part.spread(dim)
    selects = step.node.target is aten.select_scatter.default

    def write(target: Tensor, source: Tensor) -> Tensor:
        sizes = [max(a, b) if d != dim else -1 for d, (a, b) in enumerate(zip(target.shape, source.shape, strict=True))]
        written = source.expand(sizes).squeeze(dim) if selects else source.expand(sizes)
        return step.node.target(target.expand(sizes), written, *args)  # type: ignore[no-any-return, operator]

    value, mask = write(wide.value, narrow.value.to(wide.value.dtype)), write(wide.mask, narrow.mask)
    floored = write(wide.is_floored(), narrow.is_floored())
    return State(step.result_shape(row), write(wide.column, narrow.column), value, mask, row, floored=floored)


@law(aten.index)
def _index(step: Step) -> State:
    """Elements picked at constant places; the places of the rows count them up, as in ``x[batch, key]``."""
    state = step.state(step.node.args[0])
    indices: Any = step.node.args[1]
    where = [d for d, item in enumerate(indices) if item is not None]
    picked = {d: step.state(indices[d]) for d in where}
    if any(not bool(item.mask.all()) or item.value.dtype is torch.bool for item in picked.values()):
        raise Unknown
    places: list[Any] = [slice(None)] * len(indices)
    for d, item in picked.items():
        places[d] = item.value.expand(item.shape).to(torch.int64)
    rank = torch.broadcast_shapes(*[item.shape for item in picked.values()])  # type: ignore[no-untyped-call]
    together = where == list(range(where[0], where[-1] + 1))
    row = state.row
    if row is not None and row.dim in picked:
        counted = _counts_rows(step.rows, row, {d: places[d] for d in where}, len(rank))
        places[row.dim] = torch.zeros_like(places[row.dim].narrow(counted - len(rank), 0, 1))
        row = RowDigit(counted + (where[0] if together else 0), 1)
    elif row is not None:
        before = sum(d < row.dim for d in where)
        row = row if together and row.dim < where[0] else shifted(row, len(rank) - before)
    return state.spread(*where).mapped(lambda table: table[tuple(places)], step.result_shape(row), row)


def _counts_rows(rows: int, row: RowDigit, places: dict[int, Tensor], rank: int) -> int:
    """Return the dimension of the places along which those of the rows are 0, 1, 2, ...; the others are constant."""
    counting = places[row.dim]
    dims = [d for d in range(counting.dim()) if counting.shape[d] == rows]
    for d in dims:
        counted = torch.arange(rows).reshape([-1 if e == d else 1 for e in range(counting.dim())])
        behind = counting.dim() - d
        others = [item for at, item in places.items() if at != row.dim and item.dim() >= behind]
        if row.inner == 1 and bool((counting == counted).all()) and all(item.shape[-behind] == 1 for item in others):
            return rank - behind
    raise Unknown


@law(aten.index_select)
def _index_select(step: Step) -> State:
    state, place = step.state(step.node.args[0]), step.state(step.node.args[2])
    dim = along(step.node.args[1], state.rank, state.row)
    if not bool(place.mask.all()):
        raise Unknown
    index = place.value.expand(place.shape).reshape(-1)
    return state.spread(dim).mapped(
        lambda table: table.index_select(dim, index), step.result_shape(state.row), state.row
    )
