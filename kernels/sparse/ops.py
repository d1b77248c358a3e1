"""Define ``treefx::sparse_tree_attention`` and its backward: schema, fake, autograd.

The query n of head h attends to the tokens ``keys[n]``, which the caller has taken from the query's ancestors. Neither
operator mutates or aliases an input. Results of heads lie in memory as ``[N, H, D]``, for any layout of q, k and v.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from treefx.kernels.common import accumulation_dtype, empty_heads_inside, heads_inside, own_dtypes, owned
from treefx.kernels.sparse.choose import choose_implementation
from treefx.kernels.sparse.problem import Listed

__all__ = ["sparse_tree_attention"]


def _inside(x: Tensor) -> Tensor:
    return heads_inside(x[None])[0]


def _empty(x: Tensor, width: Any) -> Tensor:
    return empty_heads_inside(x[None], width)[0]


@torch.library.custom_op("treefx::sparse_tree_attention", mutates_args=())
def sparse_tree_attention(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, sinks: Tensor | None, scale: float, impl: str = "auto"
) -> tuple[Tensor, Tensor]:
    """Attend from each query to the listed keys alone; reads ``N * K`` pairs.

    Args:
        q: queries ``[H, N, D]``.
        k: keys ``[Hkv, N, D]``; H is a multiple of Hkv.
        v: values ``[Hkv, N, Dv]``.
        keys: int32 or int64 ``[N, K]``: the tokens that each query attends to, each at most once; -1 for none.
        sinks: one extra logit per query head ``[H]``, which takes weight and has no value.
        scale: factor of q.k.
        impl: ``"auto"``, ``"reference"``, ``"chunks"`` or ``"triton"``.

    Returns:
        The output ``[H, N, Dv]``, 0 of a query without a listed key, and the log-sum-exp ``[H, N]``.
    """
    given = Listed(q, k, v, keys, scale, sinks)
    if q.numel() == 0 or v.numel() == 0:
        out, lse = _fake(q, k, v, keys, sinks, scale, impl)
        return out.zero_(), lse.fill_(-torch.inf)
    with own_dtypes(q.device.type):
        out, lse = choose_implementation(impl, given).forward(given)
    return _inside(out), owned(lse)


@sparse_tree_attention.register_fake
def _fake(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, sinks: Tensor | None, scale: float, impl: str = "auto"
) -> tuple[Tensor, Tensor]:
    return _empty(q, v.shape[-1]), q.new_empty(q.shape[:-1], dtype=accumulation_dtype(q))


@torch.library.custom_op("treefx::sparse_tree_attention_backward", mutates_args=())
def sparse_tree_attention_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keys: Tensor,
    sinks: Tensor | None,
    out: Tensor,
    lse: Tensor,
    scale: float,
    impl: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v, and of sinks, ``[0]`` without them.

    A key sums those of all queries that list it.
    """
    given = Listed(q, k, v, keys, scale, sinks)
    inputs = [q, k, v, *([] if sinks is None else [sinks])]
    if q.numel() == 0 or v.numel() == 0:
        grads = [torch.zeros_like(x) for x in inputs]
    else:
        with own_dtypes(q.device.type):
            grads = choose_implementation(impl, given).backward(grad_out, given, out, lse)
    dq, dk, dv = map(_inside, grads[:3])
    return dq, dk, dv, q.new_empty(0) if sinks is None else owned(grads[3])


@sparse_tree_attention_backward.register_fake
def _(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keys: Tensor,
    sinks: Tensor | None,
    out: Tensor,
    lse: Tensor,
    scale: float,
    impl: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dq, dk, dv = (_empty(x, x.shape[-1]) for x in (q, k, v))
    return dq, dk, dv, q.new_empty(0) if sinks is None else sinks.new_empty(sinks.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.scale, ctx.impl = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, grad_out: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    tensors = ctx.saved_tensors
    *grads, of_sinks = torch.ops.treefx.sparse_tree_attention_backward(grad_out, *tensors, ctx.scale, ctx.impl)
    return *grads, None, None if tensors[4] is None else of_sinks, None, None


sparse_tree_attention.register_autograd(_backward, setup_context=_setup_context)
