"""Multiply each token's vectors with its own list of keys, as one operator.

``treefx::own_products`` is the product of a sparse attention's indexer, of a token and the columns of its row. A list
per query makes a matrix of keys per query, ``[N, T, D]``: the operator holds those of a block of queries at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from treefx.kernels.common import accumulation_dtype

__all__ = ["own_products"]

_BLOCK_ELEMENTS = 1 << 25
"""Elements of the keys of a block of queries."""


@torch.library.custom_op("treefx::own_products", mutates_args=())
def own_products(q: Tensor, k: Tensor, own: Tensor) -> Tensor:
    """Return ``out[n, h, c] = q[n, h] . k[own[n, c]]``.

    Args:
        q: vectors of tokens ``[N, H, D]``.
        k: keys ``[M, D]`` of the same dtype.
        own: int64 ``[N, T]``, which keys each token meets; numbers from 0 to M - 1.

    Returns:
        ``[N, H, T]``.
    """
    out = q.new_empty(q.shape[0], q.shape[1], own.shape[1])
    for block in _blocks(k, own):
        out[block] = torch.bmm(q[block], k[own[block]].transpose(1, 2))
    return out


@own_products.register_fake
def _(q: Tensor, k: Tensor, own: Tensor) -> Tensor:
    return q.new_empty(q.shape[0], q.shape[1], own.shape[1])


@torch.library.custom_op("treefx::own_products_backward", mutates_args=())
def own_products_backward(grad: Tensor, q: Tensor, k: Tensor, own: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of q and k; a key sums those of all tokens that meet it."""
    of_q = q.new_empty(q.shape)
    of_k = k.new_zeros(k.shape, dtype=accumulation_dtype(k))
    for block in _blocks(k, own):
        keys, part = k[own[block]], grad[block]
        of_q[block] = torch.bmm(part, keys)
        of_keys = torch.bmm(part.transpose(1, 2), q[block]).flatten(0, 1)
        of_k.index_add_(0, own[block].flatten(), of_keys.to(of_k.dtype))
    return of_q, of_k.to(k.dtype)


@own_products_backward.register_fake
def _(grad: Tensor, q: Tensor, k: Tensor, own: Tensor) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape)


def _blocks(k: Tensor, own: Tensor) -> Iterator[slice]:
    """Yield blocks of queries whose keys are gathered at a time, in order."""
    tokens, length = own.shape
    at_once = max(1, _BLOCK_ELEMENTS // max(1, length * k.shape[1]))
    return (slice(start, start + at_once) for start in range(0, tokens, at_once))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    of_q, of_k = torch.ops.treefx.own_products_backward(grad, *ctx.saved_tensors)
    return of_q, of_k, None


own_products.register_autograd(_backward, setup_context=_setup_context)
