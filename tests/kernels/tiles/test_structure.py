"""The forest as intervals: groups and columns of keys against their definitions, and what big forests cost."""

import tracemalloc
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from treefx.kernels.tiles.structure import Group, Structure, indices_of, joined, ranges_of

IntArray = npt.NDArray[np.int64]


@st.composite
def forest_ends(draw: st.DrawFn) -> IntArray:
    """Draw ``subtree_end`` of a forest: each token hangs below a token on the path of the one before."""
    parents: list[int] = []
    path: list[int] = []
    for climb in draw(st.lists(st.sampled_from([0, 0, 0, 1, 2, 9]), min_size=1, max_size=60)):
        path = path[: max(0, len(path) - climb)]
        parents.append(path[-1] if path else -1)
        path.append(len(parents) - 1)
    return ends_from(np.array(parents))


def ends_from(parents: IntArray) -> IntArray:
    ends = np.arange(1, len(parents) + 1)
    for token in reversed(range(len(parents))):
        if parents[token] >= 0:
            ends[parents[token]] = max(ends[parents[token]], ends[token])
    return ends


def visible(ends: IntArray) -> npt.NDArray[np.bool_]:
    index = np.arange(len(ends))
    seen: npt.NDArray[np.bool_] = (index[None] <= index[:, None]) & (index[:, None] < ends[None])
    return seen


def assert_group(group: Group, seen: npt.NDArray[np.bool_]) -> None:
    before = seen[group.start : group.stop, : group.start]
    assert indices_of(group.shared).tolist() == np.flatnonzero(before.all(axis=0))[group.taken :].tolist()
    assert indices_of(group.partial).tolist() == np.flatnonzero(before.any(axis=0) & ~before.all(axis=0)).tolist()
    own = seen[group.start : group.stop, group.start : group.stop]
    assert group.causal == bool((own == np.tri(len(own), dtype=bool)).all())


@given(forest_ends(), st.integers(1, 9), st.integers(0, 20))
@settings(max_examples=80, deadline=None, derandomize=True)
def test_groups_hold_their_keys(ends: IntArray, min_rows: int, more: int) -> None:
    seen = visible(ends)
    groups = Structure.from_ends(ends).groups(min_rows, min_rows + more)
    assert [group.start for group in groups] == [0, *[group.stop for group in groups[:-1]]]
    assert groups[-1].stop == len(ends)
    for group in groups:
        assert group.stop - group.start <= min_rows + more
        assert_group(group, seen)


@given(forest_ends(), st.integers(1, 9), st.integers(1, 6))
@settings(max_examples=80, deadline=None, derandomize=True)
def test_columns_and_groups_hold_every_shared_key_once(ends: IntArray, min_rows: int, min_keys: int) -> None:
    columns, groups = Structure.from_ends(ends).columns(min_rows, min_keys)
    seen = visible(ends)
    counted = np.zeros(seen.shape, dtype=int)
    for group in groups:
        assert_group(group, seen)
        counted[group.start : group.stop, indices_of(group.shared)] += 1
    for column in columns:
        keys = indices_of(column.keys)
        assert len(keys) >= min_keys
        counted[column.start : column.stop, keys] += 1
    for group in groups:
        rows = slice(group.start, group.stop)
        whole = seen[rows, : group.start].all(axis=0)
        assert (counted[rows, : group.start] == whole).all() and not counted[rows, group.start :].any()


def test_longest_path_and_ranges(ends_of: Callable[[list[int]], Tensor]) -> None:
    structure = Structure.from_ends(ends_of([-1, 0, 1, 0, 3, 4, -1]).numpy().astype(np.int64))
    assert structure.longest_path == 4
    ranges = ranges_of(np.array([2, 3, 7, 8, 9]))
    assert ranges.tolist() == [[2, 4], [7, 10]] and indices_of(ranges).tolist() == [2, 3, 7, 8, 9]
    assert joined(ranges[:1], np.array([[4, 6]]), ranges[1:]).tolist() == [[2, 6], [7, 10]]


def comb(teeth: int, length: int) -> IntArray:
    """Return a spine of ``teeth`` turns with a branch at each, all nodes ``length`` tokens."""
    tokens = 2 * teeth * length
    ends = np.full(tokens, tokens)
    for tooth in range(teeth):
        first = (2 * tooth + 1) * length
        ends[first : first + length] = first + length
    return ends


FORESTS = {
    "2000 turns with branches": (comb(2000, 64), 64, 2000),
    "2000 nested prefixes": (np.full(2000, 2000), 1, 0),
    "10000 one-token leaves": (np.append(np.full(512, 10_512), np.arange(513, 10_513)), 90, 1),
    "100000 tokens, 2 leaves": (np.repeat([101_000, 100_500, 101_000], [100_000, 500, 500]), 3, 1),
}


@pytest.mark.parametrize(("ends", "most_groups", "most_columns"), FORESTS.values(), ids=FORESTS.keys())
def test_big_forests_take_memory_by_tokens(ends: IntArray, most_groups: int, most_columns: int) -> None:
    tracemalloc.start()
    structure = Structure.from_ends(ends)
    columns, groups = structure.columns(128, 256)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(columns) <= most_columns
    assert len(groups) <= max(most_groups, len(ends) // 128 + 1)
    # A range for every pair of a group and a node above it would be 4 million ranges in the first forest.
    assert peak < 100 * len(ends) + 4_000_000
    assert sum(len(group.shared) for group in groups) + sum(len(column.keys) for column in columns) <= 8 * len(groups)
