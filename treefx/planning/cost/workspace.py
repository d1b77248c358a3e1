"""Measure workspaces of attention on the CPU: blocks of scores, one per thread.

ATen's flash attention takes them from the same allocator as tensors, and their size jumps with the number of queries
(:func:`treefx.planning.cost.model.flash_block`), so that long parts cannot be extrapolated from short ones. It is
measured once per dtype and width of heads, on one block. For CUDA devices see :mod:`treefx.planning.cost.device`.
"""

from collections.abc import Sequence
from functools import cache

import sympy
import torch
from torch import fx

from treefx.kernels.common import accumulation_dtype
from treefx.kernels.cpu.boundary import plain_factor
from treefx.kernels.cpu.rectangles import flash, flash_backward
from treefx.kernels.score import Score
from treefx.planning.cost.device import device_workspace
from treefx.planning.cost.liveness import size_expression
from treefx.planning.cost.memory import track_peak
from treefx.planning.cost.model import flash_block
from treefx.planning.cost.pair_workspace import pair_workspace
from treefx.planning.cost.state_workspace import scan_workspace

__all__ = ["FLASH_BLOCK", "bytes_per_pair", "workspace"]

FLASH_BLOCK = sympy.Symbol("flash_block", nonnegative=True)
"""Symbol of `cost.flash_block` of a part, next to the symbols of its graph."""

_FORWARD = torch.ops.treefx.tree_attention.default
_BACKWARD = torch.ops.treefx.tree_attention_backward.default
_BEFORE_BOUNDARY = (8, 12)
"""Arguments before the boundary, of the forward and of the backward operator."""
_QUERIES, _KEYS = 768, 512
_TILE_ROWS = 256


def workspace(node: fx.Node) -> sympy.Expr:
    """Return bytes of an operator's workspace in symbols, `FLASH_BLOCK` among them.

    It is 0 for all but attention and recurrences.
    """
    if node.target not in (_FORWARD, _BACKWARD):
        return scan_workspace(node) or sympy.Integer(0)
    backward = node.target is _BACKWARD
    q, k, v = (source.meta["val"] for source in node.args[backward : backward + 3])  # type: ignore[union-attr]
    score = Score.from_json(next(item for item in node.args if isinstance(item, str)))
    boundary = [source.meta["val"] for source in node.args[_BEFORE_BOUNDARY[backward] :][:2]]  # type: ignore[union-attr]
    if q.device.type == "cuda":
        return device_workspace(node)
    if q.device.type != "cpu":
        return sympy.Integer(0)
    by_pair = pair_workspace(node)
    if by_pair is not None:
        return by_pair
    per_pair = bytes_per_pair(q.dtype, int(q.shape[-1]))[backward]
    made = _wide_bytes([q, k, v, *boundary] if backward else [q])
    # The share of a rectangle is held with the sums; in 16 bits the sums are float32, and the results come on top.
    share = _wide_bytes([q, *boundary] if backward else [q]) + (made if q.dtype != accumulation_dtype(q) else 0)
    if plain_factor(q, v, score) is not None:
        return share + per_pair * FLASH_BLOCK
    # All keys in one tensor; of a tile at most as many again and their gradients, the condition and the mask.
    keys = _wide_bytes([k, v, *boundary])
    longest = sympy.Add(*(size_expression(x.shape[2]) for x in (q, *boundary[:1])))
    mask = 2 * _TILE_ROWS * accumulation_dtype(q).itemsize * longest
    return share + (3 if backward else 2) * keys + mask + per_pair * flash_block(_TILE_ROWS, _KEYS)


def _wide_bytes(tensors: Sequence[torch.Tensor]) -> sympy.Expr:
    """Bytes of the tensors in the dtype that sums are formed in."""
    sizes = [sympy.Mul(*map(size_expression, x.shape), accumulation_dtype(x).itemsize) for x in tensors]
    return sympy.Add(*sizes)


def bytes_per_pair(dtype: torch.dtype, width: int) -> tuple[float, float]:
    """Return bytes of all threads' blocks per pair, forward and backward, for this head width."""
    return _measure(dtype, width, torch.get_num_threads())


@cache
def _measure(dtype: torch.dtype, width: int, threads: int) -> tuple[float, float]:
    del threads  # as many as there are
    q = torch.zeros(1, 1, _QUERIES, width, dtype=dtype)
    k = q[:, :, :_KEYS]
    with track_peak() as forward:
        out, lse = flash(q, k, k, 0.0, False)
    with track_peak() as backward:
        gradients = flash_backward(out, q, k, k, out, lse, 0.0, False)
    blocks = flash_block(_QUERIES, _KEYS)
    results = [sum(x.nbytes for x in made) for made in ((out, lse), gradients)]
    first, second = ((peak.bytes - made) / blocks for peak, made in zip((forward, backward), results, strict=True))
    return first, second
