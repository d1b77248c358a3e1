"""Which program of the kernel of dk and dv visits which tiles: a very long list is cut into parts.

The list of a key block holds every query block below it. In a tree whose short prefix has many long branches a few
programs would still walk their lists when all others are done. Such lists are cut into as many parts of equal length;
each part writes its sums to memory of its own, and a second kernel adds them in their order, so that results are the
same bits every time. Where lists shorten evenly, as in a long prefix, there are more than enough of them and nothing is
cut.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["KeyPrograms", "cut_lists"]

_SHORTEST = 64
"""Tiles that are not worth cutting."""
_EVEN = 64
"""A list that holds more than one in so many of all tiles is cut: a device runs as many programs at once, and more."""
_MOST_PARTS = 16


@dataclass(frozen=True)
class KeyPrograms:
    """One entry per program, those with the most tiles first; all int32.

    Attributes:
        order: block of keys ``[programs]``.
        start: first entry of the list of tiles ``[programs]``.
        middle: exclusive end of the full tiles ``[programs]``.
        stop: exclusive last entry ``[programs]``.
        slot: where the sums of a part go, or -1 for those of a whole list ``[programs]``.
        split: blocks that are cut ``[S]``: block number s owns the slots ``[s * parts, (s + 1) * parts)``.
        parts: parts of each of them.
    """

    order: Tensor
    start: Tensor
    middle: Tensor
    stop: Tensor
    slot: Tensor
    split: Tensor
    parts: int


def cut_lists(start: Tensor, middle: Tensor) -> KeyPrograms:
    """Assign the lists of all blocks to programs; on a CUDA device the host waits for it once, if there are many tiles.

    Args:
        start: first entry of each block's list, int64 ``[blocks + 1]``.
        middle: exclusive end of its full tiles ``[blocks]``.
    """
    first, stop = start[:-1], start[1:]
    lengths = stop - first
    split, parts, limit = 0, 1, torch.full((), torch.iinfo(torch.int64).max, device=start.device)
    if len(lengths):
        limit = (start[-1] + _EVEN - 1).div(_EVEN, rounding_mode="floor").clamp(min=_SHORTEST)
        longest, split, bound = torch.stack([lengths.amax(), (lengths > limit).sum(), limit]).tolist()
        parts = min(_MOST_PARTS, -(-longest // bound)) if split else 1
    blocks = torch.argsort((lengths > limit).to(torch.int8), stable=True)  # those that are cut come last
    whole, cut = blocks[: len(blocks) - split], blocks[len(blocks) - split :]
    bounds = (
        torch.arange(parts + 1, device=start.device)[None, :] * lengths[cut][:, None] // parts + first[cut][:, None]
    )
    order = torch.cat([whole, cut.repeat_interleave(parts)])
    begins = torch.cat([first[whole], bounds[:, :-1].flatten()])
    ends = torch.cat([stop[whole], bounds[:, 1:].flatten()])
    slot = torch.cat([torch.full_like(whole, -1), torch.arange(split * parts, device=start.device)])
    longest_first = torch.argsort(ends - begins, descending=True, stable=True)
    middles = torch.minimum(torch.maximum(middle[order], begins), ends)
    columns = (order, begins, middles, ends, slot)
    order, begins, middles, ends, slot = (column[longest_first].to(torch.int32) for column in columns)
    return KeyPrograms(order, begins, middles, ends, slot, cut.to(torch.int32), parts)
