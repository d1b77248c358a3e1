"""Follow the fills of masks through sums: hidden scores stay hidden.

A mask adds a fill, such as ``finfo.min``, to scores, or puts it in their place. A score that is hidden by a fill known
before the call is the fill itself, since the sum rounds to it (``treefx.passes.causal.state.FILL``). Softmax gives it
no weight next to an element above all fills: a product, or a sink. Elements that a mask of the call hides or not, such
as padding, count as neither.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx

from treefx.passes.causal.domain import Step
from treefx.passes.causal.state import FILL, State

__all__ = ["absorbed", "find_floored"]

aten = torch.ops.aten
_COPIES = {aten._to_copy, aten.clone, aten.detach, aten.alias, aten.lift_fresh_copy, aten.contiguous}
_SUMS = {aten.add, aten.sub}
_SCALES = {aten.mul, aten.div}
_LARGEST_SCALE = 2.0**59
"""A number of a model, smaller than 2**60, stays above the fills under a smaller one."""


def find_floored(step: Step, states: Mapping[fx.Node, State]) -> Tensor | None:
    """Return where the result of a pointwise operator is above all fills of masks; None: nowhere."""
    packet = getattr(step.node.target, "overloadpacket", None)
    if packet in _COPIES | _SUMS:
        operands = list(states.values())
        numbers = [item for item in step.node.args if isinstance(item, int | float)]
        return _all_floored(operands) if all(abs(number) < -FILL for number in numbers) else None
    if packet in _SCALES and len(states) == 1 and isinstance(step.node.args[1], int | float):
        scale = abs(step.node.args[1])
        if packet is aten.div:
            scale = 1.0 / scale if scale else math.inf
        return _all_floored(list(states.values())) if scale < _LARGEST_SCALE else None
    return None


def _all_floored(states: list[State]) -> Tensor:
    found = states[0].is_floored()
    for state in states[1:]:
        found = found & state.is_floored()
    return found


def absorbed(step: Step, states: Mapping[fx.Node, State], value: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return the known elements of a sum: a fill plus a number above the fills is the fill."""
    if getattr(step.node.target, "overloadpacket", None) not in _SUMS or step.node.kwargs or len(step.node.args) != 2:
        return value, mask
    first, second = (_operand(states, item, value) for item in step.node.args)
    subtracts = step.node.target.overloadpacket is aten.sub  # type: ignore[union-attr]
    for fill, other in ((first, second), *([] if subtracts else [(second, first)])):
        holds = fill.is_fill() & other.is_floored()
        if bool(holds.any()) and _is_wide(fill.value.dtype, value.dtype):
            value, mask = torch.where(holds & ~mask, fill.value.to(value.dtype), value), mask | holds
    return value, mask


def _is_wide(*dtypes: torch.dtype) -> bool:
    return all(torch.finfo(dtype).max > -FILL for dtype in dtypes if dtype.is_floating_point)


def _operand(states: Mapping[fx.Node, State], item: Any, like: Tensor) -> State:
    return states[item] if isinstance(item, fx.Node) else State.of([1] * like.dim(), like.dtype, item)
