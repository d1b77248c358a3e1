"""Compare attentions of a running program with the reference: ``TREEFX_CHECK=n`` checks every n-th one.

Each check computes a sample of queries a second time, in any form that the kernels have: the forward by the dense
reference; the backward with gradients for these queries alone, by the kernel and by the reference. The sample has 64
queries of the whole forest, others each time. A check waits for the device, and draws no number from PyTorch's
generators. The first use of a form of the kernels is compared in the same way, with or without the variable.
"""

import itertools
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from treefx.errors import ConfigError, TreefxError
from treefx.kernels import reference
from treefx.kernels.common import Inputs, relative_error
from treefx.kernels.score import Score

__all__ = [
    "EVERY",
    "backward_errors",
    "check_backward",
    "check_forward",
    "exact_products",
    "forward_errors",
    "listed_errors",
    "sample_queries",
    "tolerance_of",
    "usable_inputs",
]

_QUERIES = 64
_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-9}
_SIXTEEN_BITS_TOLERANCE = 0.02
"""Relative error of a whole result; a wrong tile is off by far more."""
_log = logging.getLogger("treefx")


def _read_every() -> int:
    """How many attentions there are from check to check; 0 for no checks.

    Raises:
        ConfigError: The variable is no whole number.
    """
    text = os.environ.get("TREEFX_CHECK", "0")
    if not text.isdecimal():
        raise ConfigError(
            f"TREEFX_CHECK must be a whole number, such as 100 for every hundredth attention, got {text!r}"
        )
    return int(text)


EVERY = _read_every()
_forwards, _backwards = itertools.count(), itertools.count()


def check_forward(inputs: Inputs, score: Score, out: Tensor, lse: Tensor) -> None:
    """Compare output ``[B, H, N, Dv]`` and log-sum-exp ``[B, H, N]`` with the reference, if it is their turn.

    Raises:
        TreefxError: They differ by more than rounding.
    """
    rows = _sample_in_turn(_forwards, inputs)
    if rows is not None:
        _judge("forward", inputs, forward_errors(inputs, score, out, lse, rows))


def check_backward(
    backward: Callable[..., Any],
    grad_out: Tensor,
    inputs: Inputs,
    out: Tensor,
    lse: Tensor,
    score: Score,
    buffer_grads: Sequence[bool],
) -> None:
    """Compare an implementation's gradients for some queries with those of the reference, if it is their turn.

    Args:
        backward: The implementation's, which runs once more; the others are its arguments.

    Raises:
        TreefxError: They differ by more than rounding.
    """
    rows = _sample_in_turn(_backwards, inputs)
    if rows is not None:
        _judge(
            "backward", inputs, backward_errors(backward, grad_out, inputs, out, lse, score, buffer_grads, rows=rows)
        )


def forward_errors(inputs: Inputs, score: Score, out: Tensor, lse: Tensor, rows: Tensor) -> dict[str, float]:
    """Return the relative errors of an output ``[B, H, N, Dv]`` and its log-sum-exp for some queries, by name."""
    with torch.inference_mode(False), torch.no_grad(), exact_products():
        wanted = reference.forward(usable_inputs(inputs), score, rows)
    got = out[:, :, rows], lse[:, :, rows]
    return _errors(inputs, dict(zip(("the output", "its log-sum-exp"), zip(got, wanted, strict=True), strict=True)))


def backward_errors(
    backward: Callable[..., Any],
    grad_out: Tensor,
    inputs: Inputs,
    out: Tensor,
    lse: Tensor,
    score: Score,
    buffer_grads: Sequence[bool],
    *,
    rows: Tensor,
) -> dict[str, float]:
    """Return the relative errors of gradients, by name, where the outputs of some queries alone count.

    Args:
        backward: The implementation's, which is called with the other arguments.
        rows: The queries.
    """
    with torch.inference_mode(False), exact_products():
        inputs, out, lse = usable_inputs(inputs), _usable(out), _usable(lse)
        chosen = torch.zeros_like(grad_out)
        chosen[:, :, rows] = grad_out[:, :, rows]
        *got, rest = backward(chosen, inputs, out, lse, score, buffer_grads)
        *wanted, others = reference.backward(chosen, inputs, out, lse, score, buffer_grads, rows)
    names = ("dq", "dk", "dv", *(f"gradient {number}" for number in range(4, 4 + len(rest))))
    pairs = zip([*got, *rest], [*wanted, *others], strict=True)
    return _errors(inputs, dict(zip(names, pairs, strict=True)), _rounding(chosen, inputs))


def _sample_in_turn(turns: Iterator[int], inputs: Inputs) -> Tensor | None:
    """Numbers of the queries that are compared; None if others are due, or a CUDA graph is captured."""
    turn = next(turns)
    if turn % EVERY or (inputs.q.is_cuda and torch.cuda.is_current_stream_capturing()):
        return None
    return sample_queries(inputs.q, turn)


def sample_queries(q: Tensor, seed: int) -> Tensor:
    """Return numbers of at most 64 queries of ``[B, H, N, D]``, in order; the program's random numbers stay."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randperm(q.shape[2], generator=generator)[:_QUERIES].sort().values.to(q.device)


def _rounding(grad_out: Tensor, inputs: Inputs) -> float:
    """Size of what rounding leaves of gradients whose summands cancel, as those of the weight of an only key do."""
    longest = [float(x.detach().float().norm(dim=-1).max()) for x in (inputs.q, inputs.k, inputs.v)]
    summands = float(grad_out.float().norm()) * longest[2] * max(1.0, *longest[:2]) / inputs.q.shape[-1] ** 0.5
    return float(torch.finfo(inputs.q.dtype).eps * summands)


def _errors(inputs: Inputs, pairs: dict[str, tuple[Tensor, Tensor]], rounding: float = 0.0) -> dict[str, float]:
    allowed = tolerance_of(inputs.q.dtype)
    errors = {part: relative_error(*pair) for part, pair in pairs.items()}
    for part, (got, wanted) in pairs.items():
        if errors[part] > allowed and float((got - wanted).float().norm()) <= rounding:
            errors[part] = 0.0
    return errors


def listed_errors(errors: dict[str, float]) -> str:
    """Return errors as text."""
    return ", ".join(f"{part} by {error:.1e}" for part, error in errors.items())


def _judge(name: str, inputs: Inputs, errors: dict[str, float]) -> None:
    allowed, text = tolerance_of(inputs.q.dtype), listed_errors(errors)
    q = f"{inputs.q.dtype} {list(inputs.q.shape)} on {inputs.q.device}"
    if not all(error <= allowed for error in errors.values()):  # NaN is wrong too
        raise TreefxError(
            f"TREEFX_CHECK: a {name} of tree attention ({q}) differs from the reference on a sample of its queries: "
            f"{text}, where {allowed:.0e} is allowed. Results of this run are wrong. Please report it; "
            "TREEFX_KERNEL_PATH=plain takes another form of the kernels on a GPU"
        )
    _log.info("TREEFX_CHECK: a %s of tree attention (%s) equals the reference: %s", name, q, text)


def tolerance_of(dtype: torch.dtype) -> float:
    """The relative error of a whole result in a dtype that is taken for rounding."""
    return _TOLERANCE.get(dtype, _SIXTEEN_BITS_TOLERANCE)


def usable_inputs(inputs: Inputs) -> Inputs:
    """Return inputs that the reference's autograd accepts; inference tensors are copied."""
    boundary = inputs.boundary
    return replace(
        inputs,
        q=_usable(inputs.q),
        k=_usable(inputs.k),
        v=_usable(inputs.v),
        buffers=[_usable(buffer) for buffer in inputs.buffers],
        sinks=None if inputs.sinks is None else _usable(inputs.sinks),
        boundary=None if boundary is None else replace(boundary, k=_usable(boundary.k), v=_usable(boundary.v)),
    )


def _usable(tensor: Tensor) -> Tensor:
    return tensor.clone() if tensor.is_inference() else tensor.detach()


@contextmanager
def exact_products() -> Iterator[None]:
    """Let torch multiply float32 in full precision, so the reference is precise enough."""
    matmul = torch.backends.cuda.matmul
    precision = matmul.fp32_precision
    if precision in ("ieee", "none"):
        yield
        return
    try:
        older = torch.get_float32_matmul_precision()
    except RuntimeError:  # the program has set the newer of two settings alone
        older = "highest"
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(older)
        matmul.fp32_precision = precision
