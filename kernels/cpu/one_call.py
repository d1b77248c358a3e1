"""Run small forests and chains on the CPU by one SDPA call, differentiated by torch.

A call of a Python operator takes longer than the attention of some hundred tokens. Where one tile of
:mod:`treefx.kernels.cpu.rectangles` holds the whole forest, the operator would run that one tile; its mask is
kept with the forest. That mask keeps NaN, as the operator's does: where a number is not finite, the operator computes
the exact one.
"""

from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from treefx.kernels.common import Inputs, accumulation_dtype, are_finite
from treefx.kernels.cpu import attention as cpu
from treefx.kernels.cpu.rectangles import SMALL_TILE, Tile, plain_tiles
from treefx.kernels.score import Score
from treefx.kernels.tiles.structure import find_structure

__all__ = ["attend"]

_PLAIN_TENSORS = (Tensor, torch.nn.Parameter)
_FLASH_NODE = "ScaledDotProductFlashAttentionForCpuBackward0"


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
    if tile.mask is not None and not _is_exact(out, q, k, v, subtree_end, score):
        return None
    return out.to(dtype)


def _is_exact(out: Tensor, q: Tensor, k: Tensor, v: Tensor, subtree_end: Tensor, score: Score) -> bool:
    """Return whether no masked pair counts in the output, and guard its gradients."""
    if not are_finite(out):
        return False
    node = out.grad_fn
    if node is None:
        return True
    if type(node).__name__ != _FLASH_NODE:
        return False
    node.register_hook(partial(_exact_gradients, q, k, v, subtree_end, score))
    return True


def _exact_gradients(
    q: Tensor, k: Tensor, v: Tensor, subtree_end: Tensor, score: Score, grads: Any, grad_outputs: Any
) -> Any:
    """Return gradients of q, k and v by torch's attention, or ``None`` where all are finite."""
    if are_finite(*(grad for grad in grads if grad is not None)):
        return None
    inputs = Inputs(q, k, v, subtree_end).detached()
    out, lse = cpu.forward(inputs, score)
    dq, dk, dv, _ = cpu.backward(grad_outputs[0], inputs, out, lse, score, [])
    exact = (dq, dk, dv, *grads[3:])
    return tuple(None if grad is None else new for grad, new in zip(grads, exact, strict=True))


def _is_simple(q: Tensor, k: Tensor, v: Tensor, impl: str) -> bool:
    """Whether the tensors are ordinary ones on the CPU that torch's kernel takes as they are."""
    if impl not in ("cpu", "auto") or not q.is_cpu or (impl == "auto" and q.dtype == torch.float64):
        return False
    for tensor in (q, k, v):
        if type(tensor) not in _PLAIN_TENSORS or tensor.stride(-1) != 1:
            return False
    watched = torch._C._len_torch_dispatch_stack() or torch.is_autocast_enabled("cpu")
    return not watched and q.shape[-1] == v.shape[-1] and q.numel() > 0


@lru_cache(maxsize=256)
def _plain_factor(text: str) -> float | None:
    """Return the factor of q.k if it is the whole logit under the tree's condition; else None."""
    score = Score.from_json(text)
    linear = score.linear
    return None if linear is None or linear[1] is not None or score.visible is not None else linear[0]


def _only_tile(q: Tensor, subtree_end: Tensor) -> Tile | None:
    found = plain_tiles(Inputs(q, q, q, subtree_end), find_structure(subtree_end))
    return found[0] if isinstance(found, list) and len(found) == 1 else None
