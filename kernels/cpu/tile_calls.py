"""ATen's flash attention for the CPU on one rectangle, forward and backward."""

from collections.abc import Sequence

import torch
from torch import Tensor

from treefx.kernels.tiles.rectangles import SMALL_TILE, Tile

__all__ = ["attend_tile", "differentiate_tile", "flash", "flash_backward"]

flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def attend_tile(q: Tensor, keys: Tensor, values: Tensor, tile: Tile, factor: float) -> tuple[Tensor, Tensor]:
    """Attend from a tile's queries to its keys.

    Args:
        q: the tile's queries ``[B, H, Q, D]``.
        keys: ``[B, Hkv, K, D]``.
        values: ``[B, Hkv, K, D]``.
        tile: its mask.
        factor: of q.k.

    Returns:
        Output ``[B, H, Q, D]`` and log-sum-exp ``[B, H, Q]``.
    """
    mask = _kernel_mask(tile, q, keys)
    out, lse = flash(q, keys, values, 0.0, tile.causal, attn_mask=mask, scale=factor)
    if tile.dead is not None:  # the kernel reports 0 there
        lse = lse.masked_fill(tile.dead, -torch.inf)
    return out, lse


def differentiate_tile(
    row_tensors: Sequence[Tensor], keys: Tensor, values: Tensor, tile: Tile, factor: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return a tile's share of the gradients of its queries, keys and values.

    Args:
        row_tensors: gradient of the output, queries, output and log-sum-exp (over all tiles) of the tile's queries.
        keys: as in the forward.
        values: as in the forward.
        tile: its mask.
        factor: of q.k.
    """
    grad_out, q, out, lse = row_tensors
    if q.dtype != lse.dtype and q.shape[2] * keys.shape[2] < SMALL_TILE:
        grad_out, q, keys, values, out = (x.to(lse.dtype) for x in (grad_out, q, keys, values, out))
    mask = _kernel_mask(tile, q, keys)
    result: tuple[Tensor, Tensor, Tensor] = flash_backward(
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
