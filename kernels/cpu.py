"""Tree attention on the CPU: ATen's flash kernels over the rectangles of the tree, never an N x N mask.

The queries fall into groups (see :mod:`treefx.kernels.structure`). A group attends to the keys all its rows
see, without a mask, and to its own block with what ends inside it, causally or under a small mask; the two
are merged by log-sum-exp, ``lse = logaddexp(lse_1, lse_2)``, ``out = sum_i out_i exp(lse_i - lse)``. The
backward runs each rectangle's ATen backward with the *merged* out and lse, which makes the sum of the
rectangles the exact gradient.

A condition or a bias is :mod:`treefx.kernels.scored_tiles`. A logit that is not linear in q.k (softcap), or a
gradient for a buffer, takes :mod:`treefx.kernels.eager_tiles`.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from treefx.kernels import eager_tiles, reference
from treefx.kernels.common import Inputs, accumulation_dtype, empty_outputs, sink_gradient
from treefx.kernels.score import Score, linear_in_dot
from treefx.kernels.scored_tiles import plan_scored_tiles
from treefx.kernels.structure import find_structure
from treefx.kernels.tiles import Tile, add_keys, plain_tiles, take_keys

__all__ = ["backward", "forward"]

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default

_SMALL_TILE = 1 << 17
"""Below this many pairs the kernel's 16-bit backward is up to three times slower than its float32 one."""
_FAINT = -1e4
"""Rows with a smaller log-sum-exp than this were masked by a constant."""


def forward(inputs: Inputs, score: Score) -> tuple[Tensor, Tensor]:
    """Return the attention output ``[B, H, N, Dv]`` and the log-sum-exp ``[B, H, N]``."""
    if linear_in_dot(score.value) is None:
        out, lse = eager_tiles.forward(inputs, score)
    else:
        out, lse = _forward_linear(inputs, score)
    if inputs.sinks is not None:
        with_sink = torch.logaddexp(lse, inputs.sinks.to(lse.dtype)[None, :, None])
        out *= torch.exp(lse - with_sink)[..., None]
        lse = with_sink
    faint = _faint_rows(lse, score)
    if len(faint):
        out[:, :, faint], lse[:, :, faint] = reference.forward(inputs, score, faint)
    return out, lse


def backward(
    grad_out: Tensor, inputs: Inputs, out: Tensor, lse: Tensor, score: Score, buffer_grads: Sequence[bool]
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """Return the gradients of q, k, v, and a list: that of sinks if given, then the marked buffers."""
    faint, whole_lse = _faint_rows(lse, score), lse
    if len(faint):
        lse = lse.index_fill(2, faint, torch.inf)  # every exp(logit - lse) is 0: they are left out
    if linear_in_dot(score.value) is None or any(buffer_grads):
        dq, dk, dv, rest = eager_tiles.backward(grad_out, inputs, out, lse, score, buffer_grads)
    else:
        dq, dk, dv = _backward_linear(grad_out, inputs, out, lse, score)
        rest = []
    if inputs.sinks is not None:
        rest = [sink_gradient(grad_out, out, lse, inputs.sinks), *rest]
    if len(faint):
        *exact, marked = reference.backward(grad_out, inputs, out, whole_lse, score, buffer_grads, faint)
        dq, dk, dv, *rest = [a + b for a, b in zip((dq, dk, dv, *rest), (*exact, *marked), strict=True)]
    leaves = inputs.differentiable(buffer_grads)
    first, second, third, *others = [
        grad.to(leaf.dtype) for grad, leaf in zip((dq, dk, dv, *rest), leaves, strict=True)
    ]
    return first, second, third, others


def _faint_rows(lse: Tensor, score: Score) -> Tensor:
    """Return the rows whose logits are all so low that their log-sum-exp, ``constant + log(n)``, has lost log(n).

    Masking constants do that (``finfo.min`` added to every key that a query sees: attention is uniform then);
    such rows go to the reference, which never divides by exp(lse).
    """
    linear = linear_in_dot(score.value)
    if linear is not None and linear[1] is None:
        return torch.empty(0, dtype=torch.int64)
    faint = (lse < _FAINT) & (lse > -torch.inf)
    return faint.flatten(0, 1).any(dim=0).nonzero().squeeze(-1)


def _tiles(inputs: Inputs, score: Score) -> tuple[float, Iterable[Tile], Tensor | None]:
    """Return the factor of q.k, the tiles, and what their log-sum-exp lacks per row."""
    linear = linear_in_dot(score.value)
    assert linear is not None, "callers take the eager path for these"
    factor, bias = linear
    structure = find_structure(inputs.subtree_end)
    if bias is None and score.visible is None:
        return factor, plain_tiles(inputs, structure), None
    planned = plan_scored_tiles(inputs, structure, bias, score.visible)
    return factor, planned, planned.row_terms


def _forward_linear(inputs: Inputs, score: Score) -> tuple[Tensor, Tensor]:
    q, k, v = _same_width(inputs.q, inputs.k, inputs.v)
    dtype = accumulation_dtype(q)
    out = _zeros_heads_inside(v, q.shape[1], dtype)
    lse = torch.full(q.shape[:-1], -torch.inf, dtype=dtype)
    factor, tiles, row_terms = _tiles(inputs, score)
    written = 0
    for tile in tiles:
        rows = slice(tile.start, tile.stop)
        tile_out, tile_lse = _attend_tile(q[:, :, rows], k, v, tile, factor)
        if tile.start >= written:  # the groups come in order: nothing to merge with yet
            out[:, :, rows], lse[:, :, rows] = tile_out, tile_lse
            written = tile.stop
        else:
            _merge(out[:, :, rows], lse[:, :, rows], tile_out, tile_lse)
    if row_terms is not None:
        lse += row_terms
    if out.dtype == inputs.q.dtype and out.shape[-1] == inputs.v.shape[-1]:
        return out, lse
    result, _ = empty_outputs(inputs.q, inputs.v)
    return result.copy_(out[..., : inputs.v.shape[-1]]), lse


def _attend_tile(q: Tensor, k: Tensor, v: Tensor, tile: Tile, factor: float) -> tuple[Tensor, Tensor]:
    keys, values = take_keys(k, tile.keys), take_keys(v, tile.keys)
    mask = _kernel_mask(tile, q, keys)
    out, lse = _flash(q, keys, values, 0.0, tile.causal, attn_mask=mask, scale=factor)
    if tile.dead is not None:  # the kernel reports 0 there
        lse = lse.masked_fill(tile.dead, -torch.inf)
    return out, lse


def _merge(out: Tensor, lse: Tensor, tile_out: Tensor, tile_lse: Tensor) -> None:
    """Merge a tile into the rows of out and lse, in place."""
    merged = torch.logaddexp(lse, tile_lse)
    shift = merged.masked_fill(merged == -torch.inf, 0.0)
    out.mul_(torch.exp(lse - shift)[..., None])
    out.addcmul_(tile_out, torch.exp(tile_lse - shift)[..., None])
    lse.copy_(merged)


def _backward_linear(
    grad_out: Tensor, inputs: Inputs, out: Tensor, lse: Tensor, score: Score
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = _same_width(inputs.q, inputs.k, inputs.v)
    grad_out, out = (_widened(tensor, q.shape[-1]) for tensor in (grad_out, out))
    factor, tiles, row_terms = _tiles(inputs, score)
    lse = lse.masked_fill(lse == -torch.inf, 0.0)  # rows that see nothing: every exp(-inf - lse) is 0
    lse = lse if row_terms is None else lse - row_terms
    dtype = accumulation_dtype(q)
    dq, dk, dv = (_zeros_heads_inside(tensor, tensor.shape[1], dtype) for tensor in (q, k, v))
    for tile in tiles:
        rows = slice(tile.start, tile.stop)
        row_tensors = [tensor[:, :, rows] for tensor in (grad_out, q, out, lse)]
        part_q, part_k, part_v = _differentiate_tile(row_tensors, k, v, tile, factor)
        dq[:, :, rows] += part_q
        add_keys(dk, tile.keys, part_k)
        add_keys(dv, tile.keys, part_v)
    return dq[..., : inputs.q.shape[-1]], dk[..., : inputs.k.shape[-1]], dv[..., : inputs.v.shape[-1]]


def _differentiate_tile(
    row_tensors: list[Tensor], k: Tensor, v: Tensor, tile: Tile, factor: float
) -> tuple[Tensor, Tensor, Tensor]:
    grad_out, q, out, lse = row_tensors
    keys, values = take_keys(k, tile.keys), take_keys(v, tile.keys)
    if q.dtype != lse.dtype and q.shape[2] * keys.shape[2] < _SMALL_TILE:
        grad_out, q, keys, values, out = (x.to(lse.dtype) for x in (grad_out, q, keys, values, out))
    mask = _kernel_mask(tile, q, keys)
    result: tuple[Tensor, Tensor, Tensor] = _flash_backward(
        grad_out, q, keys, values, out, lse, 0.0, tile.causal, attn_mask=mask, scale=factor
    )
    return result


def _kernel_mask(tile: Tile, q: Tensor, keys: Tensor) -> Tensor | None:
    if tile.mask is None:
        return None
    mask = tile.mask
    while mask.ndim < 4:
        mask = mask[None]
    return mask.expand(-1, -1, q.shape[2], keys.shape[2])


def _same_width(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Pad q and k, or v, with zeros: the kernel wants one head width, and zeros change nothing."""
    width = max(q.shape[-1], v.shape[-1])
    return _widened(q, width), _widened(k, width), _widened(v, width)


def _widened(tensor: Tensor, width: int) -> Tensor:
    if tensor.shape[-1] < width:
        return torch.nn.functional.pad(tensor, (0, width - tensor.shape[-1]))
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _zeros_heads_inside(tensor: Tensor, heads: int, dtype: torch.dtype) -> Tensor:
    batch, _, tokens, width = tensor.shape
    return torch.zeros(batch, tokens, heads, width, dtype=dtype).transpose(1, 2)
