"""The prefix trie of a batch of rows, vectorised.

Rows are sorted lexicographically; the longest common prefix (LCP) of neighbours says where each row leaves
its predecessor, so the tokens a row adds are one slice and the packed order (depth-first, pre-order) is their
concatenation. This is the suffix-array construction of a trie (Kasai et al. 2001 for the role of the LCP
array), on whole rows instead of suffixes. Work is linear in the raw tokens; loops run over rows, never over
tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from treefx.errors import InputError

__all__ = ["Codes", "Prefixes", "Trie", "build_trie", "combine_keys", "number_prefixes"]

IntArray = npt.NDArray[np.int64]
_CODE_LIMIT = 2**63


@dataclass(frozen=True, slots=True)
class Trie:
    """The distinct tokens of R rows in packed order (depth-first, pre-order).

    Attributes:
        row: int64 [N], the lexicographically first row through the token.
        index: int64 [N], the token's index within that row, which is its depth.
        parent: int64 [N], packed index of the previous token on the path; -1 at roots.
        subtree_end: int32 [N], exclusive end of the token's subtree: q sees k iff `k <= q < subtree_end[k]`.
        multiplicity: int64 [N], number of rows through the token.
        row_order: int64 [R], rows in lexicographic order. Those through one token are contiguous here.
        flat_token_of: int64 [raw], packed index of every raw token, row after row in the caller's order.
        row_offsets: int64 [R + 1], row r owns `flat_token_of[row_offsets[r]:row_offsets[r + 1]]`.
        width: columns of `token_of`, at least the longest row's length.
    """

    row: IntArray
    index: IntArray
    parent: IntArray
    subtree_end: npt.NDArray[np.int32]
    multiplicity: IntArray
    row_order: IntArray
    flat_token_of: IntArray
    row_offsets: IntArray
    width: int

    @property
    def num_tokens(self) -> int:
        """Number N of distinct tokens."""
        return len(self.row)

    @property
    def token_of(self) -> IntArray:
        """int64 [R, width]: packed index of row r's i-th token, -1 beyond the row's end."""
        lengths = np.diff(self.row_offsets)
        if (lengths == self.width).all():
            return self.flat_token_of.reshape(len(lengths), self.width)
        padded = np.full((len(lengths), self.width), -1, dtype=np.int64)
        padded[np.arange(self.width) < lengths[:, None]] = self.flat_token_of
        return padded


def build_trie(keys: Sequence[IntArray] | IntArray, lengths: IntArray | None = None) -> Trie:
    """Build the trie of rows of integer keys.

    Two tokens are one iff their rows agree up to and including them.

    Args:
        keys: int64 [R, L], or R one-dimensional int64 arrays.
        lengths: [R], number of leading keys of each row that count; all of them when None. Zero is allowed.

    Returns:
        The trie; empty where no row has a token.

    Raises:
        InputError: a key array is not of integers, or `lengths` does not fit `keys`.
    """
    rows, width = _as_rows(keys, lengths)
    order, shared = _sort_rows(rows)
    sizes = np.array([len(row) for row in rows], dtype=np.int64)
    offsets = np.concatenate(([0], np.cumsum(sizes)))
    added = sizes[order] - shared
    first = np.concatenate(([0], np.cumsum(added)))
    num_tokens = int(first[-1])
    flat = _pack_rows(order, shared, first, offsets)
    steps = np.arange(num_tokens, dtype=np.int64)
    return Trie(
        row=np.repeat(order, added),
        index=steps + np.repeat(shared - first[:-1], added),
        parent=_find_parents(order, shared, added, first, flat, offsets),
        subtree_end=_find_subtree_ends(sizes[order], shared, first),
        multiplicity=np.bincount(flat, minlength=num_tokens),
        row_order=order,
        flat_token_of=flat,
        row_offsets=offsets,
        width=width,
    )


def combine_keys(columns: Sequence[npt.NDArray[np.generic]]) -> IntArray:
    """Give every position one int64 code, equal exactly where all columns are equal.

    Floats are compared bit by bit, so 0.0 and -0.0 differ and a NaN equals itself. Columns are combined as
    digits of a mixed-radix number over their value ranges; only where that would overflow are values
    renumbered by `np.unique`, which costs a sort.

    Args:
        columns: arrays of integers, bools or floats, all of one shape [R, L] or broadcastable to it.

    Returns:
        int64 [R, L].

    Raises:
        InputError: no column, a dtype without an exact integer code, or shapes that do not broadcast.
    """
    if not columns:
        raise InputError("combine_keys expected at least one column, got none; pass the tensors that tell tokens apart")
    try:
        arrays = np.broadcast_arrays(*[_as_integers(column) for column in columns])
    except ValueError as error:
        shapes = [column.shape for column in columns]
        raise InputError(f"combine_keys expected columns of one shape [R, L], got {shapes}") from error
    if len(arrays) == 1:
        return np.ascontiguousarray(arrays[0])
    code, span = _shift_to_zero(arrays[0])
    for column in arrays[1:]:
        digit, radix = _shift_to_zero(column)
        if span * radix > _CODE_LIMIT:
            (code, span), (digit, radix) = _renumber(code), _renumber(digit)
        code, span = code * radix + digit, span * radix
    return code


def _shift_to_zero(values: IntArray) -> tuple[IntArray, int]:
    """Shift values into [0, span); renumber them where their range alone overflows a code."""
    low, high = (int(values.min()), int(values.max())) if values.size else (0, 0)
    if high - low >= _CODE_LIMIT:
        return _renumber(values)
    return values - low, high - low + 1


def _renumber(values: IntArray) -> tuple[IntArray, int]:
    """Replace values by their ranks among the distinct ones."""
    distinct, rank = np.unique(values, return_inverse=True)
    return rank.reshape(values.shape).astype(np.int64), len(distinct)


def _as_integers(column: npt.NDArray[np.generic]) -> IntArray:
    """Map a column to int64 one to one."""
    kind = column.dtype.kind
    if kind == "f" and column.dtype.itemsize <= 8:
        bits = np.ascontiguousarray(column).view(f"i{column.dtype.itemsize}")
        return bits.astype(np.int64)
    if kind in "biu":
        return column.astype(np.int64)
    raise InputError(f"combine_keys expected integers, bools or floats of at most 64 bits, got {column.dtype}")


def _as_rows(keys: Sequence[IntArray] | IntArray, lengths: IntArray | None) -> tuple[list[IntArray], int]:
    """Cut the keys into one contiguous int64 array per row; also the width of the padded form."""
    if isinstance(keys, np.ndarray) and keys.ndim != 2:
        raise InputError(f"build_trie expected keys [R, L], got an array of shape {keys.shape}")
    kinds = {keys.dtype.kind} if isinstance(keys, np.ndarray) else {np.asarray(row).dtype.kind for row in keys}
    if kinds - {"i", "u"}:
        raise InputError("build_trie expected integer keys; combine other columns with combine_keys first")
    rows = [np.ascontiguousarray(row, dtype=np.int64) for row in keys]
    width = max(map(len, rows), default=0)
    if isinstance(keys, np.ndarray):
        width = keys.shape[1]
    if lengths is None:
        return rows, width
    fits = len(lengths) == len(rows) and all([0 <= n <= len(row) for n, row in zip(lengths, rows, strict=True)])
    if not fits:
        raise InputError(f"build_trie expected one length in [0, L] for each of {len(rows)} rows, got {lengths}")
    return [row[:length] for row, length in zip(rows, lengths, strict=True)], width


def _sort_rows(rows: list[IntArray]) -> tuple[IntArray, IntArray]:
    """Sort rows lexicographically, and return the LCP of each row with its predecessor.

    The LCP of the first row is 0.
    """
    shared = np.zeros(len(rows), dtype=np.int64)
    heads = np.array([row[0] for row in rows if len(row)], dtype=np.int64)
    if len(np.unique(heads)) == len(rows):
        return heads.argsort(), shared
    sign = np.int64(-(2**63))
    # Big-endian with the sign bit flipped: comparing bytes then compares integers, and a prefix comes first.
    encoded = [(row ^ sign).astype(">i8").tobytes() for row in rows]
    order = sorted(range(len(rows)), key=encoded.__getitem__)
    for position in range(1, len(rows)):
        shared[position] = _common_prefix(rows[order[position - 1]], rows[order[position]])
    return np.array(order, dtype=np.int64), shared


def _common_prefix(left: IntArray, right: IntArray) -> int:
    """Length of the longest common prefix of two rows."""
    size = min(len(left), len(right))
    differs = left[:size] != right[:size]
    at = int(differs.argmax()) if size else 0
    return at if size and differs[at] else size


def _pack_rows(order: IntArray, shared: IntArray, first: IntArray, offsets: IntArray) -> IntArray:
    """Return the packed index of every raw token.

    A shared prefix copies the predecessor's indices; the rest is a new run.
    """
    sizes, moved = np.diff(offsets), np.empty(len(order), dtype=np.int64)
    moved[order] = first[:-1] - shared - offsets[order]
    flat = np.arange(int(offsets[-1]), dtype=np.int64) + np.repeat(moved, sizes)
    for position in np.flatnonzero(shared):
        start, before, cut = offsets[order[position]], offsets[order[position - 1]], shared[position]
        flat[start : start + cut] = flat[before : before + cut]
    return flat


def _find_parents(
    order: IntArray, shared: IntArray, added: IntArray, first: IntArray, flat: IntArray, offsets: IntArray
) -> IntArray:
    """Parent of every token: the one before it, except where a row leaves its predecessor."""
    parent = np.arange(-1, int(first[-1]) - 1, dtype=np.int64)
    leaves = np.nonzero(added)[0]
    inner = leaves[shared[leaves] > 0]
    parent[first[leaves]] = -1
    parent[first[inner]] = flat[offsets[order[inner]] + shared[inner] - 1]
    return parent


def _find_subtree_ends(sizes: IntArray, shared: IntArray, first: IntArray) -> npt.NDArray[np.int32]:
    """Sweep sorted rows that share, from last to first, for the ends of subtrees.

    `end_at[d]` is the end of the path's token at depth d.
    """
    ends = np.repeat(first[1:], np.diff(first)).astype(np.int32)
    forks = shared > 0
    end_at = np.empty(int(sizes.max(initial=0)), dtype=np.int32)
    for position in np.flatnonzero(forks | np.append(forks[1:], False))[::-1]:
        if position == len(sizes) - 1 or not forks[position + 1]:
            end_at[:] = first[position + 1]
        ends[first[position] : first[position + 1]] = end_at[shared[position] : sizes[position]]
        if position:
            # Below the fork the previous row's path is closed by this row's first new token.
            end_at[shared[position] : sizes[position - 1]] = first[position]
    return ends


Codes = npt.NDArray[np.uint64]


class Prefixes:
    """Hold numbers of the prefixes of some tokens, computed on first use.

    Most calls never use them.

    Args:
        count: How many there are.
        compute: Numbers them, see `number_prefixes`.
    """

    def __init__(self, count: int, compute: Callable[[], Codes]) -> None:
        self._count, self._compute = count, compute

    def __len__(self) -> int:
        return self._count

    @cached_property
    def numbers(self) -> Codes:
        """uint64 [tokens]."""
        numbers = self._compute()
        self._compute = lambda: numbers  # free the inputs, which may be large
        return numbers


def number_prefixes(columns: Sequence[npt.NDArray[np.generic]], places: npt.NDArray[np.int64] | None = None) -> Codes:
    """A 64-bit number for the prefix of every row that ends at a position.

    The sum of hashes of (place, values at it): two of n prefixes get one number with probability n^2 / 2^65.

    Args:
        columns: [R, L] each, as for `combine_keys`: the keys that distinguish tokens, in the order of the tokens.
        places: [R, L], where the tokens stand; their index in the row when None.

    Returns:
        uint64 [R, L].
    """
    shape = np.broadcast_shapes(*[column.shape for column in columns])
    places = np.arange(shape[1])[None] if places is None else places
    codes = np.zeros(shape, dtype=np.uint64)
    for column in [places, *columns]:
        codes = _scramble(codes ^ combine_keys([column]).astype(np.uint64))
    return np.cumsum(codes, axis=1, dtype=np.uint64)


def _scramble(values: Codes) -> Codes:
    """The finaliser of splitmix64 (Steele, Lea and Flood 2014), one to one."""
    mixed = values + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))
