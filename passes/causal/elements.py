"""Define causal laws of elementwise operators: largest column, and known elements."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from treefx.passes.causal.domain import Step, one_row
from treefx.passes.causal.fills import absorbed, find_floored
from treefx.passes.causal.state import LARGEST_TABLE, Options, RowDigit, State, Unknown
from treefx.passes.causal.step import law, of_rank, same_rows
from treefx.passes.labels.facts import shape_of
from treefx.passes.labels.laws.gradients import custom_function_reason

__all__ = ["pointwise"]

aten = torch.ops.aten
_ON_ITSELF = {"device", "layout", "pin_memory", "memory_format", "non_blocking"}
"""Keyword arguments that say where a tensor lives."""


@law(aten._to_copy, aten.clone, aten.detach, aten.alias, aten.lift_fresh_copy, aten.contiguous)
def pointwise(step: Step) -> State:
    """The largest column of the operands; a known element reads nothing."""
    states, row = _broadcast(step, step.node.all_input_nodes)
    return replace(
        _combined(step, states, row), floored=find_floored(step, states), options=_find_options(step, states)
    )


def _combined(step: Step, states: dict[fx.Node, State], row: RowDigit | None) -> State:
    columns = [states[node].column for node in states]
    shape = torch.broadcast_shapes(*[column.shape for column in columns])  # type: ignore[no-untyped-call]
    if math.prod(shape) > LARGEST_TABLE:
        raise Unknown
    column = columns[0].expand(shape)
    for other in columns[1:]:
        column = torch.maximum(column, other)
    value, mask = _computed(step, states)
    rule = _ABSORBING.get(step.node.target)
    if rule is not None:
        column, value, mask = rule(step, states, column, value, mask)
    value, mask = absorbed(step, states, value, mask)
    column = torch.where(mask, 0, column) if bool(mask.any()) else column
    return State(step.result_shape(row), column, value, mask, row)


def _broadcast(step: Step, nodes: Sequence[fx.Node]) -> tuple[dict[fx.Node, State], RowDigit | None]:
    """The operands of a pointwise operator for one row, their tables of the result's rank."""
    rank = len(shape_of(step.node))
    offset, inner = 0, 1
    for node in nodes:
        state = step.state(node)
        if state.row is not None:
            offset, inner = state.rank - state.row.dim, state.row.inner
    states = {node: one_row(step, node, offset, inner) if offset else step.state(node) for node in nodes}
    result = {node: of_rank(state, rank) for node, state in states.items()}
    return result, RowDigit(rank - offset, inner) if offset else None


def _computed(step: Step, states: dict[fx.Node, State]) -> tuple[Tensor, Tensor]:
    """Compute an operator on known elements; none is known if it cannot run on the tables."""
    rank, dtype = max(state.rank for state in states.values()), step.node.meta["val"].dtype
    unknown = torch.zeros([1] * rank, dtype=dtype), torch.zeros([1] * rank, dtype=torch.bool)
    if not all(state.knows for state in states.values()):
        return unknown
    shape = torch.broadcast_shapes(*[s.value.shape for s in states.values()])  # type: ignore[no-untyped-call]
    if math.prod(shape) > LARGEST_TABLE:
        return unknown
    args = fx.node.map_arg(step.node.args, lambda node: states[node].value)
    kwargs = {name: item for name, item in step.node.kwargs.items() if name not in _ON_ITSELF}
    kwargs = fx.node.map_arg(kwargs, lambda node: states[node].value)
    try:
        value = step.node.target(*args, **kwargs)  # type: ignore[operator]
    except (RuntimeError, ZeroDivisionError):  # integers divided by an element that is not known
        return unknown
    mask = torch.ones([1] * rank, dtype=torch.bool)
    for state in states.values():
        mask = mask & state.mask
    return value.to(dtype), mask


Tables = tuple[Tensor, Tensor, Tensor]


def _operand(states: dict[fx.Node, State], item: Any, like: Tensor) -> State:
    """An operand of a pointwise operator, numbers included."""
    if isinstance(item, fx.Node):
        return states[item]
    return State.of([1] * like.dim(), like.dtype, item)


def _zero_absorbs(step: Step, states: dict[fx.Node, State], column: Tensor, value: Tensor, mask: Tensor) -> Tables:
    """0 * x = 0, and False & x = False."""
    zero = torch.zeros_like(mask)
    for item in step.node.args[:2]:
        zero = zero | _operand(states, item, value).is_zero()
    return column, torch.where(zero, torch.zeros_like(value), value), mask | zero


def _true_absorbs(step: Step, states: dict[fx.Node, State], column: Tensor, value: Tensor, mask: Tensor) -> Tables:
    """True | x = True."""
    if value.dtype is not torch.bool:
        return column, value, mask
    true = torch.zeros_like(mask)
    for item in step.node.args[:2]:
        state = _operand(states, item, value)
        true = true | (state.mask & (state.value != 0))
    return column, value | true, mask | true


def _where(step: Step, states: dict[fx.Node, State], column: Tensor, value: Tensor, mask: Tensor) -> Tables:
    """Where the condition is known, only the chosen branch is read."""
    condition, chosen, other = _branches(step, states, value)
    if not condition.knows:
        return column, value, mask
    holds = condition.value != 0
    column = torch.where(condition.mask, torch.where(holds, chosen.column, other.column), column)
    value = torch.where(holds, chosen.value, other.value).to(value.dtype)
    return column, value, condition.mask & torch.where(holds, chosen.mask, other.mask)


def _branches(step: Step, states: dict[fx.Node, State], like: Tensor) -> tuple[State, State, State]:
    """The condition of a choice, and the operands where it holds and where it does not."""
    first, second, third = (_operand(states, item, like) for item in step.node.args[:3])
    return (second, third, first) if step.node.target in _FILLS else (first, second, third)


def _find_options(step: Step, states: dict[fx.Node, State]) -> Options | None:
    """Compute an operator for every option of one open choice; an open condition doubles the options."""
    given = [state.options for state in states.values() if state.options is not None]
    if not given or any(item.origin is not given[0].origin for item in given):
        return None
    opened = {node: _opened(state) for node, state in states.items()}
    value, mask = _computed(step, opened)
    rule = _ABSORBING.get(step.node.target)
    if rule is not None:
        _, value, mask = rule(step, opened, torch.zeros([1] * value.dim()), value, mask)
    if rule is not _where or bool(mask.all()):
        return Options(given[0].origin, value, mask)
    condition, chosen, other = _branches(step, opened, value)
    if not bool(chosen.mask.all() & other.mask.all()):
        return Options(given[0].origin, value, mask)
    holds, fails = (condition.mask & (condition.value == truth) for truth in (True, False))
    both = [torch.where(fails, other.value, chosen.value), torch.where(holds, chosen.value, other.value)]
    value = torch.cat(both, -1).to(value.dtype)
    return Options(step.node, value, torch.ones([1] * value.dim(), dtype=torch.bool))


def _opened(state: State) -> State:
    """A state whose last dimension has the options of its choice."""
    options = state.options
    if options is None:
        value, mask = state.value.unsqueeze(-1), state.mask.unsqueeze(-1)
    else:
        value, mask = options.value, options.mask
    return State((*state.shape, max(value.shape[-1], mask.shape[-1])), torch.zeros([1] * value.dim()), value, mask)


_FILLS = {aten.masked_fill.Scalar, aten.masked_fill.Tensor}
_ABSORBING: dict[Any, Callable[..., Tables]] = {
    aten.mul.Tensor: _zero_absorbs, aten.mul.Scalar: _zero_absorbs, aten.logical_and.default: _zero_absorbs,
    aten.bitwise_and.Tensor: _zero_absorbs, aten.bitwise_and.Scalar: _zero_absorbs,
    aten.logical_or.default: _true_absorbs, aten.bitwise_or.Tensor: _true_absorbs,
    **{getattr(aten.where, name): _where for name in ("self", "Scalar", "ScalarSelf", "ScalarOther")},
    **dict.fromkeys(_FILLS, _where),
}  # fmt: skip


@law(aten.copy)
def _copy(step: Step) -> State:
    """The second operand in the first one's shape."""
    source = step.node.args[1]
    assert isinstance(source, fx.Node)
    states, row = _broadcast(step, [source])
    state = states[source]
    return replace(state, shape=step.result_shape(row), value=state.value.to(step.node.meta["val"].dtype), row=row)


@law(aten.fill)
def _fill(step: Step) -> State:
    """One number in the operand's shape."""
    if isinstance(step.node.args[1], fx.Node):
        raise Unknown
    return State.of(shape_of(step.node), step.node.meta["val"].dtype, step.node.args[1])


@law(torch.ops.treefx.custom_function)
def _custom_function(step: Step) -> tuple[State, ...]:
    """Follow a user's autograd.Function with pointwise bodies and a linear backward."""
    nodes: Any = step.node.args[0]
    shapes = {tuple(shape_of(node)) for node in nodes}
    if custom_function_reason(str(step.node.args[1])) is not None or len(shapes) != 1:
        raise Unknown
    states = same_rows(step, nodes)
    column = states[0].column
    for state in states[1:]:
        column = torch.maximum(column, state.column)
    row = next((state.row for state in states if state.row is not None), None)
    results = [State.of(states[0].shape, value.dtype) for value in step.node.meta["val"]]
    return tuple(replace(result, column=column, row=row) for result in results)


_NUMBERS = {
    aten.zeros: 0, aten.zeros_like: 0, aten.new_zeros: 0, aten.ones: 1, aten.ones_like: 1, aten.new_ones: 1,
    aten.empty: None, aten.empty_like: None, aten.new_empty: None, aten.empty_strided: None,
}  # fmt: skip


@law(*_NUMBERS)
def _factory(step: Step) -> State:
    """One number everywhere, or nothing that is read."""
    packet = step.node.target.overloadpacket  # type: ignore[union-attr]
    return State.of(shape_of(step.node), step.node.meta["val"].dtype, _NUMBERS[packet])


@law(aten.full, aten.full_like, aten.new_full)
def _full(step: Step) -> State:
    fill = step.node.args[2 if step.node.target is aten.new_full.default else 1]
    if isinstance(fill, fx.Node):
        raise Unknown
    return State.of(shape_of(step.node), step.node.meta["val"].dtype, fill)
