"""The dense reference: every query against every key, differentiated by autograd.

It is the specification of ``treefx::tree_attention`` in code. It runs any dtype on any device, accumulates in
float64 for float64 and in float32 otherwise, and holds the scores of one block of queries at a time.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from treefx.kernels.common import Inputs, accumulation_dtype, autograd_enabled, empty_outputs
from treefx.kernels.score import Expr, Score, evaluate

__all__ = ["backward", "forward"]

_BLOCK_ELEMENTS = 1 << 25
"""Elements of the score block held at a time."""


def forward(inputs: Inputs, score: Score) -> tuple[Tensor, Tensor]:
    """Return the attention output ``[B, H, N, Dv]`` and the log-sum-exp ``[B, H, N]``."""
    out, lse = empty_outputs(inputs.q, inputs.v)
    for start, stop in _query_blocks(inputs):
        block_out, block_lse = _attend_block(inputs, score, start, stop)
        out[:, :, start:stop] = block_out
        lse[:, :, start:stop] = block_lse
    return out, lse


def backward(
    grad_out: Tensor, inputs: Inputs, out: Tensor, lse: Tensor, score: Score, buffer_grads: Sequence[bool]
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """Return the gradients of q, k, v, and a list: that of sinks if given, then the marked buffers'."""
    dtype = accumulation_dtype(inputs.q)
    with autograd_enabled():
        fresh = inputs.as_leaves(dtype, buffer_grads)
        leaves = fresh.differentiable(buffer_grads)
        sums = [torch.zeros_like(leaf, requires_grad=False) for leaf in leaves]
        for start, stop in _query_blocks(inputs):
            block_out, _ = _attend_block(fresh, score, start, stop)
            block_grad = grad_out[:, :, start:stop].to(dtype)
            grads = torch.autograd.grad(block_out, leaves, block_grad, allow_unused=True)
            for total, grad in zip(sums, grads, strict=True):
                if grad is not None:
                    total += grad
    originals = inputs.differentiable(buffer_grads)
    dq, dk, dv, *rest = [total.to(leaf.dtype) for total, leaf in zip(sums, originals, strict=True)]
    return dq, dk, dv, rest


def _query_blocks(inputs: Inputs) -> Iterator[tuple[int, int]]:
    batch, heads, tokens, _ = inputs.q.shape
    rows = max(1, _BLOCK_ELEMENTS // max(1, batch * heads * tokens))
    return ((start, min(start + rows, tokens)) for start in range(0, tokens, rows))


def _attend_block(inputs: Inputs, score: Score, start: int, stop: int) -> tuple[Tensor, Tensor]:
    """Attend from queries ``[start, stop)`` to all keys, in the accumulation type."""
    dtype = accumulation_dtype(inputs.q)
    batch, heads, tokens, _ = inputs.q.shape
    group = heads // inputs.k.shape[1]
    keys = inputs.k.to(dtype).repeat_interleave(group, dim=1)
    values = inputs.v.to(dtype).repeat_interleave(group, dim=1)
    dot = inputs.q[:, :, start:stop].to(dtype) @ keys.transpose(-1, -2)
    q, k, head, batch_index = inputs.indices(start, stop)

    def evaluated(expr: Expr) -> Tensor:
        return evaluate(expr, dot=dot, q=q, k=k, head=head, batch=batch_index, buffers=inputs.buffers)

    visible = (k <= q) & (q < inputs.subtree_end[None, :])
    if score.visible is not None:
        visible = visible & evaluated(score.visible).to(torch.bool)
    value = evaluated(score.value).to(dtype).expand_as(dot)
    logits = value.masked_fill(~visible, -torch.inf)
    if inputs.sinks is not None:
        sink = inputs.sinks.to(dtype)[None, :, None, None].expand(batch, heads, stop - start, 1)
        logits = torch.cat([logits, sink], dim=-1)
    lse = torch.logsumexp(logits, dim=-1)
    # A row without any visible key: its lse is -inf, and -inf - (-inf) would be NaN.
    shift = lse.masked_fill(lse == -torch.inf, 0.0)
    weights = torch.exp(logits - shift[..., None])[..., :tokens]
    return weights @ values, lse
