"""The vectorised trie against its definition."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.strategies import Rows, SlowTrie, row_batches
from treefx.errors import InputError
from treefx.forests.trie import Trie, build_trie, combine_keys

many = settings(max_examples=200)


def as_arrays(rows: Rows) -> list[np.ndarray]:
    return [np.array(row, dtype=np.int64) for row in rows]


def prefixes_of(trie: Trie, rows: Rows) -> list[tuple[int, ...]]:
    """The prefix that every packed token stands for."""
    return [tuple(rows[row][: index + 1]) for row, index in zip(trie.row, trie.index, strict=True)]


@many
@given(row_batches())
def test_tokens_are_the_distinct_prefixes(rows: Rows) -> None:
    trie, slow = build_trie(as_arrays(rows)), SlowTrie(rows)
    prefixes = prefixes_of(trie, rows)
    assert len(set(prefixes)) == len(prefixes)
    assert set(prefixes) == set(slow.through)
    assert trie.multiplicity.tolist() == [len(slow.through[prefix]) for prefix in prefixes]


@many
@given(row_batches())
def test_intervals_are_the_ancestor_relation(rows: Rows) -> None:
    trie = build_trie(as_arrays(rows))
    prefixes = prefixes_of(trie, rows)
    for q, query in enumerate(prefixes):
        for k, key in enumerate(prefixes):
            assert (k <= q < trie.subtree_end[k]) == (query[: len(key)] == key)


@many
@given(row_batches())
def test_parent_is_the_prefix_without_its_last_token(rows: Rows) -> None:
    trie = build_trie(as_arrays(rows))
    prefixes = prefixes_of(trie, rows)
    for prefix, parent in zip(prefixes, trie.parent, strict=True):
        assert (parent == -1) if len(prefix) == 1 else (prefixes[parent] == prefix[:-1])


@many
@given(row_batches())
def test_token_of_maps_every_raw_token_to_its_prefix(rows: Rows) -> None:
    trie = build_trie(as_arrays(rows))
    prefixes, token_of = prefixes_of(trie, rows), trie.token_of
    assert token_of.shape == (len(rows), max(map(len, rows)))
    for number, row in enumerate(rows):
        assert [prefixes[k] for k in token_of[number, : len(row)]] == [tuple(row[: i + 1]) for i in range(len(row))]
        assert (token_of[number, len(row) :] == -1).all()


@many
@given(row_batches())
def test_rows_through_a_token_are_contiguous_in_row_order(rows: Rows) -> None:
    trie, slow = build_trie(as_arrays(rows)), SlowTrie(rows)
    order = trie.row_order.tolist()
    for prefix, row, count in zip(prefixes_of(trie, rows), trie.row.tolist(), trie.multiplicity, strict=True):
        first = order.index(row)
        assert sorted(order[first : first + count]) == slow.through[prefix]


def test_rows_are_sorted_as_signed_integers() -> None:
    keys = np.array([[3, 0], [-(2**63), 0], [-1, 0], [2**63 - 1, 0], [256, 0], [255, 0], [0, 0]])
    trie = build_trie(keys)
    assert keys[trie.row_order, 0].tolist() == sorted(keys[:, 0].tolist())
    assert trie.num_tokens == 14


def test_lengths_cut_rows_and_may_be_zero() -> None:
    keys = np.array([[1, 2, 9], [1, 2, 8], [5, 5, 5]])
    trie = build_trie(keys, np.array([2, 3, 0]))
    assert trie.num_tokens == 3
    assert trie.token_of.tolist() == [[0, 1, -1], [0, 1, 2], [-1, -1, -1]]


def test_no_tokens_at_all() -> None:
    trie = build_trie(np.zeros((2, 4), dtype=np.int64), np.array([0, 0]))
    assert trie.num_tokens == 0
    assert (trie.token_of == -1).all() and trie.token_of.shape == (2, 4)
    assert build_trie([]).num_tokens == 0


def test_two_thousand_nested_prefixes() -> None:
    trie = build_trie([np.arange(length) for length in range(2000, 0, -1)])
    assert trie.num_tokens == 2000
    assert trie.multiplicity.tolist() == list(range(2000, 0, -1))
    assert (trie.subtree_end == 2000).all()


@pytest.mark.parametrize(
    ("keys", "lengths", "words"),
    [
        (np.zeros((2, 3)), None, "integer keys"),
        (np.zeros(3, dtype=np.int64), None, r"\[R, L\]"),
        (np.zeros((2, 3), dtype=np.int64), np.array([1]), "one length"),
        (np.zeros((2, 3), dtype=np.int64), np.array([1, 4]), "one length"),
        (np.zeros((2, 3), dtype=np.int64), np.array([1, -1]), "one length"),
    ],
)
def test_unfit_keys_are_refused(keys: np.ndarray, lengths: np.ndarray | None, words: str) -> None:
    with pytest.raises(InputError, match=words):
        build_trie(keys, lengths)


def equal_pairs(codes: np.ndarray) -> np.ndarray:
    flat = codes.reshape(-1)
    return flat[:, None] == flat[None, :]


wide = st.sampled_from([0, 1, -1, 2**63 - 1, -(2**63), 2**62, 12345])


@many
@given(st.lists(st.tuples(wide, wide, wide), min_size=1, max_size=12))
def test_codes_are_equal_exactly_where_all_columns_are(cells: list[tuple[int, int, int]]) -> None:
    columns = [np.array(column, dtype=np.int64)[None] for column in zip(*cells, strict=True)]
    expected = np.array([[left == right for right in cells] for left in cells])
    assert (equal_pairs(combine_keys(columns)) == expected).all()


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_floats_are_compared_bit_by_bit(dtype: type) -> None:
    values = np.array([[0.0, -0.0, np.nan, np.nan, 1.0, np.nextafter(dtype(1), dtype(2)), 1.0]], dtype=dtype)
    code = combine_keys([values, np.zeros_like(values, dtype=bool)])[0]
    assert code[0] != code[1] and code[2] == code[3]
    assert code[4] != code[5] and code[4] == code[6]


def test_narrow_columns_and_broadcasting() -> None:
    ids = np.array([[1, 2], [1, 3]])
    code = combine_keys([ids, np.array([[True], [False]]), np.arange(2, dtype=np.uint8)[None]])
    assert code.shape == (2, 2) and len(np.unique(code)) == 4
    assert (combine_keys([ids]) == ids).all()
    assert combine_keys([ids[:, :0], ids[:, :0]]).shape == (2, 0)


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ([], "at least one"),
        ([np.zeros((1, 2), dtype=complex)], "got complex"),
        ([np.zeros((1, 2), dtype=int), np.zeros((1, 3), dtype=int)], "one shape"),
    ],
)
def test_unfit_columns_are_refused(columns: list[np.ndarray], words: str) -> None:
    with pytest.raises(InputError, match=words):
        combine_keys(columns)
