"""Run tree attention on the CPU: ATen's flash kernels over rectangles, no N x N mask.

The queries fall into groups (see :mod:`treefx.kernels.tiles.structure`). A group attends to the keys all its rows
see, without a mask, and to its own block with what ends inside it, causally or under a small mask; the two
are merged by log-sum-exp, ``lse = logaddexp(lse_1, lse_2)``, ``out = sum_i out_i exp(lse_i - lse)``. The
backward runs each rectangle's ATen backward with the *merged* out and lse, which makes the sum of the
rectangles the exact gradient.

A condition or a bias is :mod:`treefx.kernels.cpu.scored_tiles`, gradients of such a bias are
:mod:`treefx.kernels.cpu.bias_gradients`. A logit that is not linear in q.k (softcap), or a gradient for a bias of
another form, takes :mod:`treefx.kernels.cpu.eager_tiles`.

A mask that is added to scores keeps NaN, and weights of 0 keep the NaN of values. Where a result is not finite, the
exact form of the eager tiles computes it again, in which a branch reads its ancestors alone.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from treefx.kernels import reference
from treefx.kernels.common import Inputs, accumulation_dtype, are_finite, sink_gradient
from treefx.kernels.cpu import eager_tiles
from treefx.kernels.cpu.bias_gradients import BiasGradients, bias_is_summable
from treefx.kernels.cpu.rectangles import Tile, add_keys, attend_tile, differentiate_tile, plain_tiles, take_keys
from treefx.kernels.cpu.scored_tiles import plan_scored_tiles
from treefx.kernels.score import Expr, Linear, Score
from treefx.kernels.tiles.structure import find_structure

__all__ = ["backward", "forward"]

_FAINT = -1e4
"""Rows with a smaller log-sum-exp than this were masked by a constant."""


def forward(inputs: Inputs, score: Score) -> tuple[Tensor, Tensor]:
    """Return the attention output ``[B, H, N, Dv]`` and the log-sum-exp ``[B, H, N]``."""
    linear = score.linear
    whole = inputs.with_all_keys()
    out, lse = eager_tiles.forward(whole, score) if linear is None else _forward_linear(whole, linear, score.visible)
    if not are_finite(out):
        out, lse = eager_tiles.forward(whole, score, exact=True)
    if inputs.sinks is not None:
        with_sink = torch.logaddexp(lse, inputs.sinks.to(lse.dtype)[None, :, None])
        out *= torch.exp(lse - with_sink)[..., None]
        lse = with_sink
    faint = _faint_rows(lse, linear)
    if faint is not None:
        out[:, :, faint], lse[:, :, faint] = reference.forward(inputs, score, faint)
    return out, lse


def backward(
    grad_out: Tensor, inputs: Inputs, out: Tensor, lse: Tensor, score: Score, buffer_grads: Sequence[bool]
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """Return the gradients of q, k, v, and a list of all others.

    The list: of the boundary and of sinks if given, of the marked buffers.
    """
    linear, whole = score.linear, inputs.with_all_keys()
    faint, whole_lse = _faint_rows(lse, linear), lse
    if faint is not None:
        lse = lse.index_fill(2, faint, torch.inf)  # every exp(logit - lse) is 0: they are left out
    if linear is None or (any(buffer_grads) and not bias_is_summable(*linear)):
        dq, dk, dv, rest = eager_tiles.backward(grad_out, whole, out, lse, score, buffer_grads)
    else:
        dq, dk, dv, rest = _backward_linear(grad_out, whole, out, lse, linear, score.visible, buffer_grads)
    if not are_finite(dq, dk, dv, *rest):
        dq, dk, dv, rest = eager_tiles.backward(grad_out, whole, out, lse, score, buffer_grads, exact=True)
    if inputs.sinks is not None:
        rest = [sink_gradient(grad_out, out, lse, inputs.sinks), *rest]
    if inputs.boundary is not None:
        outside = inputs.outside
        rest = [dk[:, :, :outside], dv[:, :, :outside], *rest]
        dk, dv = dk[:, :, outside:], dv[:, :, outside:]
    if faint is not None:
        *exact, marked = reference.backward(grad_out, inputs, out, whole_lse, score, buffer_grads, faint)
        dq, dk, dv, *rest = [a + b for a, b in zip((dq, dk, dv, *rest), (*exact, *marked), strict=True)]
    leaves = inputs.differentiable(buffer_grads)
    first, second, third, *others = [
        grad.to(leaf.dtype) for grad, leaf in zip((dq, dk, dv, *rest), leaves, strict=True)
    ]
    return first, second, third, others


def _faint_rows(lse: Tensor, linear: Linear | None) -> Tensor | None:
    """Return the rows with logits so low that their log-sum-exp has lost log(n).

    Masking constants do that (``finfo.min`` added to every key that a query sees: attention is uniform then);
    such rows go to the reference, which never divides by exp(lse).
    """
    if linear is not None and linear[1] is None:
        return None
    faint = (lse < _FAINT) & (lse > -torch.inf)
    found = faint.flatten(0, 1).any(dim=0).nonzero().squeeze(-1)
    return found if len(found) else None


def _tiles(inputs: Inputs, bias: Expr | None, visible: Expr | None) -> tuple[Iterable[Tile], Tensor | None]:
    """Return the tiles, and the missing part of their log-sum-exp per row."""
    structure = find_structure(inputs.subtree_end, *inputs.seen_from())
    if bias is None and visible is None and inputs.boundary is None:
        return plain_tiles(inputs, structure), None
    planned = plan_scored_tiles(inputs, structure, bias, visible)
    return planned, planned.row_terms


def _is_whole(tiles: Iterable[Tile]) -> bool:
    """Whether one tile is everything, so that there is nothing to merge."""
    return isinstance(tiles, list) and len(tiles) == 1


def _forward_linear(inputs: Inputs, linear: Linear, visible: Expr | None) -> tuple[Tensor, Tensor]:
    factor, bias = linear
    q, k, v = _same_width(inputs.q, inputs.k, inputs.v)
    tiles, row_terms = _tiles(inputs, bias, visible)
    if _is_whole(tiles):
        out, lse = attend_tile(q, k, v, next(iter(tiles)), factor)
    else:
        out, lse = _attend_tiles(q, k, v, tiles, factor)
    if row_terms is not None:
        lse += row_terms
    return out[..., : inputs.v.shape[-1]].to(inputs.q.dtype), lse


def _attend_tiles(q: Tensor, k: Tensor, v: Tensor, tiles: Iterable[Tile], factor: float) -> tuple[Tensor, Tensor]:
    dtype = accumulation_dtype(q)
    out = _zeros_heads_inside(q, dtype)
    lse = torch.full(q.shape[:-1], -torch.inf, dtype=dtype)
    written = 0
    for tile in tiles:
        rows = slice(tile.start, tile.stop)
        keys, values = take_keys(k, tile.keys), take_keys(v, tile.keys)
        tile_out, tile_lse = attend_tile(q[:, :, rows], keys, values, tile, factor)
        if tile.start >= written:  # the groups come in order: nothing to merge with yet
            out[:, :, rows], lse[:, :, rows] = tile_out, tile_lse
            written = tile.stop
        else:
            _merge(out[:, :, rows], lse[:, :, rows], tile_out, tile_lse)
    return out, lse


def _merge(out: Tensor, lse: Tensor, tile_out: Tensor, tile_lse: Tensor) -> None:
    """Merge a tile into the rows of out and lse, in place."""
    merged = torch.logaddexp(lse, tile_lse)
    shift = merged.masked_fill(merged == -torch.inf, 0.0)
    out.mul_(torch.exp(lse - shift)[..., None])
    out.addcmul_(tile_out, torch.exp(tile_lse - shift)[..., None])
    lse.copy_(merged)


def _backward_linear(
    grad_out: Tensor,
    inputs: Inputs,
    out: Tensor,
    lse: Tensor,
    linear: Linear,
    visible: Expr | None,
    buffer_grads: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    factor, bias = linear
    q, k, v = _same_width(inputs.q, inputs.k, inputs.v)
    grad_out, out = (_widened(tensor, q.shape[-1]) for tensor in (grad_out, out))
    sums = None
    if any(buffer_grads):
        sums = BiasGradients(inputs, bias, factor, buffer_grads, q.shape[-1])
        q, k, v, grad_out, out = sums.extended(q, k, [v, grad_out, out])
    tiles, row_terms = _tiles(inputs, bias, visible)
    if row_terms is not None or visible is not None or bias is not None:
        lse = lse.masked_fill(lse == -torch.inf, 0.0)  # rows that see nothing: every exp(-inf - lse) is 0
        lse = lse if row_terms is None else lse - row_terms
    if _is_whole(tiles):
        dq, dk, dv = differentiate_tile([grad_out, q, out, lse], k, v, next(iter(tiles)), factor)
    else:
        dq, dk, dv = _differentiate_tiles([grad_out, q, out, lse], k, v, tiles, factor, sums)
    found = [] if sums is None else sums.sums
    return dq[..., : inputs.q.shape[-1]], dk[..., : inputs.k.shape[-1]], dv[..., : inputs.v.shape[-1]], found


def _differentiate_tiles(
    query_side: Sequence[Tensor], k: Tensor, v: Tensor, tiles: Iterable[Tile], factor: float, sums: BiasGradients | None
) -> tuple[Tensor, Tensor, Tensor]:
    dtype = query_side[-1].dtype
    dq, dk, dv = (_zeros_heads_inside(tensor, dtype) for tensor in (query_side[1], k, v))
    for tile in tiles:
        rows = slice(tile.start, tile.stop)
        row_tensors = [tensor[:, :, rows] for tensor in query_side]
        keys, values = take_keys(k, tile.keys), take_keys(v, tile.keys)
        part_q, part_k, part_v = differentiate_tile(row_tensors, keys, values, tile, factor)
        dq[:, :, rows] += part_q
        add_keys(dk, tile.keys, part_k)
        add_keys(dv, tile.keys, part_v)
        if sums is not None:
            sums.add(tile.start, tile.stop, tile.keys, part_q, part_k)
    return dq, dk, dv


def _same_width(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Pad q and k, or v, with zeros to one head width, which changes no result."""
    width = max(q.shape[-1], v.shape[-1])
    if k.shape[-1] == v.shape[-1] and q.stride(-1) == k.stride(-1) == v.stride(-1) == 1:
        return q, k, v
    return _widened(q, width), _widened(k, width), _widened(v, width)


def _widened(tensor: Tensor, width: int) -> Tensor:
    if tensor.shape[-1] < width:
        return torch.nn.functional.pad(tensor, (0, width - tensor.shape[-1]))
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _zeros_heads_inside(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    batch, heads, tokens, width = tensor.shape
    return torch.zeros(batch, tokens, heads, width, dtype=dtype).transpose(1, 2)
