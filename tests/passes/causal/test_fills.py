"""Fills of masks stay fills in sums, and numbers of a model stay above them."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from treefx.passes.causal.fills import absorbed, find_floored
from treefx.passes.causal.state import State

aten = torch.ops.aten
LOWEST = torch.finfo(torch.float32).min


def step_of(operator: Any, *numbers: Any, tensors: int = 1) -> tuple[Any, list[fx.Node]]:
    """A step of an operator on some inputs and numbers; laws of fills read its node alone."""
    graph = fx.Graph()
    inputs = [graph.placeholder(f"x{i}") for i in range(tensors)]
    return SimpleNamespace(node=graph.call_function(operator, (*inputs, *numbers))), inputs


def scores(dtype: torch.dtype = torch.float32) -> State:
    """Products, none of them known."""
    return State.of([1, 2], dtype).above_fills()


@pytest.mark.parametrize(
    ("operator", "number", "holds"),
    [
        (aten.mul.Scalar, 0.125, True),
        (aten.mul.Scalar, 1e30, False),
        (aten.div.Scalar, 8.0, True),
        (aten.div.Scalar, 1e-30, False),
        (aten.div.Scalar, 0.0, False),
        (aten.add.Scalar, -1e9, True),
        (aten.add.Scalar, LOWEST, False),
        (aten.exp.default, None, False),
    ],
)
def test_numbers_of_a_model_stay_above_fills(operator: Any, number: float | None, holds: bool) -> None:
    step, (x,) = step_of(operator, *([] if number is None else [number]))
    found = find_floored(step, {x: scores()})
    assert (found is not None and bool(found.all())) == holds


@pytest.mark.parametrize(
    ("dtype", "fill", "holds"),
    [
        (torch.float32, LOWEST, True),
        (torch.bfloat16, torch.finfo(torch.bfloat16).min, True),
        (torch.float64, -float("inf"), True),
        (torch.float16, torch.finfo(torch.float16).min, False),  # a score may be as low
        (torch.float32, -1e9, False),  # a score can change it
    ],
)
def test_a_hidden_score_is_the_fill(dtype: torch.dtype, fill: float, holds: bool) -> None:
    step, (x, mask) = step_of(aten.add.Tensor, tensors=2)
    hidden = State.constant(torch.tensor([[0.0, fill]], dtype=dtype))
    nothing: Tensor = torch.zeros(1, 2, dtype=dtype)
    value, known = absorbed(step, {x: scores(dtype), mask: hidden}, nothing, torch.zeros(1, 2, dtype=torch.bool))
    assert known.tolist() == [[False, holds]]
    assert not holds or value[0, 1] == fill


def test_a_fill_that_is_taken_away_hides_nothing() -> None:
    """Score minus fill is large, and the sum of two unknown numbers is unknown."""
    hidden = State.constant(torch.tensor([[LOWEST, LOWEST]]))
    for operands, operator in (((scores(), hidden), aten.sub.Tensor), ((scores(), scores()), aten.add.Tensor)):
        step, nodes = step_of(operator, tensors=2)
        states = dict(zip(nodes, operands, strict=True))
        _, known = absorbed(step, states, torch.zeros(1, 2), torch.zeros(1, 2, dtype=torch.bool))
        assert not known.any()
