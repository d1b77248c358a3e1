"""Which tokens of a forest run together in a chunked recurrence.

A chunk is a run of at most L tokens of an unary chain: it never crosses a fork, so its incoming state is that of one
chunk, its parent. All chunks of one level (the number of chunks above) run as one batch.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Level", "plan_levels"]


@dataclass(frozen=True)
class Level:
    """The chunks of one level.

    Attributes:
        tokens: int64 ``[C, L]``, the packed tokens of each chunk; N where it is shorter.
        parent: int64 ``[C]``, the chunk of the level before whose state comes in; empty at the first level.
    """

    tokens: Tensor
    parent: Tensor


def plan_levels(parent: Tensor, subtree_end: Tensor, length: int) -> list[Level]:
    """Cut a forest into chunks of at most ``length`` tokens.

    Args:
        parent: int64 ``[N]``, packed index of each token's parent, -1 at roots.
        subtree_end: int ``[N]``, exclusive end of each token's subtree in packed order.
        length: L.
    """
    count = parent.shape[0]
    index = torch.arange(count, device=parent.device)
    before = (index - 1).clamp(min=0)
    # The only child of the token before it: the subtrees of both end together.
    chained = (index > 0) & (parent == before) & (subtree_end == subtree_end[before])
    start = torch.where(chained, 0, index).cummax(0).values
    first = (index - start) % length == 0
    chunk = first.cumsum(0) - 1  # of each token
    head = index[first]
    above = parent[head]
    up = torch.where(above < 0, -1, chunk[above.clamp(min=0)])
    level = _depths(up)
    sizes = torch.bincount(chunk, minlength=len(head))
    offset = torch.arange(length, device=parent.device)
    tokens = torch.where(offset < sizes[:, None], head[:, None] + offset, count)
    levels = []
    place = torch.zeros_like(head)  # of each chunk within its level
    for number in range(int(level.max()) + 1 if count else 0):
        members = torch.nonzero(level == number).squeeze(1)
        place[members] = torch.arange(len(members), device=parent.device)
        levels.append(Level(tokens[members], place[up[members]] if number else members[:0]))
    return levels


def _depths(up: Tensor) -> Tensor:
    """The number of ancestors of each chunk, by pointer doubling."""
    depth = (up >= 0).to(torch.int64)
    ancestor = up
    while bool((ancestor >= 0).any()):
        inside = ancestor.clamp(min=0)
        depth = depth + torch.where(ancestor >= 0, depth[inside], 0)
        ancestor = torch.where(ancestor >= 0, ancestor[inside], -1)
    return depth
