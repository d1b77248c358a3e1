"""Number the prefixes of rows: equal prefixes get equal numbers in every batch."""

from collections.abc import Callable, Sequence
from functools import cached_property

import numpy as np
import numpy.typing as npt

from treefx.forests.trie import combine_keys

__all__ = ["Codes", "Prefixes", "number_prefixes"]

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
