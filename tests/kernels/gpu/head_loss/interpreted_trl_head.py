"""TRL's head by the kernels of LM head and loss, in Triton's interpreter, against TRL's own form on the CPU.

Not collected by itself: tests/kernels/gpu/test_triton_interpreter.py runs it in a process with TRITON_INTERPRET=1.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.gpu.head_loss.interpreted_head_loss import small_programs  # noqa: F401 - a fixture
from treefx.kernels.head_loss import fused
from treefx.passes.trace import fused_heads, heads
from treefx.passes.trace.fused_heads import FusedHead
from treefx.passes.trace.heads import UNSCORED, Head, register_head

ROW = torch.tensor([0, 0, 3, -1, 1, 0, 3, 2, 2])
TARGET = torch.tensor([2, 2, 39, 4, UNSCORED, 3, 1, 0, -100])
pytestmark = [
    pytest.mark.filterwarnings("ignore:invalid value encountered"),
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),  # of Triton 3.6's interpreter
]
SETTINGS = [
    (0.7, 16, None, 1.0, ("log_probs", "entropy")),
    (1.3, 16, 2.0, 0.5, ("entropy",)),
    (1.0, 16, 3.0, 1.0, ()),
]


def form_of(settings: Any) -> FusedHead:
    """What a device would run."""
    temperature, _, softcap, factor, outputs = settings
    return FusedHead(factor / temperature, None if softcap is None else softcap / factor, "entropy" in outputs, None)


def scored(settings: Any, grads: Tensor, tensors: list[Tensor], *, device: bool) -> list[Tensor]:
    from trl.kernels.chunked_logprob import ChunkedLogProbFunction

    key = register_head(Head(ChunkedLogProbFunction, settings))
    leaves = [x.detach().requires_grad_() for x in tensors]
    hidden, weight, bias = leaves
    with pytest.MonkeyPatch.context() as patch:
        if device:
            patch.setattr(heads, "fused_head", lambda *_: form_of(settings))
            patch.setattr(heads, "_pairs", None)
        found = torch.ops.treefx.head(hidden, TARGET, weight, bias, ROW, key)
        loss = sum((x * grad).sum() for x, grad in zip(found, grads, strict=False))
        return [*(x.detach() for x in found), *torch.autograd.grad(loss, leaves)]


@pytest.fixture
def tensors() -> Iterator[list[Tensor]]:
    torch.manual_seed(0)
    yield [torch.randn(4, 8), torch.randn(40, 8), torch.randn(40)]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_results_and_gradients(settings: Any, tensors: list[Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "_ENTRIES", 4 * 16)
    grads = torch.randn(2, len(TARGET))
    got, expected = (scored(settings, grads, tensors, device=device) for device in (True, False))
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    assert not got[0][TARGET == UNSCORED].any()


def test_gradients_of_rows_of_a_token_that_are_not_summed(
    tensors: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fused_heads, "_sums", lambda x, row, rows: x.new_zeros(rows + 1).index_copy_(0, row, x)[:-1])
    grads = torch.randn(2, len(TARGET))
    got, expected = (scored(SETTINGS[0], grads, tensors, device=device) for device in (True, False))
    with pytest.raises(AssertionError, match="not close"):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


def test_which_heads_have_the_form(monkeypatch: pytest.MonkeyPatch) -> None:
    from trl.kernels.chunked_logprob import ChunkedLogProbFunction

    monkeypatch.setattr(fused_heads, "runs_fused", lambda *_: True)
    meta = torch.empty(2, 2, device="meta")
    of = [fused_heads.fused_head(ChunkedLogProbFunction, settings, None, meta) for settings in SETTINGS]
    assert of == [form_of(settings) for settings in SETTINGS]
    assert fused_heads.fused_head(ChunkedLogProbFunction, (1.0, 16), None, meta) is None, "all results"
    assert fused_heads.fused_head(ChunkedLogProbFunction, SETTINGS[0], None, torch.empty(2, 2)) is None, "the CPU"
    assert fused_heads.fused_head(torch.autograd.Function, SETTINGS[0], None, meta) is None
