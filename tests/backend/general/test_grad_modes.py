"""Regions of a forward without gradients: what runs in them is a constant, as in eager."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.backend.general.in_front import SHAPES, check_in_front
from treefx.passes.trace import trace

Mode = Callable[[], AbstractContextManager[object]]
REGIONS: dict[str, tuple[Mode, Mode]] = {
    "no_grad": (torch.no_grad, nullcontext),
    "inference_mode": (torch.inference_mode, nullcontext),
    "enable_grad inside": (torch.no_grad, torch.enable_grad),
    "left inside": (torch.inference_mode, lambda: torch.inference_mode(False)),
    "inside of no_grad": (torch.no_grad, torch.inference_mode),
}


class Regions(nn.Module):
    """A layer between two modes, whose results are read behind them, and the same layer outside."""

    def __init__(self, outer: Mode, inner: Mode) -> None:
        super().__init__()
        self.outer, self.inner = outer, inner
        self.first, self.second = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        with self.outer():
            y = self.first(x)
            with self.inner():
                z = self.second(x).sin()
            z = z + 0
        return x + y.clone() + z.clone() + self.first(x).cos()


def check(name: str, **options: Any) -> None:
    stats = check_in_front(lambda: Regions(*REGIONS[name]), **options)
    assert stats["ran"] == "packed" and not stats["expansions"]


@pytest.mark.parametrize("name", REGIONS)
def test_regions_without_gradients(name: str) -> None:
    check(name)


def test_regions_through_inductor_for_several_shapes() -> None:
    check("left inside", inner="inductor", batches=SHAPES)


def test_an_inference_mode_that_is_only_entered_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace, "_enter_inference_mode", None)
    monkeypatch.setattr(trace, "_exit_inference_mode", None)
    with pytest.raises(AssertionError):
        check("inference_mode")
