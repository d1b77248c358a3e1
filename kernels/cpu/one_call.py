"""Small forests and single chains on the CPU: one call of ``scaled_dot_product_attention``, differentiated by torch.

A call of a Python operator takes longer than the attention of some hundred tokens. Where one tile of
:mod:`treefx.kernels.tiles.rectangles` holds the whole forest, that tile is what the operator would run; its mask is
kept with the forest.
"""

from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from treefx.kernels.common import Inputs, accumulation_dtype
from treefx.kernels.score import Score, linear_in_dot
from treefx.kernels.tiles.rectangles import SMALL_TILE, Tile, plain_tiles
from treefx.kernels.tiles.structure import find_structure

__all__ = ["attend"]

_PLAIN_TENSORS = (Tensor, torch.nn.Parameter)


def attend(q: Tensor, k: Tensor, v: Tensor, subtree_end: Tensor, score: Score, impl: str) -> Tensor | None:
    """Return the attention ``[B, H, N, D]``, or ``None`` where the operator must run.

    Args:
        q: queries ``[B, H, N, D]``.
        k: keys ``[B, Hkv, N, D]``.
        v: values ``[B, Hkv, N, D]``.
        subtree_end: int32 ``[N]``.
        score: the score; nothing but a multiple of q.k is run here.
        impl: as for the operator.
    """
    if not _is_simple(q, k, v, impl):
        return None
    factor = _plain_factor(score.to_json())
    tile = None if factor is None else _only_tile(q, subtree_end)
    if tile is None:
        return None
    dtype, wide = q.dtype, accumulation_dtype(q)
    if dtype != wide and (tile.mask is not None or q.shape[2] ** 2 < SMALL_TILE):
        q, k, v = q.to(wide), k.to(wide), v.to(wide)
    grouped = q.shape[1] != k.shape[1]
    out = scaled_dot_product_attention(
        q, k, v, attn_mask=tile.mask, is_causal=tile.causal, scale=factor, enable_gqa=grouped
    )
    return out.to(dtype)


def _is_simple(q: Tensor, k: Tensor, v: Tensor, impl: str) -> bool:
    """Whether the tensors are ordinary ones on the CPU that torch's kernel takes as they are."""
    if impl not in ("cpu", "auto") or not q.is_cpu or (impl == "auto" and q.dtype == torch.float64):
        return False
    if any(type(tensor) not in _PLAIN_TENSORS or tensor.stride(-1) != 1 for tensor in (q, k, v)):
        return False
    watched = torch._C._len_torch_dispatch_stack() or torch.is_autocast_enabled("cpu")
    return not watched and q.shape[-1] == v.shape[-1] and q.numel() > 0


@lru_cache(maxsize=256)
def _plain_factor(text: str) -> float | None:
    """Return the factor of q.k where that is the whole logit and there is no condition but the tree's."""
    score = Score.from_json(text)
    linear = linear_in_dot(score.value)
    return None if linear is None or linear[1] is not None or score.visible is not None else linear[0]


def _only_tile(q: Tensor, subtree_end: Tensor) -> Tile | None:
    found = plain_tiles(Inputs(q, q, q, subtree_end), find_structure(subtree_end))
    return found[0] if isinstance(found, list) and len(found) == 1 else None
