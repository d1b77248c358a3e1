"""Count the tiles of every program of a kernel, from intervals, and predict the time.

Lists of tiles are made for one size of tiles; sizes are compared before any list is there. A device runs programs side
by side: it is done when the last one is, and not before all of them could be by all its processors.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from treefx.kernels.tiles.tree_blocks import find_intervals

__all__ = ["Rates", "TileCounts", "count_tiles", "predict_time"]


@dataclass(frozen=True)
class Rates:
    """Hold a processor's costs in microseconds.

    Attributes:
        program: a program, for any tiles.
        full: a tile of visible pairs alone.
        partial: a tile under the mask.
    """

    program: float
    full: float
    partial: float


@dataclass(frozen=True)
class TileCounts:
    """Tiles of every program, int64 ``[blocks]`` each.

    Attributes:
        full: of visible pairs alone.
        partial: all others.
    """

    full: Tensor
    partial: Tensor


def count_tiles(ends: Tensor, query_block: int, key_block: int, group: int, *, by_key: bool) -> TileCounts:
    """Count the tiles of a forest's own keys, as :func:`build_blocks` without a condition.

    Args:
        ends: ``subtree_end``, int32 ``[N]``.
        query_block: rows per tile of queries.
        key_block: keys per tile.
        group: rows of every query.
        by_key: whether a program has a block of keys (dk and dv), or of queries.
    """
    rows = len(ends) * group
    first = torch.arange(len(ends), device=ends.device) * group
    begin, stop, full_begin, full_stop = find_intervals(first, ends.long() * group, rows, query_block, key_block)
    full_begin, full_stop = torch.maximum(full_begin, begin), torch.minimum(full_stop, stop)
    if by_key:  # a ragged block of queries is not full
        full_stop = full_stop.clamp(max=rows // query_block)
    full_stop = torch.maximum(full_stop, full_begin)
    if by_key:
        full, every = full_stop - full_begin, stop - begin
    else:
        blocks = -(-rows // query_block)
        full, every = _meeting(full_begin, full_stop, blocks), _meeting(begin, stop, blocks)
    return TileCounts(full, every - full)


def _meeting(begin: Tensor, stop: Tensor, blocks: int) -> Tensor:
    """How many of the intervals ``[begin, stop)`` every block is in."""
    changes = torch.bincount(begin, minlength=blocks + 1) - torch.bincount(stop, minlength=blocks + 1)
    return changes.cumsum(0)[:blocks]


def predict_time(counts: TileCounts, rates: Rates, heads: int, processors: int, *, cut: bool) -> float:
    """Return the microseconds that a launch takes with one program per block and head.

    Args:
        counts: of one head.
        rates: of the device.
        heads: key heads, of all elements of the batch.
        processors: programs that run at once.
        cut: whether programs with long lists are cut (dk and dv): then none of them is waited for.
    """
    each = rates.program + rates.full * counts.full.double() + rates.partial * counts.partial.double()
    together = float(each.sum()) * heads / processors
    return together if cut else max(together, float(each.max()))
