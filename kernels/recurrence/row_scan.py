"""Linear recurrences and causal convolutions on rows ``[B, T, ...]``, as one operator each.

``treefx::row_scan`` states a recurrence that a library computes (flash-linear-attention, mamba_ssm) in the terms of
``tree_scan``, so that a pass can give it the tree parent as the token before. On rows it runs ``tree_scan`` along B
chains: the same recurrence, for a graph in which an operand has no packed form. Where sequences are packed into rows,
it starts over at each; so does ``treefx::row_convolution``.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from treefx.kernels.common import autograd_enabled
from treefx.kernels.cuda_graphs import NOT_CAPTURED
from treefx.kernels.recurrence.tree_conv import tree_conv1d
from treefx.kernels.recurrence.tree_scan import tree_delta_rule, tree_ssd

__all__ = ["row_convolution", "row_scan"]


@torch.library.custom_op("treefx::row_scan", mutates_args=(), tags=NOT_CAPTURED)
def row_scan(q: Tensor, k: Tensor, v: Tensor, g: Tensor, step: Tensor | None, segments: Tensor | None = None) -> Tensor:
    """Run a recurrence along each row.

    Args:
        q: reads the state ``[B, T, G, D]``; H is a multiple of G.
        k: writes the state ``[B, T, G, D]``.
        v: is written ``[B, T, H, E]``.
        g: logarithm of the decay ``[B, T, H]``, at most 0.
        step: of the gated delta rule ``[B, T, H]``; None for a state space recurrence (SSD).
        segments: numbers of packed sequences ``[B, T]``; where they change, the state starts at 0.

    Returns:
        ``[B, T, H, E]``.

    Raises:
        InputError: a shape does not fit.
    """
    return _along_rows(q, k, v, g, step, segments)


@row_scan.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, g: Tensor, step: Tensor | None, segments: Tensor | None = None) -> Tensor:
    return torch.empty_like(v, memory_format=torch.contiguous_format)


def _along_rows(q: Tensor, k: Tensor, v: Tensor, g: Tensor, step: Tensor | None, segments: Tensor | None) -> Tensor:
    rows, columns = v.shape[:2]
    ends = _stops(rows, columns, segments, v.device).to(torch.int32)
    q, k, v, g = (x.flatten(0, 1) for x in (q, k, v, g))
    out = tree_ssd(q, k, v, g, ends) if step is None else tree_delta_rule(q, k, v, g, step.flatten(0, 1), ends)
    return out.view(rows, columns, *out.shape[1:])


def _stops(rows: int, columns: int, segments: Tensor | None, device: torch.device) -> Tensor:
    """Where each token's sequence ends, among all tokens in the order of rows, int64 [B T]."""
    if segments is None:
        return torch.arange(1, rows + 1, device=device).repeat_interleave(columns) * columns
    is_last = F.pad(segments[:, 1:] != segments[:, :-1], (0, 1), value=True).flatten()
    behind = torch.arange(1, rows * columns + 1, device=device).where(is_last, rows * columns)
    return behind.flip(0).cummin(0).values.flip(0)


@torch.library.custom_op("treefx::row_scan_backward", mutates_args=(), tags=NOT_CAPTURED)
def row_scan_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, step: Tensor | None, segments: Tensor | None = None
) -> list[Tensor]:
    """Gradients of q, k, v and g, then of ``step`` where given; the forward runs again."""
    given = [x.detach().requires_grad_() for x in (q, k, v, g, step) if x is not None]
    with autograd_enabled():
        out = _along_rows(given[0], given[1], given[2], given[3], None if step is None else given[4], segments)
        found = torch.autograd.grad(out, given, grad)
    return [x.contiguous() for x in found]


@row_scan_backward.register_fake
def _(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, step: Tensor | None, segments: Tensor | None = None
) -> list[Tensor]:
    return [torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v, g, step) if x is not None]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    saved = ctx.saved_tensors  # read once: a checkpoint hands them out no second time
    found = torch.ops.treefx.row_scan_backward(grad, *saved)
    return (*found, *[None] * (len(saved) - len(found)))


row_scan.register_autograd(_backward, setup_context=_setup_context)


@torch.library.custom_op("treefx::row_convolution", mutates_args=())
def row_convolution(x: Tensor, weight: Tensor, bias: Tensor | None, segments: Tensor) -> Tensor:
    """``F.conv1d`` per channel along each packed sequence, left-padded with zeros.

    Args:
        x: tokens ``[B, C, T]``.
        weight: ``[C, 1, K]``.
        bias: ``[C]`` or None.
        segments: numbers of packed sequences ``[B, T]``; where they change, the next begins.

    Returns:
        ``[B, C, T]``.
    """
    return _convolved(x, weight, bias, segments)


@row_convolution.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None, segments: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _convolved(x: Tensor, weight: Tensor, bias: Tensor | None, segments: Tensor) -> Tensor:
    rows, channels, columns = x.shape
    is_first = F.pad(segments[:, 1:] != segments[:, :-1], (1, 0), value=True).flatten()
    parent = torch.arange(-1, rows * columns - 1, device=x.device).masked_fill(is_first, -1)
    out = tree_conv1d(x.transpose(1, 2).flatten(0, 1), weight, bias, parent, groups=channels)
    return out.view(rows, columns, channels).transpose(1, 2).contiguous()


@torch.library.custom_op("treefx::row_convolution_backward", mutates_args=())
def row_convolution_backward(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, segments: Tensor
) -> list[Tensor]:
    """Gradients of x and weight, then of ``bias`` where given; the forward runs again."""
    given = [item.detach().requires_grad_() for item in (x, weight, bias) if item is not None]
    with autograd_enabled():
        out = _convolved(given[0], given[1], None if bias is None else given[2], segments)
        found = torch.autograd.grad(out, given, grad)
    return [item.contiguous() for item in found]


@row_convolution_backward.register_fake
def _(grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, segments: Tensor) -> list[Tensor]:
    given = [item for item in (x, weight, bias) if item is not None]
    return [torch.empty_like(item, memory_format=torch.contiguous_format) for item in given]


def _backward_of_convolution(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    found = torch.ops.treefx.row_convolution_backward(grad, *ctx.saved_tensors)
    return (*found, *[None] * (4 - len(found)))


row_convolution.register_autograd(_backward_of_convolution, setup_context=_setup_context)
