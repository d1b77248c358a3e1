"""Choose the form of an LM head's loss: Triton kernels if right, else PyTorch.

A process compares both on a small problem when it first meets a kind of head on a device; the host waits for that one
time. The eager form remains for the CPU, for float64, for devices and environments without these kernels, for a new
kind while a CUDA graph is captured, and, with a warning, where the kernels cannot be compiled or differ.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from treefx.kernels.common import are_right, relative_error
from treefx.kernels.gpu.triton_tree import support
from treefx.kernels.head_loss import eager
from treefx.kernels.head_loss.problem import HeadLoss
from treefx.kernels.memory import Bounded
from treefx.refusal_codes import HEAD_FORM

__all__ = ["backward", "forward", "runs_fused"]

_TOLERANCE = {torch.float32: 2e-3}
_SIXTEEN_BITS_TOLERANCE = 0.02
"""Relative error of a whole result; one of float32 has products in TF32 where the program allows that."""
_verdicts: Bounded[Hashable, bool] = Bounded(256)


def forward(problem: HeadLoss) -> tuple[Tensor, Tensor]:
    """Return minus the log-probability of each pick [R], and the log-sum-exp of every row [N]."""
    if not runs_fused(problem.hidden, problem.softcap, biased=problem.bias is not None):
        return eager.forward(problem)
    from treefx.kernels.head_loss import fused

    return fused.forward(problem)


def backward(problem: HeadLoss, grad: Tensor, loss: Tensor, lse: Tensor, wanted: Sequence[bool]) -> list[Tensor]:
    """Return the gradients of hidden, weight and bias; an empty tensor for unwanted ones."""
    if not runs_fused(problem.hidden, problem.softcap, biased=problem.bias is not None):
        return eager.backward(problem, grad, lse, wanted)
    from treefx.kernels.head_loss import fused

    return fused.backward(problem, grad, loss, lse, wanted)


def runs_fused(x: Tensor, softcap: float | None, *, biased: bool = False) -> bool:
    """Return whether the kernels compute the loss of an LM head.

    Args:
        x: Its hidden states or logits.
        softcap: Its cap.
        biased: Whether it has a bias.
    """
    if x.device.type != "cuda" or not len(x) or support.kind_refusal(x) or support.device_refusal(x.device):
        return False
    kind = x.device, x.dtype, softcap is None, biased
    if kind not in _verdicts:
        if torch.cuda.is_current_stream_capturing():
            return False
        try:
            problem = _problem(x, softcap, biased=biased)
            _verdicts[kind] = _judge(problem)
        except torch.OutOfMemoryError:  # it says nothing of the kernels
            return False
    return _verdicts[kind]


def _problem(x: Tensor, softcap: float | None, *, biased: bool) -> HeadLoss:
    """A problem of several chunks, picks in each of them, equal picks, and rows without one."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(x.device, x.dtype)

    slot, token = (torch.randint(-1, most, (200,), generator=generator).to(x.device) for most in (60, 5001))
    slot, token = torch.cat([slot, slot[:9]]), torch.cat([token, token[:9]])
    bias = draw(5001) if biased else None
    return HeadLoss(draw(70, 64), draw(5001, 64) / 4, bias, slot, token, 0.7, None if softcap is None else 3.0, 2048)


def _judge(problem: HeadLoss) -> bool:
    close = _TOLERANCE.get(problem.hidden.dtype, _SIXTEEN_BITS_TOLERANCE)
    return are_right(lambda: largest_errors(problem), close, _INSTEAD, HEAD_FORM)


_INSTEAD = "treefx: PyTorch's operators compute LM head and loss instead of a Triton kernel, slower"


def largest_errors(problem: HeadLoss) -> list[float]:
    """Return the kernels' relative errors per result, against PyTorch in float32."""
    from treefx.kernels.head_loss import fused

    bias, wanted = problem.bias, [True, True, problem.bias is not None]
    wide = replace(
        problem,
        hidden=problem.hidden.float(),
        weight=problem.weight.float(),
        bias=None if bias is None else bias.float(),
    )
    expected, expected_lse = eager.forward(wide)
    grad = torch.linspace(-1, 2, len(expected), device=expected.device)
    loss, lse = fused.forward(problem)
    right = [expected, expected_lse, *eager.backward(wide, grad, expected_lse, wanted)]
    found = [loss, lse, *fused.backward(problem, grad, loss, lse, wanted)]
    errors = [relative_error(*pair) for pair in zip(found, right, strict=True) if len(pair[1])]
    return [float("inf") if error != error else error for error in errors]
