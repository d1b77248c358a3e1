"""Compute tree attention with the score variants of today's causal language models."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from treefx.errors import InputError
from treefx.kernels.common import accumulation_dtype
from treefx.kernels.ops import IMPLEMENTATIONS, attend
from treefx.kernels.recurrence.tree_conv import find_depths
from treefx.kernels.score import make_score

__all__ = ["tree_attention"]

_LAYOUTS = {"q": "[batch, heads, tokens, head_dim]", "k": "[batch, kv_heads, tokens, head_dim]"}
_LAYOUTS["v"] = "[batch, kv_heads, tokens, value_dim]"


def tree_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    subtree_end: Tensor,
    depth: Tensor | None = None,
    *,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    impl: str = "auto",
    deterministic: bool = False,
) -> Tensor:
    """Attend from every token of a packed forest to itself and its ancestors.

    The logit is ``cap(scale * q.k) - slope_h * (depth_q - depth_k)`` with ``cap(x) = softcap * tanh(x /
    softcap)``; a key is visible iff ``k <= q < subtree_end[k]`` (ancestor or self) and ``depth_q - depth_k <
    window``.

    Args:
        q: queries ``[B, H, N, D]``, floating point, tokens in packed order (depth-first pre-order).
        k: keys ``[B, Hkv, N, D]``; H is a multiple of Hkv.
        v: values ``[B, Hkv, N, Dv]``.
        subtree_end: exclusive end of each token's subtree, int32 or int64 ``[N]``, shared by the batch. That
            the subtrees nest is the caller's responsibility.
        depth: position of each token on its path, int32 or int64 ``[N]``; derived from ``subtree_end`` if
            needed and not given.
        scale: factor of q.k; default ``1 / sqrt(D)``.
        window: number of visible tokens along the path, the query's own included.
        softcap: positive bound of the capped logit.
        alibi_slopes: slope of each query head ``[H]`` (ALiBi, https://arxiv.org/abs/2108.12409),
            differentiable.
        sinks: one extra logit per query head ``[H]`` that takes weight and has no value, differentiable.
        impl: ``"auto"``, ``"reference"`` (dense), ``"cpu"``, ``"flex"`` or ``"triton"``. NaN and infinity stay with the
            tokens that see them, except in ``"flex"``, which spreads them over blocks of 128 tokens.
        deterministic: whether gradients must be the same bits every time. On a GPU dq is otherwise added up in no fixed
            order where that costs less, unless ``torch.use_deterministic_algorithms`` is set.

    Returns:
        ``[B, H, N, Dv]`` in the dtype of q; 0 for a query without a visible key.

    Raises:
        InputError: an argument has the wrong type, dtype, device, rank, shape or value.
        UnsupportedError: ``impl`` cannot run these inputs.
    """
    bare = depth is None and alibi_slopes is None and sinks is None
    if not bare or not _fit_together(q, k, v, subtree_end):
        _check_tensors(q, k, v, subtree_end, depth, alibi_slopes, sinks)
    _check_options(scale, window, softcap, impl)
    needs_depth = window is not None or alibi_slopes is not None
    buffers: list[Tensor] = []
    if needs_depth:
        buffers.append(find_depths(subtree_end) if depth is None else depth)
    if alibi_slopes is not None:
        # In 16 bits the product with a distance of some hundred tokens would be off by a whole unit.
        buffers.append(alibi_slopes.to(accumulation_dtype(alibi_slopes)))
    score = make_score(
        scale=1.0 / math.sqrt(int(q.shape[-1])) if scale is None else scale,
        window=window,
        softcap=softcap,
        alibi=None if alibi_slopes is None else 1,
        depth=0 if needs_depth else None,
    )
    return attend(q, k, v, subtree_end.to(torch.int32), score, buffers, sinks, impl, deterministic=deterministic)


def _fit_together(q: Tensor, k: Tensor, v: Tensor, subtree_end: Tensor) -> bool:
    """Return whether `_check_tensors` would pass in the common case, at less cost."""
    if not all(isinstance(x, Tensor) for x in (q, k, v, subtree_end)):
        return False
    shape, device, dtype = q.shape, q.device, q.dtype
    return (
        k.shape == shape == v.shape
        and k.dtype == dtype == v.dtype
        and k.device == device == v.device == subtree_end.device
        and len(shape) == 4
        and shape[1] > 0 < shape[3]
        and subtree_end.shape == shape[2:3]
        and subtree_end.dtype == torch.int32
        and dtype.is_floating_point
    )


def _check_tensors(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    subtree_end: Tensor,
    depth: Tensor | None,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
) -> None:
    floats = {"q": q, "k": k, "v": v, "alibi_slopes": alibi_slopes, "sinks": sinks}
    integers = {"subtree_end": subtree_end, "depth": depth}
    given: dict[str, Tensor] = {
        name: value  # type: ignore[misc]
        for name, value in {**floats, **integers}.items()
        if value is not None or name in _REQUIRED
    }
    for name, value in given.items():
        if not isinstance(value, Tensor):
            raise InputError(f"{name} must be a torch.Tensor, got {type(value).__name__}")
    for name, value in given.items():
        _check_dtype(name, value, q, integer=name in integers)
    for name, value in given.items():
        if value.device != q.device:
            raise InputError(f"{name} must be on the device of q, {q.device}, got {value.device}: move it there")
    for name, value in given.items():
        rank = 4 if name in _LAYOUTS else 1
        if value.ndim != rank:
            raise _shape_error(name, _LAYOUTS.get(name, _VECTORS.get(name, "")), value)
    _check_shapes(given)


_REQUIRED = ("q", "k", "v", "subtree_end")
_VECTORS = {"subtree_end": "[tokens]", "depth": "[tokens]", "alibi_slopes": "[heads]", "sinks": "[heads]"}


def _check_dtype(name: str, value: Tensor, q: Tensor, *, integer: bool) -> None:
    if integer:
        if value.dtype not in (torch.int32, torch.int64):
            raise InputError(f"{name} must have dtype int32 or int64, got {value.dtype}")
    elif not value.is_floating_point():
        raise InputError(f"{name} must have a floating-point dtype, got {value.dtype}")
    elif name in ("k", "v") and value.dtype != q.dtype:
        raise InputError(f"{name} must have the dtype of q, {q.dtype}, got {value.dtype}")


def _check_shapes(given: dict[str, Tensor]) -> None:
    batch, heads, tokens, head_dim = given["q"].shape
    kv_heads = given["k"].shape[1]
    if kv_heads == 0 or heads % kv_heads:
        raise InputError(f"k must have kv_heads dividing the {heads} heads of q, got {list(given['k'].shape)}")
    if head_dim == 0:
        raise InputError(f"q must have at least one feature per head, got {list(given['q'].shape)}")
    expected: dict[str, Sequence[int]] = {
        "k": (batch, kv_heads, tokens, head_dim),
        "v": (batch, kv_heads, tokens, given["v"].shape[-1]),
        "subtree_end": (tokens,),
        "depth": (tokens,),
        "alibi_slopes": (heads,),
        "sinks": (heads,),
    }
    for name, shape in expected.items():
        if name in given and tuple(given[name].shape) != tuple(shape):
            layout = _LAYOUTS.get(name, _VECTORS.get(name, ""))
            raise _shape_error(name, f"{layout} = {list(shape)}", given[name])


def _shape_error(name: str, layout: str, value: Tensor) -> InputError:
    return InputError(f"{name} must have shape {layout}, got {list(value.shape)}")


def _check_options(scale: float | None, window: int | None, softcap: float | None, impl: str) -> None:
    if scale is not None and not (isinstance(scale, (int, float)) and math.isfinite(scale)):
        raise InputError(f"scale must be a finite number or None, got {scale!r}")
    if window is not None and (isinstance(window, bool) or not isinstance(window, int) or window < 1):
        raise InputError(f"window must be an integer of at least 1 or None, got {window!r}")
    if softcap is not None and not (isinstance(softcap, (int, float)) and 0 < softcap < math.inf):
        raise InputError(f"softcap must be a positive number or None, got {softcap!r}")
    if impl not in IMPLEMENTATIONS:
        raise InputError(f"impl must be one of {', '.join(IMPLEMENTATIONS)}, got {impl!r}")
