"""Describe a forest as intervals: nodes, paths, and groups of queries on one path.

All of it follows from ``subtree_end`` alone. A node is a maximal run of tokens with one ``subtree_end``, and
the ancestors of token t are the tokens k < t with ``subtree_end[k] > t``. For consecutive queries [s, e)
every ancestor before s is an ancestor of s itself, because ``k < s <= q < subtree_end[k]``: one path serves
the whole group.
"""

from bisect import bisect_right
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from threading import Lock
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from treefx.errors import InputError

__all__ = [
    "Above",
    "Column",
    "Group",
    "Ranges",
    "Structure",
    "count_tokens",
    "find_structure",
    "indices_of",
    "joined",
    "ranges_of",
]

IntArray = npt.NDArray[np.int64]
Ranges = IntArray
"""Disjoint, non-adjacent intervals [start, stop) of packed tokens, int64 ``[R, 2]``."""

_CACHED_FORESTS = 8


@dataclass(frozen=True)
class Above:
    """Hold keys from outside, before the forest's own, in runs of equal visibility.

    Attributes:
        runs: the keys of each run, ``[R, 2]``.
        first: first query that sees a run, ``[R]``.
        stop: exclusive last one, ``[R]``.
        count: number of keys P, by which the forest's own keys are moved.
    """

    runs: Ranges
    first: IntArray
    stop: IntArray
    count: int

    @classmethod
    def of(cls, lo: IntArray, hi: IntArray) -> "Above":
        """Find the runs of keys of which key j is seen by the queries ``lo[j] <= q < hi[j]``."""
        start = np.flatnonzero(np.diff(lo, prepend=-1) | np.diff(hi, prepend=-1))
        runs = np.stack([start, np.append(start, len(lo))[1:]], axis=1)
        seen = lo[start] < hi[start]
        return cls(runs[seen], lo[start][seen], hi[start][seen], len(lo))

    def seen(self, start: int, stop: int, *, by_all: bool) -> Ranges:
        """Return keys that all queries [start, stop) see, or those that only some see."""
        whole = (self.first <= start) & (self.stop >= stop)
        return self.runs[whole if by_all else (self.first < stop) & (self.stop > start) & ~whole]


@dataclass(frozen=True)
class Group:
    """Consecutive queries [start, stop) and their keys.

    The keys are found when they are read and not kept: all groups together have a range for every pair of a
    group and a node above it.

    Attributes:
        structure: the forest.
        start: first query.
        stop: exclusive last query.
        causal: whether every query sees all queries of the group before it.
        taken: leading shared keys that a column attends to.
    """

    structure: "Structure" = field(repr=False)
    start: int
    stop: int
    causal: bool
    taken: int = 0

    @property
    def shared(self) -> Ranges:
        """Keys before ``start`` that every query of the group sees, without the ``taken`` ones."""
        runs, ends = self.structure.path(self.start)
        shared = self._with_above(runs[ends >= self.stop], by_all=True)
        return _sliced(shared, self.taken, self.start) if self.taken else shared

    @property
    def partial(self) -> Ranges:
        """Return keys before ``start`` that only some queries of the group see."""
        runs, ends = self.structure.path(self.start)
        return self._with_above(runs[ends < self.stop], by_all=False)

    @property
    def block(self) -> Ranges:
        """The group's own tokens."""
        return np.array([[self.start, self.stop]]) + self.structure.outside

    def _with_above(self, runs: Ranges, *, by_all: bool) -> Ranges:
        above = self.structure.above
        if above is None:
            return _merged(runs)
        return joined(above.seen(self.start, self.stop, by_all=by_all), runs + above.count)


@dataclass(frozen=True)
class Column:
    """Keys that the queries of several groups, [start, stop) together, all see.

    Attributes:
        first: the first of the groups.
        stop: exclusive last query of the last.
        low: first key, counted along the shared path of the first group.
        high: exclusive last.
    """

    first: Group
    stop: int
    low: int
    high: int

    @property
    def start(self) -> int:
        """The first query."""
        return self.first.start

    @property
    def keys(self) -> Ranges:
        """The keys, in packed order."""
        return _sliced(replace(self.first, taken=0).shared, self.low, self.high)


@dataclass(frozen=True)
class Structure:
    """The nodes of one forest.

    Attributes:
        subtree_end: ``[N]`` int64.
        node_start: first token of each node, in packed order.
        node_end: ``subtree_end`` of each node.
        longest_path: largest number of tokens on a path, at most.
        above: keys from outside; the groups' keys then count from the first of them.
        kept: values that users of the forest derive from it alone, by key.
    """

    subtree_end: IntArray
    node_start: IntArray
    node_end: IntArray
    longest_path: int
    above: Above | None = None
    kept: dict[Hashable, Any] = field(default_factory=dict, repr=False)
    _groups: dict[tuple[int, int], tuple[Group, ...]] = field(default_factory=dict, repr=False)
    _columns: dict[tuple[int, int], tuple[tuple[Column, ...], tuple[Group, ...]]] = field(
        default_factory=dict, repr=False
    )

    @classmethod
    def from_ends(cls, subtree_end: IntArray, above: Above | None = None) -> "Structure":
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
        outside = 0 if above is None else above.count
        return cls(subtree_end, first, subtree_end[first], longest + outside, above)

    @property
    def outside(self) -> int:
        """Number of keys from outside."""
        return 0 if self.above is None else self.above.count

    @cached_property
    def _node_stop(self) -> IntArray:
        return np.append(self.node_start[1:], len(self.subtree_end))

    @cached_property
    def _internal(self) -> IntArray:
        """The nodes with children: no other can lie above another one."""
        return np.flatnonzero(self.node_end > self._node_stop)

    def path(self, start: int) -> tuple[IntArray, IntArray]:
        """Return runs [first, stop) above a token, ``[R, 2]``, and subtree ends ``[R]``."""
        own = int(np.searchsorted(self.node_start, start, side="right")) - 1
        inner = self._internal[: np.searchsorted(self._internal, own)]
        nodes = inner[self.node_end[inner] > start]
        if self.node_start[own] < start:
            nodes = np.append(nodes, own)
        runs = np.stack([self.node_start[nodes], np.minimum(self._node_stop[nodes], start)], axis=1)
        return runs, self.node_end[nodes]

    def groups(self, min_rows: int, max_rows: int) -> tuple[Group, ...]:
        """Cut the tokens into groups of queries.

        A node of at least ``min_rows`` tokens stands alone, smaller neighbours are merged until they have
        that many; nothing exceeds ``max_rows``.
        """
        found = self._groups.get((min_rows, max_rows))
        if found is None:
            cuts = self._cuts(min_rows, max_rows)
            found = tuple(self.group(start, stop) for start, stop in zip(cuts[:-1], cuts[1:], strict=True))
            self._groups[min_rows, max_rows] = found
        return found

    def group(self, start: int, stop: int) -> Group:
        """Return the queries [start, stop) as a group."""
        return Group(self, start, stop, bool((self.subtree_end[start : stop - 1] >= stop).all()))

    def columns(self, min_rows: int, min_keys: int) -> tuple[tuple[Column, ...], tuple[Group, ...]]:
        """Return columns of at least ``min_keys`` keys, and the groups without these keys."""
        found = self._columns.get((min_rows, min_keys))
        if found is None:
            groups = self.groups(min_rows, len(self.subtree_end))
            found = self._columns[min_rows, min_keys] = _split_columns(groups, self._common(groups), min_keys)
        return found

    def _cuts(self, min_rows: int, max_rows: int) -> list[int]:
        cuts = [0]
        for start, stop in zip(self.node_start.tolist(), self._node_stop.tolist(), strict=True):
            # The pending group [cuts[-1], start) closes before a big node and once it is big itself.
            if start > cuts[-1] and (stop - start >= min_rows or start - cuts[-1] >= min_rows):
                cuts.append(start)
            while stop - cuts[-1] > max_rows:
                cuts.append(cuts[-1] + max_rows)
        if cuts[-1] < len(self.subtree_end):
            cuts.append(len(self.subtree_end))
        return cuts

    def _common(self, groups: Sequence[Group]) -> IntArray:
        """Return how many keys each group shares with the next."""
        nodes = list(zip(self.node_start.tolist(), self._node_stop.tolist(), self.node_end.tolist(), strict=True))
        # The nodes above the group at hand, outermost first: minus their ends (ascending), tokens up to each.
        minus_ends: list[int] = []
        tokens, common, pushed = [0], [], 0

        def close(before: int) -> None:
            while minus_ends and -minus_ends[-1] <= before:
                minus_ends.pop()
                tokens.pop()

        for group, after in zip(groups[:-1], groups[1:], strict=True):
            while pushed < len(nodes) and nodes[pushed][0] < group.start:
                start, stop, end = nodes[pushed]
                close(start)
                minus_ends.append(-end)
                tokens.append(tokens[-1] + stop - start)
                pushed += 1
            close(group.start)
            found = bisect_right(minus_ends, -after.stop)
            beyond = max(0, nodes[pushed - 1][1] - group.start) if pushed and found == len(minus_ends) else 0
            common.append(tokens[found] - beyond)
        return np.array(common, dtype=np.int64)


def _split_columns(
    groups: tuple[Group, ...], common: IntArray, min_keys: int
) -> tuple[tuple[Column, ...], tuple[Group, ...]]:
    """Give runs of groups one call for the leading keys that they share.

    The shared keys of neighbouring groups are prefixes of two paths, so their common keys are a common
    prefix; runs are the intervals of the array of those prefixes' lengths, as in a suffix array.
    """
    taken, columns = np.zeros(len(groups), dtype=np.int64), []
    runs = [(0, len(groups), 0)]
    while runs:
        first, last, done = runs.pop()
        if last - first < 2:
            continue
        within = common[first : last - 1]
        length = int(within.min())
        if length - done >= min_keys:
            columns.append(Column(groups[first], groups[last - 1].stop, done, length))
            taken[first:last] = length
            done = length
        cuts = (first + 1 + np.flatnonzero(within == length)).tolist()
        runs += [(a, b, done) for a, b in zip([first, *cuts], [*cuts, last], strict=True)]
    rest = [replace(group, taken=count) for group, count in zip(groups, taken.tolist(), strict=True)]
    return tuple(columns), tuple(rest)


def _sliced(ranges: Ranges, first: int, last: int) -> Ranges:
    """Return the tokens number [first, last) of the ranges."""
    offsets = np.cumsum(ranges[:, 1] - ranges[:, 0]) - ranges[:, 1]  # number of a token minus the token
    low, high = np.maximum(ranges[:, 0], first - offsets), np.minimum(ranges[:, 1], last - offsets)
    return np.stack([low, high], axis=1)[low < high]


def count_tokens(ranges: Ranges) -> int:
    """Return the number of tokens in the ranges."""
    return int((ranges[:, 1] - ranges[:, 0]).sum())


def joined(*parts: Ranges) -> Ranges:
    """Return the ranges of all parts, in order; of two that touch, one is made."""
    return _merged(np.concatenate(parts))


def _merged(runs: IntArray) -> Ranges:
    apart = np.append(True, runs[1:, 0] != runs[:-1, 1])[: len(runs)]
    last = np.append(apart[1:], True)[: len(runs)]
    return np.stack([runs[apart, 0], runs[last, 1]], axis=1)


def ranges_of(indices: IntArray) -> Ranges:
    """Return indices as ranges."""
    return _merged(np.stack([indices, indices + 1], axis=1))


def indices_of(ranges: Ranges) -> IntArray:
    """Return the tokens of the ranges in order."""
    counts = ranges[:, 1] - ranges[:, 0]
    return np.repeat(ranges[:, 1] - np.cumsum(counts), counts) + np.arange(counts.sum())


_recent: list[tuple[tuple[Tensor, ...], Structure]] = []
_lock = Lock()


def find_structure(subtree_end: Tensor, *boundary: Tensor) -> Structure:
    """Return the structure of a forest; layers, forward and backward of one step share it.

    A hit is verified by content, so a tensor that was overwritten in place is never mistaken for the old one.

    Args:
        subtree_end: int ``[N]``.
        boundary: int ``[P]`` each, ``lo`` and ``hi`` of keys from outside.
    """
    given = (subtree_end, *boundary)
    with _lock:  # backward runs in separate threads
        for position, (known, structure) in enumerate(_recent):
            if len(known) == len(given) and all(map(_same, known, given)):
                _recent.insert(0, _recent.pop(position))
                return structure
        stored = tuple(x.clone() for x in given)
        ends, *outside = (x.numpy().astype(np.int64) for x in stored)
        structure = Structure.from_ends(ends, Above.of(*outside) if outside else None)
        _recent.insert(0, (stored, structure))
        del _recent[_CACHED_FORESTS:]
    return structure


def _same(known: Tensor, given: Tensor) -> bool:
    return known.dtype == given.dtype and torch.equal(known, given)


def forget_structures() -> None:
    """Drop caches of forests, so that masks of tiles take no memory while others run."""
    with _lock:
        for _, structure in _recent:
            structure.kept.clear()  # groups refer to their structure, which only the garbage collector would find
        _recent.clear()
