"""Assign tiles to programs of the kernel of dk and dv; cut very long lists.

The list of a key block holds every query block below it. In a tree whose short prefix has many long branches a few
programs would still walk their lists when all others are done. Such a list is cut into parts of equal length, in
proportion to its length; each part writes its sums to separate memory, and a second kernel adds them in their order, so
that results are the same bits every time. Where lists shorten evenly, as in a long prefix, there are more than enough
of them and nothing is cut.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["MOST_SLOTS", "KeyPrograms", "cut_lists"]

_SHORTEST = 64
"""Tiles that are not worth cutting."""
_EVEN = 64
"""A list that holds more than one in so many of all tiles is cut: a device runs as many programs at once, and more."""
_MOST_PARTS = 16
MOST_SLOTS = 2 * _EVEN - 1
"""Parts of all lists that are cut, at most: fewer than `_EVEN` lists exceed the limit, each has one part more than it
holds limits, and all of them hold as many limits as there are lists in `_EVEN`."""


@dataclass(frozen=True)
class KeyPrograms:
    """One entry per program, those with the most tiles first; all int32.

    Attributes:
        order: block of keys ``[programs]``.
        start: first entry of the list of tiles ``[programs]``.
        middle: exclusive end of the full tiles ``[programs]``.
        stop: exclusive last entry ``[programs]``.
        slot: where the sums of a part go, or -1 for those of a whole list ``[programs]``.
        split: blocks that are cut ``[S]``.
        bounds: block number s of them owns the slots ``[bounds[s], bounds[s + 1])``, ``[S + 1]``.
        slots: of all of them.
    """

    order: Tensor
    start: Tensor
    middle: Tensor
    stop: Tensor
    slot: Tensor
    split: Tensor
    bounds: Tensor
    slots: int


def cut_lists(start: Tensor, middle: Tensor) -> KeyPrograms:
    """Assign the lists of all blocks to programs; on a CUDA device the host waits for it once.

    Args:
        start: first entry of each block's list, int64 ``[blocks + 1]``.
        middle: exclusive end of its full tiles ``[blocks]``.
    """
    first, lengths = start[:-1], start[1:] - start[:-1]
    limit = (start[-1] + _EVEN - 1).div(_EVEN, rounding_mode="floor").clamp(min=_SHORTEST)
    pieces = (lengths + limit - 1).div(limit, rounding_mode="floor").clamp(min=1, max=_MOST_PARTS)
    is_cut = pieces > 1
    programs, split, slots = torch.stack([pieces.sum(), is_cut.sum(), (pieces * is_cut).sum()]).tolist()
    order = torch.repeat_interleave(torch.arange(len(lengths), device=start.device), pieces, output_size=programs)
    number = torch.arange(programs, device=start.device) - (pieces.cumsum(0) - pieces)[order]
    begins = first[order] + number * lengths[order] // pieces[order]
    ends = first[order] + (number + 1) * lengths[order] // pieces[order]
    middles = torch.minimum(torch.maximum(middle[order], begins), ends)
    cut = torch.argsort(is_cut.to(torch.int8), stable=True)[len(lengths) - split :]  # ascending
    slot = torch.where(is_cut[order], is_cut[order].cumsum(0) - 1, -1)
    bounds = torch.nn.functional.pad(pieces[cut].cumsum(0), (1, 0))
    longest_first = torch.argsort(ends - begins, descending=True, stable=True)
    columns = (order, begins, middles, ends, slot)
    order, begins, middles, ends, slot = (column[longest_first].to(torch.int32) for column in columns)
    return KeyPrograms(order, begins, middles, ends, slot, cut.to(torch.int32), bounds.to(torch.int32), slots)
