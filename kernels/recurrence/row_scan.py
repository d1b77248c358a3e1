"""Linear recurrences on rows ``[B, T, ...]``, as one operator.

``treefx::row_scan`` states a recurrence that a library computes (flash-linear-attention, mamba_ssm) in the terms of
``tree_scan``, so that a pass can give it the tree parent as the token before. On rows it runs ``tree_scan`` along B
chains: the same recurrence, for a graph in which an operand has no packed form.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from treefx.kernels.common import autograd_enabled
from treefx.kernels.cuda_graphs import NOT_CAPTURED
from treefx.kernels.recurrence.tree_scan import tree_delta_rule, tree_ssd

__all__ = ["row_scan"]


@torch.library.custom_op("treefx::row_scan", mutates_args=(), tags=NOT_CAPTURED)
def row_scan(q: Tensor, k: Tensor, v: Tensor, g: Tensor, step: Tensor | None) -> Tensor:
    """Run a recurrence along each row.

    Args:
        q: reads the state ``[B, T, G, D]``; H is a multiple of G.
        k: writes the state ``[B, T, G, D]``.
        v: is written ``[B, T, H, E]``.
        g: logarithm of the decay ``[B, T, H]``, at most 0.
        step: of the gated delta rule ``[B, T, H]``; None for a state space recurrence (SSD).

    Returns:
        ``[B, T, H, E]``.

    Raises:
        InputError: a shape does not fit.
    """
    return _along_rows(q, k, v, g, step)


@row_scan.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, g: Tensor, step: Tensor | None) -> Tensor:
    return torch.empty_like(v, memory_format=torch.contiguous_format)


def _along_rows(q: Tensor, k: Tensor, v: Tensor, g: Tensor, step: Tensor | None) -> Tensor:
    rows, columns = v.shape[:2]
    ends = torch.arange(1, rows + 1, device=v.device, dtype=torch.int32).repeat_interleave(columns) * columns
    q, k, v, g = (x.flatten(0, 1) for x in (q, k, v, g))
    out = tree_ssd(q, k, v, g, ends) if step is None else tree_delta_rule(q, k, v, g, step.flatten(0, 1), ends)
    return out.view(rows, columns, *out.shape[1:])


@torch.library.custom_op("treefx::row_scan_backward", mutates_args=(), tags=NOT_CAPTURED)
def row_scan_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, step: Tensor | None) -> list[Tensor]:
    """Gradients of q, k, v and g, then of ``step`` where given; the forward runs again."""
    given = [x.detach().requires_grad_() for x in (q, k, v, g, step) if x is not None]
    with autograd_enabled():
        out = _along_rows(given[0], given[1], given[2], given[3], None if step is None else given[4])
        found = torch.autograd.grad(out, given, grad)
    return [x.contiguous() for x in found]


@row_scan_backward.register_fake
def _(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, step: Tensor | None) -> list[Tensor]:
    return [torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v, g, step) if x is not None]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    saved = ctx.saved_tensors  # read once: a checkpoint hands them out no second time
    found = torch.ops.treefx.row_scan_backward(grad, *saved)
    return (*found, None) if saved[4] is None else tuple(found)


row_scan.register_autograd(_backward, setup_context=_setup_context)
