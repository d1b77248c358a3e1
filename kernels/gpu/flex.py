"""Run FlexAttention with the tree condition, the exact path for other devices.

The block lists come from the extrema of each key block: with key k seen from ``first[k]`` to ``end[k]`` (its own
index and ``subtree_end``), the block pair (q in [q0, q1], k in [k0, k1]) has a visible pair only if ``min(first) <= q1
and max(end) > q0``, and only visible ones iff ``max(first) <= q0 and min(end) > q1``. Without a boundary the former
is exact too. The backward runs the forward again under autograd.

Masked values are multiplied by 0: NaN and infinity reach every token of a block, forward and backward.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from treefx.errors import UnsupportedError
from treefx.kernels.common import Inputs, accumulation_dtype, autograd_enabled
from treefx.kernels.score import Score, evaluate

__all__ = ["backward", "block_mask", "forward"]

_BLOCK = 128


def forward(inputs: Inputs, score: Score) -> tuple[Tensor, Tensor]:
    """Return the attention output ``[B, H, N, Dv]`` and the log-sum-exp ``[B, H, N]``."""
    with torch.no_grad():
        return _attend(inputs.detached(), score)


def backward(
    grad_out: Tensor, inputs: Inputs, out: Tensor, lse: Tensor, score: Score, buffer_grads: Sequence[bool]
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """Return the gradients of q, k, v, and a list: of sinks if given, the marked buffers.

    Raises:
        UnsupportedError: the tensors are on the CPU, where FlexAttention has no backward.
    """
    if inputs.q.device.type == "cpu":
        raise UnsupportedError(
            "impl='flex' must get tensors on a device to be differentiated, got the CPU: use impl='auto'"
        )
    with autograd_enabled():
        fresh = inputs.as_leaves(inputs.q.dtype, buffer_grads)
        again, _ = _attend(fresh, score)
        dq, dk, dv, *rest = torch.autograd.grad(again, fresh.differentiable(buffer_grads), grad_out)
    return dq, dk, dv, rest


def _attend(inputs: Inputs, score: Score) -> tuple[Tensor, Tensor]:
    dtype = accumulation_dtype(inputs.q)
    on_cpu = inputs.q.device.type == "cpu"
    run = _run_eager if on_cpu else _compiled()
    # A number of the score must not become a tensor input, which the kernel's score function could not read.
    with torch._dynamo.config.patch(specialize_float=True):
        out, aux = run(
            inputs.q,
            inputs.keys,
            inputs.values,
            score_mod=_score_mod(inputs, score),
            block_mask=block_mask(inputs, _mask_mod(inputs, score), exact=score.visible is None),
            scale=1.0,
            enable_gqa=inputs.q.shape[1] != inputs.k.shape[1],
            return_aux=AuxRequest(lse=True),
        )
    lse = aux.lse.to(dtype)
    if inputs.sinks is not None:
        # A sink is one more logit without a value: it only takes weight.
        with_sink = torch.logaddexp(lse, inputs.sinks.to(dtype)[None, :, None])
        out, lse = (out * torch.exp(lse - with_sink)[..., None]).to(inputs.q.dtype), with_sink
    return out, lse


def _run_eager(*args: Any, **kwargs: Any) -> Any:
    return flex_attention(*args, **kwargs)


@lru_cache(maxsize=1)
def _compiled() -> Callable[..., Any]:
    return torch.compile(flex_attention, dynamic=True)


def _score_mod(inputs: Inputs, score: Score) -> Callable[..., Tensor]:
    buffers, outside = tuple(inputs.buffers), _outside(inputs)

    def score_mod(dot: Tensor, batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        value = evaluate(score.value, dot=dot, q=q + outside, k=k, head=head, batch=batch, buffers=buffers)
        return value.to(dot.dtype)

    return score_mod


def _mask_mod(inputs: Inputs, score: Score) -> Callable[..., Tensor]:
    buffers, outside = tuple(inputs.buffers), _outside(inputs)
    first, end = inputs.intervals()
    dtype = accumulation_dtype(inputs.q)

    def mask_mod(batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        q = q + outside
        visible = (first[k] <= q) & (q < end[k])
        if score.visible is None:
            return visible
        dot = torch.zeros((), dtype=dtype, device=end.device)  # a condition never reads it
        extra = evaluate(score.visible, dot=dot, q=q, k=k, head=head, batch=batch, buffers=buffers)
        return visible & extra.to(torch.bool)

    return mask_mod


def _outside(inputs: Inputs) -> int:
    return 0 if inputs.boundary is None else inputs.boundary.k.shape[2]


def block_mask(
    inputs: Inputs, mask_mod: Callable[..., Tensor], *, exact: bool = True, block: tuple[int, int] = (_BLOCK, _BLOCK)
) -> BlockMask:
    """Return the lists of blocks from their extrema, with the condition for partial blocks.

    Args:
        inputs: inputs with ``subtree_end`` and boundary, which define visibility.
        mask_mod: the condition on (batch, head, q, k).
        exact: whether it is nothing but that, so that full blocks need not evaluate it.
        block: queries and keys of a block.
    """
    begin, end = inputs.intervals()
    tokens, keys, (rows, columns) = inputs.q.shape[2], begin.shape[0], block
    first = _outside(inputs) + torch.arange(-(-tokens // rows), device=begin.device) * rows
    last = first + rows - 1
    # A ragged block of queries or keys never counts as full: no end exceeds its last row, padded keys are never
    # seen.
    never = int(torch.iinfo(torch.int32).max)
    begin, end = (
        torch.nn.functional.pad(x, (0, -keys % columns), value=value).view(-1, columns)
        for x, value in ((begin, never), (end, 0))
    )
    nonempty = (begin.amin(dim=1)[None, :] <= last[:, None]) & (end.amax(dim=1)[None, :] > first[:, None])
    full = (begin.amax(dim=1)[None, :] <= first[:, None]) & (end.amin(dim=1)[None, :] > last[:, None]) & exact
    partial_lists, full_lists = _block_lists(nonempty & ~full), _block_lists(full)
    return BlockMask.from_kv_blocks(
        *partial_lists, *full_lists, BLOCK_SIZE=block, mask_mod=mask_mod, seq_lengths=(tokens, keys)
    )


def _block_lists(wanted: Tensor) -> tuple[Tensor, Tensor]:
    """Return key blocks per query block: counts ``[1, 1, Q]``, ids ``[1, 1, Q, K]``.

    The first ids of a query block are the wanted ones.
    """
    order = torch.argsort(wanted.to(torch.int8), dim=1, descending=True, stable=True).to(torch.int32)
    return wanted.sum(dim=1, dtype=torch.int32)[None, None].contiguous(), order[None, None].contiguous()
