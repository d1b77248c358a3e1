"""Inputs whose values say nothing of positions: of types that do not compare, or without values."""

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from treefx.inputs.values import InputValues, input_values


@pytest.mark.parametrize(
    "x",
    [
        torch.tensor([[1.0 + 2.0j, 2.0 + 2.0j]]),
        torch.tensor([[1, 2, 3]], dtype=torch.uint32),
        torch.zeros(2, 4, dtype=torch.float8_e4m3fn),
        torch.arange(4, device="meta")[None],
        FakeTensorMode().from_tensor(torch.arange(4)[None]),
    ],
    ids=["complex", "unsigned", "eight bits", "meta", "fake"],
)
def test_inputs_that_cannot_be_read_prove_nothing(x: Tensor) -> None:
    assert input_values([x], ["input"]) == InputValues()


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.uint8])
def test_positions_of_any_integer_type_count_up(dtype: torch.dtype) -> None:
    assert input_values([torch.arange(3, 7, dtype=dtype)[None]], ["input"]).consecutive == {0}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(
    "x", [torch.tensor([[1.0 + 2.0j, 3.0]]), torch.ones(2, 3, device="meta")], ids=["complex", "meta"]
)
def test_graphs_of_such_inputs_run(x: Tensor, dynamic: bool) -> None:
    torch._dynamo.reset()
    found = torch.compile(torch.square, backend="treefx", options={"inner": "eager"}, dynamic=dynamic)(x)
    expected = torch.square(x)
    assert found.shape == expected.shape and found.device == expected.device
    assert x.is_meta or torch.equal(found, expected)
