"""Expand packed values to rows, and restore gradients in the backward.

A packed value stands for all rows that share its tokens. Going out, ``treefx::expand`` and ``treefx::pick`` read it
once per row; coming back, ``treefx::restore`` and ``treefx::restore_pick`` sum the gradients of all rows through a
token. That sum is the one place where multiplicity enters: with the tree mask, every gradient below it is already
right.

====================  ================================  ==============================================================
operator              forward                           backward
====================  ================================  ==============================================================
``treefx::expand``    y[r] = x[token_of[r]]             dx[n] = sum of dy[r] over r: token_of[r] = n
``treefx::pick``      y[r] = x[token_of[r], target[r]]  dx[n, v] = sum of dy[r] over r: (token_of, target)[r] = (n, v)
====================  ================================  ==============================================================

A ``token_of`` of -1 (dropped padding) reads zero and returns no gradient.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["entries", "expand", "pick", "restore", "restore_pick"]


@torch.library.custom_op("treefx::expand", mutates_args=())
def expand(x: Tensor, token_of: Tensor) -> Tensor:
    """x [N, ...], token_of [...R] int64 -> [...R, ...]."""
    result = x.new_empty([*token_of.shape, *x.shape[1:]])  # no view: the caller may change it in place
    if not x.shape[0]:
        return result.zero_()
    flat = token_of.reshape(-1)
    torch.index_select(x, 0, flat.clamp(min=0), out=result.view(flat.numel(), *x.shape[1:]))
    missing = token_of < 0
    if x.device.type != "cpu":  # the host would wait for the answer
        return result.masked_fill_(missing.reshape(*missing.shape, *[1] * (x.dim() - 1)), 0)
    if bool(missing.any()):
        result[missing] = 0
    return result


@expand.register_fake
def _(x: Tensor, token_of: Tensor) -> Tensor:
    return x.new_empty([*token_of.shape, *x.shape[1:]])


@torch.library.custom_op("treefx::restore", mutates_args=())
def restore(grad: Tensor, token_of: Tensor, like: Tensor) -> Tensor:
    """Sum per-row gradients [...R, ...] into the shape [N, ...] of ``like``."""
    rest = like.shape[1:]
    flat = token_of.reshape(-1)
    total = grad.new_zeros([like.shape[0] + 1, *rest])  # the last entry takes gradients without a token
    total.index_add_(0, torch.where(flat < 0, like.shape[0], flat), grad.reshape([flat.numel(), *rest]))
    return total[:-1].clone()


@restore.register_fake
def _(grad: Tensor, token_of: Tensor, like: Tensor) -> Tensor:
    return grad.new_empty(like.shape)


_LABELS = (torch.int64, torch.uint8)
"""The dtypes of labels that ``nll_loss`` takes."""


@torch.library.custom_op("treefx::entries", mutates_args=())
def entries(target: Tensor, size: int, ignore_index: int | None) -> Tensor:
    """Check that labels or indices name entries [0, size); return -1 for ignored labels.

    A target that names no entry is an error, as in ``nll_loss`` and ``gather``. Other devices than the CPU get ``size``
    for it, which is no entry either: the kernel that reads it fails, without waiting for the device here.

    Args:
        target: Labels; or indices where ``ignore_index`` is None.
        size: Number of entries.
        ignore_index: The label that stands for none.

    Returns:
        int64, of the shape of ``target``.

    Raises:
        IndexError: A label names no entry.
        RuntimeError: An index names no entry, or the loss takes no labels of this dtype.
    """
    if ignore_index is not None and target.dtype not in _LABELS:
        raise RuntimeError(f"expected target dtype to be Long or Byte, but got {target.dtype}")
    target = target.to(torch.int64)
    outside = (target < 0) | (target >= size)
    ignored = target == ignore_index if ignore_index is not None else torch.zeros_like(outside)
    outside &= ~ignored
    if target.device.type == "cpu" and bool(outside.any()):
        first = int(target[outside][0])
        if ignore_index is None:
            raise RuntimeError(f"index {first} is out of bounds for a dimension with size {size}")
        raise IndexError(f"Target {first} is out of bounds.")
    return target.masked_fill(ignored, -1).masked_fill_(outside, size)


@entries.register_fake
def _(target: Tensor, size: int, ignore_index: int | None) -> Tensor:
    return torch.empty_like(target, dtype=torch.int64)


@torch.library.custom_op("treefx::pick", mutates_args=())
def pick(x: Tensor, token_of: Tensor, target: Tensor) -> Tensor:
    """x [N, V], token_of [R] and target [R] int64 -> [R]; a negative target reads zero."""
    valid = (token_of >= 0) & (target >= 0)
    if x.shape[0] == 0:
        return x.new_zeros(target.shape)
    return torch.where(valid, x[token_of.clamp(min=0), target.clamp(min=0)], 0)


@pick.register_fake
def _(x: Tensor, token_of: Tensor, target: Tensor) -> Tensor:
    return x.new_empty(target.shape)


@torch.library.custom_op("treefx::restore_pick", mutates_args=())
def restore_pick(grad: Tensor, token_of: Tensor, target: Tensor, like: Tensor) -> Tensor:
    """Sum picked gradients [R] into the shape [N, V] of ``like``."""
    total = torch.zeros_like(like, dtype=grad.dtype, memory_format=torch.contiguous_format)
    valid = (token_of >= 0) & (target >= 0)
    index = (token_of * like.shape[1] + target).masked_fill(~valid, 0)
    if total.numel():
        total.view(-1).index_add_(0, index, grad.masked_fill(~valid, 0))
    return total


@restore_pick.register_fake
def _(grad: Tensor, token_of: Tensor, target: Tensor, like: Tensor) -> Tensor:
    return grad.new_empty(like.shape)


def _save_expand(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, token_of = inputs
    ctx.save_for_backward(token_of, x)


def _restore(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    token_of, x = ctx.saved_tensors
    return restore(grad, token_of, x), None


expand.register_autograd(_restore, setup_context=_save_expand)


def _save_pick(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, token_of, target = inputs
    ctx.save_for_backward(token_of, target, x)


def _restore_pick(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    token_of, target, x = ctx.saved_tensors
    return restore_pick(grad, token_of, target, x), None, None


pick.register_autograd(_restore_pick, setup_context=_save_pick)


def _save_restore(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[1:-1])


def _expand(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    return expand(grad, *ctx.saved_tensors), None, None


def _pick(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
    return pick(grad, *ctx.saved_tensors), None, None, None


restore.register_autograd(_expand, setup_context=_save_restore)  # gradients of gradients
restore_pick.register_autograd(_pick, setup_context=_save_restore)
