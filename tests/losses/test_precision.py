"""Losses of float32 log-probabilities, and losses without anything to learn from."""

import pytest
import torch

from tests.losses.every_loss import FOREST, SUMS, WHOLE_ROWS
from tests.losses.textbook import assert_equal, value_and_grad
from treefx import Forest, losses

LOSSES = {**SUMS, **WHOLE_ROWS}
LOGP = -4 + 0.3 * torch.randn(len(FOREST.edges), generator=torch.Generator().manual_seed(3), dtype=torch.float64)


@pytest.mark.parametrize("name", list(LOSSES))
def test_float32_stays_and_is_near(name: str) -> None:
    loss = LOSSES[name]
    exact = value_and_grad(lambda x: loss(x, FOREST), LOGP)  # type: ignore[arg-type]
    single = value_and_grad(lambda x: loss(x, FOREST), LOGP.float())  # type: ignore[arg-type]
    assert {tensor.dtype for tensor in single} == {torch.float32}
    assert_equal([tensor.double() for tensor in single], exact, 1e-5)


@pytest.mark.parametrize("weights", [None, [0, 0]])
def test_rows_without_predictions_add_nothing(weights: list[int] | None) -> None:
    forest = Forest.from_sequences([[1], [2]] if weights is None else [[1, 2], [1, 3]], weights)
    logp = -torch.rand(len(forest.edges), dtype=torch.float64)
    old = [torch.full((int(length),), torch.nan) for length in forest.row_lengths]
    calls = [
        lambda x: losses.policy_gradient(x, forest, [1.0, -1.0]),
        lambda x: losses.clipped(x, forest, old, [1.0, -1.0], metrics=losses.Metrics()),
        lambda x: losses.clipped(x, forest, old, [1.0, -1.0], level="sequence", metrics=losses.Metrics()),
        lambda x: losses.cispo(x, forest, old, [1.0, -1.0]),
        lambda x: losses.kl(x, forest, old),
        lambda x: losses.entropy(-x, forest),
    ]
    for call in calls:
        value, grad = value_and_grad(call, logp)
        assert value == 0 and not grad.any()


def test_numbers_of_python_keep_their_digits() -> None:
    """Lists, tuples and plain numbers are read as float64: by way of float32, 0.1 would be off by 1.5e-9."""
    forest = Forest.from_sequences([[1, 2, 3], [1, 2, 4]])
    logp = torch.tensor([-0.3, -0.5, -0.7], dtype=torch.float64)
    tensors = [torch.full((3,), value, dtype=torch.float64) for value in (0.1, 0.3)]
    for written in ([row.tolist() for row in tensors], [tuple(row.tolist()) for row in tensors]):
        for loss in (
            lambda values: losses.policy_gradient(logp, forest, values),
            lambda values: losses.policy_gradient(logp, forest, [1.0, -1.0], importance=values),
            lambda values: losses.clipped(logp, forest, values, [1.0, -2.0], clip=0.5),
        ):
            assert float(loss(written)) == float(loss(tensors))
    point = torch.tensor(0.3, dtype=torch.float64)
    by_number, by_tensor = (losses.kto(logp, forest, 1.1 * logp, [True, False], kl=kl) for kl in (0.3, point))
    assert float(by_number) == float(by_tensor)
