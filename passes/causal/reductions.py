"""Define causal laws along dimensions: reductions, sums, norms, convolutions, products."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from treefx.passes.causal.domain import Step, one_row
from treefx.passes.causal.elements import pointwise
from treefx.passes.causal.state import LARGEST_TABLE, RowDigit, State, States, Unknown
from treefx.passes.causal.step import along, law, of_rank, same_rows, shifted, with_dim
from treefx.passes.labels.facts import shape_of

__all__: list[str] = []

aten = torch.ops.aten


@law(
    aten.sum, aten.mean, aten.amax, aten.amin, aten.var, aten.std, aten.prod, aten.logsumexp, aten.linalg_vector_norm,
    aten.any, aten.all, aten.argmax, aten.argmin, aten.var_mean, aten.max, aten.min, aten.norm,
)  # fmt: skip
def _reduction(step: Step) -> States:
    """The largest column along the reduced dimensions; the sum of known zeros is zero."""
    if len(step.node.all_input_nodes) != 1:
        return pointwise(step)  # max and min of two values
    state = step.state(step.node.args[0])
    names = [argument.name for argument in step.node.target._schema.arguments]  # type: ignore[union-attr]
    if "dim" not in names:
        raise Unknown
    given = step.arg(names.index("dim"), "dim")
    where = range(state.rank) if given is None or given == [] else [given] if isinstance(given, int) else given
    dims = sorted({along(d, state.rank, state.row) for d in where})
    value = step.node.meta["val"]
    first = value if isinstance(value, Tensor) else value[0]
    keeps = first.dim() == state.rank
    row = state.row if keeps or state.row is None else shifted(state.row, -sum(d < state.row.dim for d in dims))
    column = state.column.amax(dims, keepdim=keeps)
    parts = [value] if isinstance(value, Tensor) else list(value)
    shape = step.shape_without(first.shape, row)
    results = [replace(State.of(shape, part.dtype), column=column, row=row) for part in parts]
    if step.node.target in (aten.sum.dim_IntList, aten.sum.default) and state.knows:
        zero = state.is_zero()
        for dim in dims:
            zero = zero.all(dim, keepdim=True)
        results[0] = replace(results[0], mask=zero if keeps else zero.squeeze(dims))
    if step.node.target in _LARGEST:  # of several, one is above the fills
        floored = state.is_floored()
        for dim in dims:
            floored = floored.any(dim, keepdim=True)
        results[0] = replace(results[0], floored=floored if keeps else floored.squeeze(dims))
    return results[0] if isinstance(value, Tensor) else tuple(results)


_LARGEST = {aten.amax.default, aten.max.dim}


@law(aten.cumsum, aten.cumprod, aten.logcumsumexp)
def _scan(step: Step) -> State:
    """The running largest column; the sum of a known beginning is known."""
    state = step.state(step.node.args[0])
    dim = along(step.node.args[1], state.rank, state.row)
    spread = state.spread(dim)
    dtype = step.node.meta["val"].dtype
    mask = spread.mask.to(torch.int8).cummin(dim).values.to(torch.bool)
    value = step.node.target(spread.value, dim).to(dtype)  # type: ignore[operator]
    return State(state.shape, spread.column.cummax(dim).values, value, mask, state.row)


@law(aten._softmax, aten._log_softmax, aten._safe_softmax, aten.softmax, aten.log_softmax)
def _softmax(step: Step) -> State:
    """Take the largest column; exp of a known -inf is 0, if another element is left.

    So is that of any fill of a mask, next to an element that is above all fills.
    """
    state = step.state(step.node.args[0])
    dim = along(step.node.args[1], state.rank, state.row)
    dtype = step.node.meta["val"].dtype
    column = state.column.amax(dim, keepdim=True)
    result = replace(State.of(state.shape, dtype), column=column, row=state.row)
    logarithm = step.node.target in (aten._log_softmax.default, aten.log_softmax.int)
    if logarithm or not state.knows or not dtype.is_floating_point:
        return result
    spread = state.spread(dim)
    hidden = spread.mask & (spread.value == -math.inf)
    hidden = hidden & ~hidden.all(dim, keepdim=True)
    hidden = hidden | (spread.is_fill() & spread.is_floored().any(dim, keepdim=True))
    return replace(result, column=torch.where(hidden, 0, column), mask=hidden)


@law(aten.native_layer_norm, aten._fused_rms_norm)
def _normalisation(step: Step) -> tuple[State, ...]:
    """The largest column along the trailing dimensions that are normalised."""
    state = step.state(step.node.args[0])
    given: Any = step.node.args[1]
    dims = [along(-1 - i, state.rank, state.row) for i in range(len(given))]
    for node in step.node.all_input_nodes[1:]:
        if step.state(node).row is not None:
            raise Unknown
    column = state.column.amax(dims, keepdim=True)
    return tuple(
        replace(State.of(step.shape_without(part.shape, state.row), part.dtype), column=column, row=state.row)
        for part in step.node.meta["val"]
    )


@law(aten.convolution)
def _convolution(step: Step) -> State:
    """The largest column in the window, over all channels."""
    source, *others, stride, padding, dilation, transposed, _, _ = step.node.args
    state: State = step.state(source)
    parameters = [step.state(node) for node in others if node is not None]
    if state.rank != 3 or transposed or any(item.row is not None for item in parameters):
        raise Unknown
    if state.row is not None and state.row.dim != 0:
        raise Unknown
    by, pad, gap = (int(item[0]) for item in (stride, padding, dilation))  # type: ignore[arg-type, index]
    size = parameters[0].shape[2]
    column = torch.nn.functional.pad(state.spread(2).column.amax(1, keepdim=True), (pad, pad))
    windows = column.unfold(2, (size - 1) * gap + 1, by)[..., ::gap]
    result = State.of(step.result_shape(state.row), step.node.meta["val"].dtype)
    return replace(result, column=windows.amax(-1), row=state.row)


# Products -------------------------------------------------------------------------------------------------------------


@law(aten.bmm, aten.mm, aten.addmm, aten.baddbmm)
def _product(step: Step) -> State:
    """The largest column over the terms of which no factor is known to be zero."""
    left, right = step.node.args[-2:]
    assert isinstance(left, fx.Node) and isinstance(right, fx.Node)
    a, b, row = _factors(step, left, right)
    column, zero = _multiplied(a, b)
    if len(shape_of(step.node)) == 2:
        column, zero = column.squeeze(0), zero.squeeze(0)
    result = State.of(step.result_shape(row), step.node.meta["val"].dtype).above_fills()
    result = replace(result, column=column, row=row)
    if len(step.node.args) == 2:
        return replace(result, mask=zero)
    added = step.node.args[0]
    assert isinstance(added, fx.Node)
    bias = step.state(added) if row is None else one_row(step, added, result.rank - row.dim, row.inner)
    if bias.row is not None and row is None:
        raise Unknown
    bias = of_rank(bias, result.rank)
    return replace(result, column=torch.maximum(column, bias.column), floored=bias.is_floored())


def _factors(step: Step, left: fx.Node, right: fx.Node) -> tuple[State, State, RowDigit | None]:
    """Return the factors as [batch, m, k] and [batch, k, n] for one row, and the row digit."""
    a, b = step.state(left), step.state(right)
    rank, row = a.rank, a.row or b.row
    if row is not None and rank == 3 and step.rows == 1:
        row = RowDigit(0, a.shape[0])  # a single row stands anywhere: outermost, as views keep it
    if row is not None and rank == 3 and row.dim == 0:
        a, b = (one_row(step, node, 3, row.inner) for node in (left, right))
    elif row is not None and (a.row is None) == (b.row is None):
        raise Unknown
    elif row is not None and row.dim != (rank - 2 if b.row is None else rank - 1):
        raise Unknown
    return (a, b, row) if rank == 3 else (with_dim(a, 0), with_dim(b, 0), row)


def _multiplied(a: State, b: State) -> tuple[Tensor, Tensor]:
    """Columns of a product [batch, m, n], and where it is known to be zero."""
    column = torch.maximum(
        _largest_term(a.column[..., None], b.is_zero()[:, None]),
        _largest_term(b.column[:, None], a.is_zero()[..., None]),
    )
    if not (a.knows or b.knows):
        return column, torch.zeros_like(column, dtype=torch.bool)
    zero = _checked(a.is_zero()[..., None], b.is_zero()[:, None], torch.logical_or).all(2)
    return torch.where(zero, 0, column), zero


def _largest_term(column: Tensor, zero: Tensor) -> Tensor:
    """The largest column over dimension 2, terms with a known zero left out."""
    if not bool(zero.any()):
        return column.amax(2)
    return _checked(column, ~zero, torch.mul).amax(2)


def _checked(left: Tensor, right: Tensor, combine: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    shape = torch.broadcast_shapes(left.shape, right.shape)  # type: ignore[no-untyped-call]
    if math.prod(shape) > LARGEST_TABLE:
        raise Unknown
    return combine(left, right)


@law(aten.linalg_solve_triangular)
def _solve_triangular(step: Step) -> State:
    """Follow a solution: row i reads rows up to i of both sides.

    From i on where the matrix is upper triangular.
    """
    matrix, right = step.node.args[:2]
    assert isinstance(matrix, fx.Node) and isinstance(right, fx.Node)
    if not step.node.kwargs.get("left", True):
        raise Unknown
    a, b = same_rows(step, [matrix, right])
    row = a.row or b.row
    if row is not None and row.dim >= a.rank - 2:
        raise Unknown
    upper = bool(step.node.kwargs["upper"])
    inside = torch.ones(a.shape[-2:], dtype=torch.bool)
    inside = inside.triu() if upper else inside.tril()
    read = torch.where(inside, a.spread(a.rank - 2, a.rank - 1).column, 0).amax(-1, keepdim=True)
    column = torch.maximum(read, b.spread(b.rank - 2).column)
    column = column.flip(-2).cummax(-2).values.flip(-2) if upper else column.cummax(-2).values
    return replace(State.of(b.shape, step.node.meta["val"].dtype), column=column, row=row)
