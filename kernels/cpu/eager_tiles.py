"""Run any score on the CPU, tile by tile, with exact softmax over visible keys.

A tile's scores are formed again in the backward, from the saved log-sum-exp: ``p = exp(s - lse)``,
``ds = p * (dout.v - delta)`` with ``delta = dout.out``. Autograd takes ``ds`` through the expression.

The exact form leaves masked pairs out of every sum, so numbers that are not finite reach no other branch. It costs
twice the products: callers take it where a result is not finite.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from treefx.kernels.common import Inputs, accumulation_dtype, autograd_enabled, empty_outputs
from treefx.kernels.cpu.rectangles import add_keys, rows_per_tile, take_keys
from treefx.kernels.masked_products import masked_product
from treefx.kernels.score import Score
from treefx.kernels.tiles.structure import Group, Ranges, Structure, find_structure, ranges_of
from treefx.kernels.tiles.tile_keys import TileKeys, evaluate_tile, find_tile_keys

__all__ = ["backward", "forward"]


def forward(inputs: Inputs, score: Score, *, exact: bool = False) -> tuple[Tensor, Tensor]:
    """Return output ``[B, H, N, Dv]`` and log-sum-exp ``[B, H, N]``, without sinks."""
    out, lse = empty_outputs(inputs.q, inputs.v)
    for group in _groups(inputs):
        keys = find_tile_keys(inputs, group, score.visible)
        rows, ranges = slice(group.start, group.stop), ranges_of(keys.all.numpy())
        logits = _logits(inputs, score, group, keys, _products(inputs, group, ranges))
        logits[..., len(keys.full) :].masked_fill_(~keys.seen, -torch.inf)
        top = _finite(logits.amax(dim=-1, keepdim=True))
        weights = logits.sub_(top).exp_()
        total = weights.sum(dim=-1, keepdim=True)
        values = take_keys(inputs.v, ranges).to(weights.dtype)
        seen = _seen(keys, weights, values) if exact else None
        grouped = _sum(_by_kv_head(weights, values), seen, values).view(*weights.shape[:-1], values.shape[-1])
        out[:, :, rows] = grouped / total.masked_fill(total == 0, 1.0)
        lse[:, :, rows] = (total.log() + top).squeeze(-1)
    return out, lse


def backward(
    grad_out: Tensor,
    inputs: Inputs,
    out: Tensor,
    lse: Tensor,
    score: Score,
    buffer_grads: Sequence[bool],
    *,
    exact: bool = False,
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """Return the gradients of q, k, v and of the marked buffers, in the accumulation type."""
    dtype = accumulation_dtype(inputs.q)
    dq, dk, dv = (torch.zeros_like(tensor, dtype=dtype) for tensor in (inputs.q, inputs.k, inputs.v))
    with autograd_enabled():
        leaves = inputs.as_leaves(dtype, buffer_grads)
        marked = [buffer for buffer, wanted in zip(leaves.buffers, buffer_grads, strict=True) if wanted]
    sums = [torch.zeros_like(buffer, requires_grad=False) for buffer in marked]
    for group in _groups(inputs):
        keys = find_tile_keys(inputs, group, score.visible)
        rows, ranges = slice(group.start, group.stop), ranges_of(keys.all.numpy())
        q, k, v = inputs.q[:, :, rows].to(dtype), take_keys(inputs.k, ranges), take_keys(inputs.v, ranges)
        grad = grad_out[:, :, rows].to(dtype)
        dot = _products(inputs, group, ranges)
        _fill_masked(dot, keys, wanted=exact)
        with autograd_enabled():
            logits = _logits(leaves, score, group, keys, dot.requires_grad_())
        weights = (logits.detach() - _finite(lse[:, :, rows])[..., None]).exp_()
        _fill_masked(weights, keys)
        delta = (grad * out[:, :, rows]).sum(dim=-1, keepdim=True)
        v, k = v.to(dtype), k.to(dtype)
        dlogits = (_by_kv_head(grad, v) @ v.transpose(-1, -2)).view_as(weights).sub_(delta).mul_(weights)
        _fill_masked(dlogits, keys, wanted=exact)
        ddot, *dbuffers = _through_expression(logits, [dot, *marked], dlogits)
        seen = _seen(keys, weights, k) if exact else None
        seen_from = None if seen is None else seen.mT
        dq[:, :, rows] = _sum(_by_kv_head(ddot, k), seen, k).view_as(q)
        add_keys(dk, ranges, _sum(_by_kv_head(ddot, k).mT, seen_from, _by_kv_head(q, k)))
        add_keys(dv, ranges, _sum(_by_kv_head(weights, v).mT, seen_from, _by_kv_head(grad, v)))
        for total, part in zip(sums, dbuffers, strict=True):
            total += part
    return dq, dk, dv, sums


def _sum(weights: Tensor, seen: Tensor | None, values: Tensor) -> Tensor:
    return weights @ values if seen is None else masked_product(weights, seen, values)


def _seen(keys: TileKeys, weights: Tensor, heads: Tensor) -> Tensor:
    """Return which pairs of a tile are seen, as :func:`_by_kv_head` lays out its weights."""
    return _by_kv_head(keys.merged().seen.expand_as(weights), heads)


def _fill_masked(pairs: Tensor, keys: TileKeys, *, wanted: bool = True) -> None:
    """Write zeros where a pair is not seen, in place."""
    if wanted:
        pairs[..., len(keys.full) :].masked_fill_(~keys.seen, 0.0)


def _groups(inputs: Inputs) -> tuple[Group, ...]:
    structure: Structure = find_structure(inputs.subtree_end, *inputs.seen_from())
    rows = rows_per_tile(inputs, structure)
    return structure.groups(rows, rows)


def _through_expression(logits: Tensor, leaves: list[Tensor], grad: Tensor) -> list[Tensor]:
    if not logits.requires_grad:
        return [torch.zeros_like(leaf, requires_grad=False) for leaf in leaves]
    grads = torch.autograd.grad(logits, leaves, grad, allow_unused=True)
    zipped = zip(grads, leaves, strict=True)
    return [torch.zeros_like(leaf, requires_grad=False) if part is None else part for part, leaf in zipped]


def _by_kv_head(tensor: Tensor, keys: Tensor) -> Tensor:
    """Fold ``[B, H, Q, X]`` into ``[B, Hkv, H / Hkv * Q, X]``: grouped heads share their keys."""
    batch, heads, rows, width = tensor.shape
    kv_heads = keys.shape[1]
    return tensor.reshape(batch, kv_heads, heads // kv_heads * rows, width)


def _products(inputs: Inputs, group: Group, ranges: Ranges) -> Tensor:
    dtype = accumulation_dtype(inputs.q)
    q = inputs.q[:, :, group.start : group.stop].to(dtype)
    k = take_keys(inputs.k, ranges).to(dtype)
    return (_by_kv_head(q, k) @ k.transpose(-1, -2)).view(*q.shape[:-1], k.shape[2])


def _logits(inputs: Inputs, score: Score, group: Group, keys: TileKeys, dot: Tensor) -> Tensor:
    """Return the score's values before any mask, ``[B, H, Q, K]``, in memory of their own."""
    value = evaluate_tile(score.value, inputs, group, keys.all, dot).to(dot.dtype)
    return value if value.shape == dot.shape else value.expand_as(dot).contiguous()


def _finite(lse: Tensor) -> Tensor:
    """Replace the -inf of rows without a visible key: -inf - (-inf) would be NaN."""
    return lse.masked_fill(lse == -torch.inf, 0.0)
