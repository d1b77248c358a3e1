"""The shape of a forest as intervals: nodes, paths, and groups of query rows that share one path.

All of it follows from ``subtree_end`` alone. A node is a maximal run of tokens with one ``subtree_end``, and
the ancestors of token t are the tokens k < t with ``subtree_end[k] > t``. For consecutive queries [s, e)
every ancestor before s is an ancestor of s itself, because ``k < s <= q < subtree_end[k]``: one path serves
the whole group.
"""

from dataclasses import dataclass, field, replace
from threading import Lock

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from treefx.errors import InputError

__all__ = [
    "Column",
    "Group",
    "Ranges",
    "Structure",
    "count_tokens",
    "find_structure",
    "indices_of",
    "ranges_of",
]

IntArray = npt.NDArray[np.int64]
Ranges = tuple[tuple[int, int], ...]
"""Sorted, disjoint, non-adjacent intervals [start, stop) of packed tokens."""

_CACHED_FORESTS = 8


@dataclass(frozen=True)
class Group:
    """Consecutive queries [start, stop) and their keys.

    Attributes:
        start: first query.
        stop: exclusive last query.
        shared: keys before ``start`` that every query of the group sees.
        partial: keys before ``start`` that only the first queries of the group see.
        causal: whether every query sees all queries of the group before it.
    """

    start: int
    stop: int
    shared: Ranges
    partial: Ranges
    causal: bool


@dataclass(frozen=True)
class Column:
    """Keys that the queries of several groups, [start, stop) together, all see."""

    start: int
    stop: int
    keys: Ranges


@dataclass(frozen=True)
class Structure:
    """The nodes of one forest.

    Attributes:
        subtree_end: ``[N]`` int64.
        node_start: first token of each node, in packed order.
        node_end: ``subtree_end`` of each node.
        longest_path: largest number of tokens on a path.
    """

    subtree_end: IntArray
    node_start: IntArray
    node_end: IntArray
    longest_path: int
    _groups: dict[tuple[int, int], tuple[Group, ...]] = field(default_factory=dict, repr=False)
    _columns: dict[tuple[int, int], tuple[tuple[Column, ...], tuple[Group, ...]]] = field(
        default_factory=dict, repr=False
    )

    @classmethod
    def from_ends(cls, subtree_end: IntArray) -> "Structure":
        """Find the nodes of a forest.

        Raises:
            InputError: a subtree ends before its own token or after the last one.
        """
        tokens = len(subtree_end)
        positions = np.arange(tokens)
        if tokens and ((subtree_end <= positions).any() or subtree_end.max() > tokens):
            raise InputError(
                f"subtree_end must lie in [k + 1, tokens] for token k of {tokens}, got {subtree_end[:8].tolist()}..."
            )
        first = np.flatnonzero(np.diff(subtree_end, prepend=-1))
        closed = np.cumsum(np.bincount(subtree_end, minlength=tokens + 1)[:tokens])
        longest = int((positions - closed).max()) + 1 if tokens else 0
        return cls(subtree_end, first, subtree_end[first], longest)

    def groups(self, min_rows: int, max_rows: int) -> tuple[Group, ...]:
        """Cut the tokens into groups of queries.

        A node of at least ``min_rows`` tokens stands alone, smaller neighbours are merged until they have
        that many; nothing exceeds ``max_rows``.
        """
        found = self._groups.get((min_rows, max_rows))
        if found is None:
            cuts = self._cuts(min_rows, max_rows)
            found = tuple(self._group(start, stop) for start, stop in zip(cuts[:-1], cuts[1:], strict=True))
            self._groups[min_rows, max_rows] = found
        return found

    def columns(self, min_rows: int, min_keys: int) -> tuple[tuple[Column, ...], tuple[Group, ...]]:
        """Return columns of at least ``min_keys`` keys, and the groups without the keys the columns hold."""
        found = self._columns.get((min_rows, min_keys))
        if found is None:
            groups = self.groups(min_rows, len(self.subtree_end))
            found = self._columns[min_rows, min_keys] = _split_columns(groups, min_keys)
        return found

    def _cuts(self, min_rows: int, max_rows: int) -> list[int]:
        cuts = [0]
        node_stops = np.append(self.node_start[1:], len(self.subtree_end)).tolist()
        for start, stop in zip(self.node_start.tolist(), node_stops, strict=True):
            # The pending group [cuts[-1], start) closes before a big node and once it is big itself.
            if start > cuts[-1] and (stop - start >= min_rows or start - cuts[-1] >= min_rows):
                cuts.append(start)
            while stop - cuts[-1] > max_rows:
                cuts.append(cuts[-1] + max_rows)
        if cuts[-1] < len(self.subtree_end):
            cuts.append(len(self.subtree_end))
        return cuts

    def _group(self, start: int, stop: int) -> Group:
        on_path = (self.node_start < start) & (self.node_end > start)
        chosen = np.flatnonzero(on_path)
        node_stops = np.append(self.node_start[1:], len(self.subtree_end))
        runs = np.stack([self.node_start[chosen], np.minimum(node_stops[chosen], start)], axis=1)
        shared = self.node_end[chosen] >= stop
        inner = self.subtree_end[start : stop - 1]
        causal = bool((inner >= stop).all())
        return Group(start, stop, _merged(runs[shared]), _merged(runs[~shared]), causal)


def _split_columns(groups: tuple[Group, ...], min_keys: int) -> tuple[tuple[Column, ...], tuple[Group, ...]]:
    """Give runs of groups one call for the leading keys that they share.

    The shared keys of neighbouring groups are prefixes of two paths, so their common keys are a common
    prefix; runs are the intervals of the array of those prefixes' lengths, as in a suffix array.
    """
    common = [_common_prefix(a.shared, b.shared) for a, b in zip(groups[:-1], groups[1:], strict=True)]
    taken, columns = [0] * len(groups), []
    runs = [(0, len(groups), 0)]
    while runs:
        first, last, done = runs.pop()
        if last - first < 2:
            continue
        length = min(common[first : last - 1])
        if length - done >= min_keys:
            keys = _sliced(groups[first].shared, done, length)
            columns.append(Column(groups[first].start, groups[last - 1].stop, keys))
            taken[first:last] = [length] * (last - first)
            done = length
        cuts = [i + 1 for i in range(first, last - 1) if common[i] == length]
        runs += [(a, b, done) for a, b in zip([first, *cuts], [*cuts, last], strict=True)]
    rest = [
        replace(group, shared=_sliced(group.shared, done, count_tokens(group.shared)))
        for group, done in zip(groups, taken, strict=True)
    ]
    return tuple(columns), tuple(rest)


def _common_prefix(first: Ranges, second: Ranges) -> int:
    total = 0
    for (start, stop), (other_start, other_stop) in zip(first, second, strict=False):
        if start != other_start:
            break
        total += min(stop, other_stop) - start
        if stop != other_stop:
            break
    return total


def _sliced(ranges: Ranges, first: int, last: int) -> Ranges:
    """Return the tokens number [first, last) of the ranges."""
    sliced: list[tuple[int, int]] = []
    offset = 0
    for start, stop in ranges:
        low, high = max(start, start + first - offset), min(stop, start + last - offset)
        if low < high:
            sliced.append((low, high))
        offset += stop - start
    return tuple(sliced)


def count_tokens(ranges: Ranges) -> int:
    """Return the number of tokens in the ranges."""
    return sum(stop - start for start, stop in ranges)


def _merged(runs: IntArray) -> Ranges:
    merged: list[tuple[int, int]] = []
    for start, stop in runs.tolist():
        if merged and merged[-1][1] == start:
            merged[-1] = (merged[-1][0], stop)
        else:
            merged.append((start, stop))
    return tuple(merged)


def ranges_of(indices: IntArray) -> Ranges:
    """Return sorted indices as ranges."""
    if len(indices) == 0:
        return ()
    breaks = np.flatnonzero(np.diff(indices) != 1) + 1
    starts = indices[np.append(0, breaks)]
    stops = indices[np.append(breaks, len(indices)) - 1] + 1
    return tuple(zip(starts.tolist(), stops.tolist(), strict=True))


def indices_of(ranges: Ranges) -> IntArray:
    """Return the tokens of the ranges in order."""
    return np.concatenate([np.arange(start, stop) for start, stop in ranges] or [np.arange(0)])


_recent: list[tuple[Tensor, Structure]] = []
_lock = Lock()


def find_structure(subtree_end: Tensor) -> Structure:
    """Return the structure of a forest; layers, forward and backward of one step share it.

    A hit is verified by content, so a tensor that was overwritten in place is never mistaken for the old one.
    """
    with _lock:  # backward runs in threads of its own
        for position, (ends, structure) in enumerate(_recent):
            if ends.dtype == subtree_end.dtype and torch.equal(ends, subtree_end):
                _recent.insert(0, _recent.pop(position))
                return structure
        stored = subtree_end.clone()
        structure = Structure.from_ends(stored.numpy().astype(np.int64))
        _recent.insert(0, (stored, structure))
        del _recent[_CACHED_FORESTS:]
    return structure
