"""Run a part with a boundary on the CPU: own keys as a forest, the boundary as rectangles.

Runs of boundary keys that the same own queries [lo, hi) see are rectangles without a mask, which ATen's flash kernel
takes whole; a part with one topmost token has exactly one. They are merged with the own keys by log-sum-exp and
differentiated with the merged out and lse, like the rectangles of :mod:`treefx.kernels.cpu.attention`, which runs any
score but a plain multiple of q.k without a condition, on all keys in one tensor.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from treefx.kernels.common import Inputs, accumulation_dtype, sink_gradient
from treefx.kernels.cpu import attention as cpu
from treefx.kernels.cpu.rectangles import flash, flash_backward
from treefx.kernels.score import Score
from treefx.kernels.tiles.structure import Above

__all__ = ["backward", "forward", "plain_factor"]


@dataclass(frozen=True)
class _Rectangle:
    """Own queries ``rows`` that all see the boundary keys ``keys``."""

    rows: slice
    keys: slice


def forward(inputs: Inputs, score: Score) -> tuple[Tensor, Tensor]:
    """Return the attention output ``[B, H, N, Dv]`` and the log-sum-exp ``[B, H, N]``."""
    factor = plain_factor(inputs.q, inputs.v, score)
    if factor is None:
        return cpu.forward(inputs, score)
    own, lse = cpu.forward(_own(inputs), score)
    assert inputs.boundary is not None
    out = own.to(lse.dtype)
    for part in _rectangles(inputs):
        k, v = (_dense_last(x[:, :, part.keys]) for x in (inputs.boundary.k, inputs.boundary.v))
        part_out, part_lse = flash(_dense_last(inputs.q[:, :, part.rows]), k, v, 0.0, False, scale=factor)
        merged = torch.logaddexp(lse[:, :, part.rows], part_lse)
        out[:, :, part.rows] *= torch.exp(lse[:, :, part.rows] - merged)[..., None]
        out[:, :, part.rows] += part_out * torch.exp(part_lse - merged)[..., None]
        lse[:, :, part.rows] = merged
    if inputs.sinks is not None:
        with_sink = torch.logaddexp(lse, inputs.sinks.to(lse.dtype)[None, :, None])
        out *= torch.exp(lse - with_sink)[..., None]
        lse = with_sink
    return out.to(inputs.q.dtype), lse


def backward(
    grad_out: Tensor, inputs: Inputs, out: Tensor, lse: Tensor, score: Score, buffer_grads: Sequence[bool]
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """Return the gradients of q, k, v, and a list of all others.

    The list: k and v of the boundary, sinks if given, the marked buffers.
    """
    factor = plain_factor(inputs.q, inputs.v, score)
    if factor is None:
        return cpu.backward(grad_out, inputs, out, lse, score, buffer_grads)
    dtype, boundary = accumulation_dtype(inputs.q), inputs.boundary
    assert boundary is not None
    dq, dk, dv, marked = cpu.backward(grad_out, _own(inputs), out, lse, score, buffer_grads)
    dq = dq.to(dtype)
    dbk, dbv = torch.zeros_like(boundary.k, dtype=dtype), torch.zeros_like(boundary.v, dtype=dtype)
    for part in _rectangles(inputs):
        grad, q, row_out, row_lse = (_dense_last(x[:, :, part.rows]) for x in (grad_out, inputs.q, out, lse))
        k, v = (_dense_last(x[:, :, part.keys]) for x in (boundary.k, boundary.v))
        part_q, part_k, part_v = flash_backward(grad, q, k, v, row_out, row_lse, 0.0, False, scale=factor)
        dq[:, :, part.rows] += part_q
        dbk[:, :, part.keys] += part_k
        dbv[:, :, part.keys] += part_v
    sinks = [] if inputs.sinks is None else [sink_gradient(grad_out, out, lse, inputs.sinks)]
    outside = [dbk.to(boundary.k.dtype), dbv.to(boundary.v.dtype)]
    return dq.to(inputs.q.dtype), dk, dv, [*outside, *sinks, *marked]


def plain_factor(q: Tensor, v: Tensor, score: Score) -> float | None:
    """Return the factor of q.k if it is the whole logit under the tree's condition; else None."""
    linear = score.linear
    if linear is None or linear[1] is not None or score.visible is not None:
        return None
    return linear[0] if q.shape[-1] == v.shape[-1] else None


def _dense_last(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _own(inputs: Inputs) -> Inputs:
    return replace(inputs, boundary=None, sinks=None)


def _rectangles(inputs: Inputs) -> list[_Rectangle]:
    assert inputs.boundary is not None
    above = Above.of(inputs.boundary.lo.numpy(), inputs.boundary.hi.numpy())
    sides = zip(above.first.tolist(), above.stop.tolist(), above.runs.tolist(), strict=True)
    return [_Rectangle(slice(first, stop), slice(*keys)) for first, stop, keys in sides]
