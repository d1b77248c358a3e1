"""Compute gradients of a score's buffers (bias, learned slopes), densely in torch.

Only the score expression itself runs under autograd. It holds the scores of one block of queries at a time; quadratic
in the tokens, deterministic, and used only if a buffer requires grad.

The weights and the softmax's correction of their gradients are recomputed in each block, from the same numbers, so that
the gradients of a row's logits sum to zero but for rounding. Those that the kernels have kept do not: their error is
common to all keys of a row, and a slope multiplies it with the distances of all of them. So does the rounding of a
row's sums, which are therefore taken in float64; the products of matrices are not.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from treefx.kernels.common import Inputs, autograd_enabled
from treefx.kernels.score import Score, evaluate

__all__ = ["buffer_gradients"]

_BLOCK_ELEMENTS = 1 << 24


def buffer_gradients(grad_out: Tensor, inputs: Inputs, score: Score, buffer_grads: Sequence[bool]) -> list[Tensor]:
    """Return the gradients of the marked buffers, in their own types.

    Args:
        grad_out: ``[B, H, N, Dv]``.
        inputs: the tensors of the attention.
        score: the score.
        buffer_grads: which buffers want a gradient.
    """
    with autograd_enabled():
        leaves = inputs.as_leaves(torch.float32, buffer_grads)
    marked = [buffer for buffer, wanted in zip(leaves.buffers, buffer_grads, strict=True) if wanted]
    sums = [torch.zeros_like(buffer, requires_grad=False) for buffer in marked]
    batch, heads, queries, _ = inputs.q.shape
    keys = inputs.intervals()[0].shape[0]
    rows = max(1, _BLOCK_ELEMENTS // max(1, batch * heads * keys))
    for start in range(0, queries, rows):
        for total, part in zip(sums, _of_block(grad_out, leaves, marked, score, start, rows), strict=True):
            if part is not None:
                total += part
    originals = [buffer for buffer, wanted in zip(inputs.buffers, buffer_grads, strict=True) if wanted]
    return [total.to(original.dtype) for total, original in zip(sums, originals, strict=True)]


def _of_block(
    grad_out: Tensor, leaves: Inputs, marked: Sequence[Tensor], score: Score, start: int, rows: int
) -> Sequence[Tensor | None]:
    stop = min(start + rows, leaves.q.shape[2])
    group = leaves.q.shape[1] // leaves.k.shape[1]
    q, k, head, batch = leaves.indices(start, stop)
    key, value = (tensor.detach().repeat_interleave(group, dim=1) for tensor in (leaves.keys, leaves.values))
    dot = leaves.q.detach()[:, :, start:stop] @ key.transpose(-1, -2)
    places: dict[str, Any] = {"q": q, "k": k, "head": head, "batch": batch, "buffers": leaves.buffers}
    with autograd_enabled():
        logit = evaluate(score.value, dot=dot, **places).to(torch.float32).expand_as(dot)
    first, end = leaves.intervals()
    visible = (first <= q) & (q < end)
    if score.visible is not None:
        visible = visible & evaluate(score.visible, dot=dot, **places).to(torch.bool)
    if not logit.requires_grad:
        return [None] * len(marked)
    weights = _weights(logit.detach().to(torch.float64).masked_fill(~visible, -torch.inf), leaves.sinks)
    dp = (grad_out[:, :, start:stop].to(torch.float32) @ value.transpose(-1, -2)).to(torch.float64)
    ds = weights * (dp - (weights * dp).sum(-1, keepdim=True))
    with autograd_enabled():
        return torch.autograd.grad(logit, marked, ds.to(torch.float32), allow_unused=True)


def _weights(logits: Tensor, sinks: Tensor | None) -> Tensor:
    """Return the softmax over the keys and a sink; 0 in a row that sees nothing."""
    if sinks is not None:
        sink = sinks.detach().to(logits.dtype)[None, :, None, None].expand(*logits.shape[:-1], 1)
        logits = torch.cat([logits, sink], -1)
    nothing = (logits == -torch.inf).all(-1, keepdim=True)
    weights = torch.softmax(logits, -1).masked_fill(nothing, 0.0)
    return weights if sinks is None else weights[..., :-1]
