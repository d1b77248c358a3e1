"""Regions of a forward without gradients: what runs in them is a constant, as in eager."""

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from torch import Tensor, nn

from tests.backend.small import Small
from tests.batches import shared_batch
from tests.oracle import FLOAT64, assert_close, compile_with, outcome, stats_of
from tests.spellings import SPELLINGS
from treefx.passes.trace import trace

BATCH = shared_batch(rows=4, length=12, shared=6, vocab=61, padding=None)
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


def check(name: str) -> None:
    torch.manual_seed(0)
    model = Small(SPELLINGS["tril_buffer"], before=Regions(*REGIONS[name])).double()
    twin = copy.deepcopy(model)
    compiled = compile_with(model, inner="aot_eager")
    expected = outcome(twin, lambda: twin(**BATCH.inputs()).loss)
    assert_close(outcome(model, lambda: compiled(**BATCH.inputs()).loss), expected, FLOAT64)
    assert stats_of(compiled)["ran"] == "packed" and not stats_of(compiled)["expansions"]


@pytest.mark.parametrize("name", REGIONS)
def test_regions_without_gradients(name: str) -> None:
    check(name)


def test_an_inference_mode_that_is_only_entered_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace, "_enter_inference_mode", None)
    monkeypatch.setattr(trace, "_exit_inference_mode", None)
    with pytest.raises(AssertionError):
        check("inference_mode")
