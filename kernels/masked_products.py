"""Sum over tokens so that masked pairs contribute nothing, for any values.

A masked pair has the weight 0, but ``0 * NaN`` and ``0 * inf`` are NaN: a dense product carries an overflow of one
branch into every other branch. The plain product is right if its result is finite. Implementations therefore look at
their results, and use :func:`masked_product` where a number is not finite.
"""

from typing import Any

import torch
from torch import Tensor

from treefx.kernels.common import are_finite

__all__ = ["masked_product", "masked_scores", "masked_sum"]


def masked_product(weights: Tensor, seen: Tensor, values: Tensor) -> Tensor:
    """Return ``sum_k weights[r, k] * values[k]`` over the pairs that are seen.

    An entry is NaN if any of its terms has a factor that is not finite.

    Args:
        weights: ``[..., R, K]``, 0 where a pair is not seen, unless its row has a NaN.
        seen: bool ``[..., R, K]``.
        values: ``[..., K, D]``.
    """
    if weights.is_cpu:  # no device has to be waited for
        plain = weights @ values
        if are_finite(plain):
            return plain
    finite_weights, finite_values = weights.isfinite(), values.isfinite()
    product = weights.where(seen & finite_weights, 0.0) @ values.where(finite_values, 0.0)
    count = seen.to(values.dtype) @ (~finite_values).to(values.dtype)
    reached = (seen & ~finite_weights).any(dim=-1, keepdim=True) | (count > 0)
    return product.masked_fill(reached, torch.nan)


class _MaskedScores(torch.autograd.Function):
    """``q @ k^T`` where a pair is seen and 0 elsewhere."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, seen: Tensor) -> Tensor:
        ctx.save_for_backward(q, k, seen)
        return (q @ k.mT).where(seen, 0.0)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        q, k, seen = ctx.saved_tensors
        grad = grads[0].where(seen, 0.0)
        return masked_product(grad, seen, k), masked_product(grad.mT, seen.mT, q), None


class _MaskedSum(torch.autograd.Function):
    """:func:`masked_product` with its gradients, which masked pairs have no part in either."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor, values: Tensor, seen: Tensor) -> Tensor:
        ctx.save_for_backward(weights, values, seen)
        return masked_product(weights, seen, values)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        weights, values, seen = ctx.saved_tensors
        hidden = ~seen  # a launch before the product: cuBLAS warns in a thread without a context of the device
        of_weights = (grads[0] @ values.mT).masked_fill(hidden, 0.0)
        return of_weights, masked_product(weights.mT, seen.mT, grads[0]), None


def masked_scores(q: Tensor, k: Tensor, seen: Tensor) -> Tensor:
    """Return ``q @ k^T`` ``[..., R, K]``, 0 for unseen pairs; differentiable in q and k."""
    scores: Tensor = _MaskedScores.apply(q, k, seen)  # type: ignore[no-untyped-call]
    return scores


def masked_sum(weights: Tensor, values: Tensor, seen: Tensor) -> Tensor:
    """Return :func:`masked_product`, differentiable in weights and values."""
    total: Tensor = _MaskedSum.apply(weights, values, seen)  # type: ignore[no-untyped-call]
    return total
