"""Describe a forest without tokens: row lengths and shared prefixes, depth first.

This determines the cost of any set of rows, so every process that knows the lengths and the hashes of all rows finds
the same assignment.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from treefx.arguments import check_whole
from treefx.errors import InputError
from treefx.forests.forest import Forest
from treefx.forests.input import read_sequences
from treefx.forests.trie import build_trie

__all__ = ["CHUNK", "IntArray", "Outline", "fingerprint"]

IntArray = npt.NDArray[np.int64]

CHUNK = 16
"""Tokens per hash of a fingerprint: shared prefixes are found in multiples of it."""


@dataclass(frozen=True, eq=False)
class Outline:
    """Hold the R rows of a forest in depth-first order.

    Attributes:
        length: int64 [R], tokens of every row.
        shared: int64 [R], tokens it has in common with the row before it; 0 where a tree begins.
        row: int64 [R], its number in the caller's order.
    """

    length: IntArray
    shared: IntArray
    row: IntArray

    def __len__(self) -> int:
        return len(self.length)

    @property
    def tokens(self) -> int:
        """Distinct tokens of all rows."""
        return int((self.length - self.shared).sum())

    @classmethod
    def of_forest(cls, forest: Forest) -> "Outline":
        """Make the outline of a forest, in its packed order."""
        order = forest.row_order.cpu().numpy()
        length = forest.row_lengths.cpu().numpy()[order]
        added = np.bincount(forest.first_rank.cpu().numpy(), minlength=len(order))
        return cls(length, length - added, order)

    @classmethod
    def of_fingerprints(cls, lengths: Sequence[int], fingerprints: Sequence[IntArray], chunk: int = CHUNK) -> "Outline":
        """Make the outline of rows with known lengths and hashes, in the order of the hashes.

        Args:
            lengths: tokens of every row.
            fingerprints: result of `fingerprint` for each row, int64 [ceil(T / chunk)].
            chunk: tokens per hash.

        Raises:
            InputError: a fingerprint does not fit its row's length.
        """
        for row, (length, marks) in enumerate(zip(lengths, fingerprints, strict=True)):
            if length < 1 or len(marks) != -(-length // chunk):
                raise InputError(
                    f"row {row} of {length} tokens should have a hash per {chunk} tokens, {-(-length // chunk)}, got "
                    f"{len(marks)}; make them with treefx.scale.fingerprint(tokens, {chunk})"
                )
        trie = build_trie(list(fingerprints))
        sizes = np.asarray(lengths, dtype=np.int64)[trie.row_order]
        rank = np.empty_like(trie.row_order)
        rank[trie.row_order] = np.arange(len(rank))
        added = np.bincount(rank[trie.row], minlength=len(rank))
        marks = np.array([len(fingerprints[row]) for row in trie.row_order.tolist()], dtype=np.int64)
        return cls(sizes, np.minimum((marks - added) * chunk, sizes), trie.row_order)


def fingerprint(tokens: Any, chunk: int = CHUNK) -> IntArray:
    """Hash a row's prefixes: its first `chunk` tokens, its first 2 * `chunk`, ..., the whole.

    Two rows agree in a hash where they agree up to there, and else with probability 2**-64 (BLAKE2b).

    Args:
        tokens: ids, a list, tensor or array [T].
        chunk: tokens per hash.

    Returns:
        int64 [ceil(T / chunk)].

    Raises:
        ForestError: not a row of token ids.
    """
    check_whole(chunk, "chunk", least=1)
    (row,) = read_sequences([tokens], None).rows
    running, marks = hashlib.blake2b(digest_size=8), []
    for start in range(0, len(row), chunk):
        running.update(row[start : start + chunk].astype("<i8").tobytes())
        marks.append(int.from_bytes(running.digest(), "little", signed=True))
    return np.array(marks, dtype=np.int64)
