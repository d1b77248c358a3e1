"""The dense reference: every query against every key, differentiated by autograd.

It is the specification of ``treefx::tree_attention`` in code. It runs any dtype on any device, accumulates in
float64 for float64 and in float32 otherwise, and holds the scores of one block of queries at a time. Numbers that are
not finite reach the tokens that see them, and no other one.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from treefx.kernels.common import Inputs, accumulation_dtype, autograd_enabled, empty_outputs
from treefx.kernels.masked_products import masked_scores, masked_sum
from treefx.kernels.score import Expr, Score, evaluate

__all__ = ["backward", "forward"]

_BLOCK_ELEMENTS = 1 << 25
"""Elements of the score block held at a time."""


def forward(inputs: Inputs, score: Score, rows: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return output ``[B, H, N, Dv]`` and log-sum-exp ``[B, H, N]``, or of given rows."""
    out, lse = empty_outputs(inputs.q if rows is None else inputs.q[:, :, rows], inputs.v)
    start = 0
    for block in _query_blocks(inputs, rows):
        stop = start + len(block)
        out[:, :, start:stop], lse[:, :, start:stop] = _attend_block(inputs, score, block)
        start = stop
    return out, lse


def backward(
    grad_out: Tensor,
    inputs: Inputs,
    out: Tensor,
    lse: Tensor,
    score: Score,
    buffer_grads: Sequence[bool],
    rows: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """Return the gradients of q, k, v, and a list of all others.

    With ``rows``, only the outputs of these queries count.
    """
    dtype = accumulation_dtype(inputs.q)
    with autograd_enabled():
        fresh = inputs.as_leaves(dtype, buffer_grads)
        leaves = fresh.differentiable(buffer_grads)
        sums = [torch.zeros_like(leaf, requires_grad=False) for leaf in leaves]
        for block in _query_blocks(inputs, rows):
            block_out, _ = _attend_block(fresh, score, block)
            block_grad = grad_out[:, :, block].to(dtype)
            grads = torch.autograd.grad(block_out, leaves, block_grad, allow_unused=True)
            for total, grad in zip(sums, grads, strict=True):
                if grad is not None:
                    total += grad
    originals = inputs.differentiable(buffer_grads)
    dq, dk, dv, *rest = [total.to(leaf.dtype) for total, leaf in zip(sums, originals, strict=True)]
    return dq, dk, dv, rest


def _query_blocks(inputs: Inputs, rows: Tensor | None) -> Sequence[Tensor]:
    batch, heads, tokens, _ = inputs.q.shape
    at_once = max(1, _BLOCK_ELEMENTS // max(1, batch * heads * (inputs.outside + tokens)))
    chosen = torch.arange(tokens, device=inputs.q.device) if rows is None else rows
    return torch.split(chosen, at_once) if len(chosen) else ()


def _attend_block(inputs: Inputs, score: Score, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Attend from the queries ``rows`` to all keys, in the accumulation type."""
    dtype = accumulation_dtype(inputs.q)
    batch, heads, tokens, _ = inputs.q.shape
    group = heads // inputs.k.shape[1]
    keys = inputs.keys.to(dtype).repeat_interleave(group, dim=1)
    values = inputs.values.to(dtype).repeat_interleave(group, dim=1)
    q, k, head, batch_index = inputs.indices(0, tokens)
    q = q[rows]

    def evaluated(expr: Expr, dot: Tensor) -> Tensor:
        return evaluate(expr, dot=dot, q=q, k=k, head=head, batch=batch_index, buffers=inputs.buffers)

    first, end = inputs.intervals()
    visible = (first <= q) & (q < end)
    if score.visible is not None:
        visible = visible & evaluated(score.visible, keys.new_zeros(())).to(torch.bool)  # a condition reads no product
    visible = visible.expand(batch, heads, len(rows), keys.shape[2])
    dot = masked_scores(inputs.q[:, :, rows].to(dtype), keys, visible)
    value = evaluated(score.value, dot).to(dtype).expand_as(dot)
    logits = value.masked_fill(~visible, -torch.inf)
    if inputs.sinks is not None:
        sink = inputs.sinks.to(dtype)[None, :, None, None].expand(batch, heads, len(rows), 1)
        logits = torch.cat([logits, sink], dim=-1)
    weights, lse = _softmax(logits)
    return masked_sum(weights[..., : keys.shape[2]], values, visible), lse


def _softmax(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return softmax and log-sum-exp; rows of -inf give zeros, and -inf, as without keys.

    The weights are divided by their sum, not formed as ``exp(logit - lse)``: where every logit is a masking constant,
    ``lse = constant + log(n)`` rounds to the constant and the weights would sum to n.
    """
    top = logits.detach().amax(dim=-1, keepdim=True)
    top = top.masked_fill(top == -torch.inf, 0.0)  # -inf - (-inf) would be NaN
    weights = torch.exp(logits - top)
    total = weights.sum(dim=-1, keepdim=True)
    lse = (total.detach().log() + top).squeeze(-1)
    return weights / total.masked_fill(total == 0, 1.0), lse
