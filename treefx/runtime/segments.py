"""Find segments of a call, and check its values against the masks of the graph."""

from __future__ import annotations

import torch
from torch import Tensor

from treefx.passes.analysis import Analysis
from treefx.runtime.padding import Grid

__all__ = ["find_starts", "has_gaps"]


def find_starts(analysis: Analysis, grid: Grid) -> Tensor | None:
    """Return the starts of segments, bool [B, T]; None if rows are single segments or none.

    All values that masks compare must change at the same places and never return to an earlier value (and be the column
    of that place where the caller's mask gives them), and those that they count by must go up by one elsewhere. A
    library's numbers are 0 or more.

    Args:
        analysis: One that takes rows to be packed.
        grid: Its inputs in a call.
    """
    segments = analysis.segments
    compared = [grid.value(node) for node in segments.compared]
    changes = _changes(compared[0])
    if not bool(changes.any()) or any(not torch.equal(changes, _changes(x)) for x in compared[1:]):
        return None
    starts = torch.nn.functional.pad(changes, (1, 0), value=True)
    if any(_comes_again(x, changes) for x in compared):
        return None
    if any(bool((grid.value(node) < 0).any()) for node in segments.positive):
        return None
    if not all(_begins(grid.value(node), starts) for node in segments.begins):
        return None
    counting = [grid.value(node).to(torch.int64) for node in segments.counting]  # narrow ones wrap around
    if not all(bool(((x.diff() == 1) | changes).all()) for x in counting):
        return None
    return starts


def _begins(x: Tensor, starts: Tensor) -> bool:
    """Return whether each segment has the number of its first column, or the one behind it.

    In the latter case it sees nothing.
    """
    width = x.shape[1]
    column = torch.arange(width, device=x.device)
    return bool(((x == column) | (x == width) | ~starts).all())


def has_gaps(starts: Tensor, keep: Tensor) -> bool:
    """Return whether a segment keeps more than one run of columns.

    Args:
        starts: bool [B, T], where segments start.
        keep: bool [B, T], the columns that are kept.
    """
    before = torch.nn.functional.pad(keep[:, :-1], (1, 0)) & ~starts
    runs = (keep & ~before).reshape(-1).to(torch.int64)  # where runs of kept columns start
    segment = starts.reshape(-1).to(torch.int64).cumsum(0) - 1
    counts = runs.new_zeros(int(starts.sum())).index_add_(0, segment, runs)
    return bool((counts > 1).any())


def _changes(x: Tensor) -> Tensor:
    """Whether each column but the first differs from the one before, bool [B, T - 1]."""
    return x[:, 1:] != x[:, :-1]


def _comes_again(x: Tensor, changes: Tensor) -> bool:
    """Return whether two runs of a row have one value: fewer values than runs."""
    return not torch.equal(_changes(x.sort(1).values).sum(1), changes.sum(1))
