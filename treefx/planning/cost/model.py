"""Model the cost of a part: bytes while it runs and waits, and seconds.

The planner knows a model only by this.

All byte figures are polynomials in the size of a part, so that the planner can evaluate them for all candidates at
once; a peak is the largest of several.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from treefx.arguments import check_number
from treefx.documents import Field
from treefx.errors import InputError
from treefx.forests.forest import Forest
from treefx.planning.cost.states import StateCost

__all__ = [
    "LOGITS_ROWS",
    "MONOMIALS",
    "Bytes",
    "CostModel",
    "Seconds",
    "Size",
    "coefficients",
    "flash_block",
    "sum_rows",
]

FloatArray = npt.NDArray[np.float64]
_HOST = "host_bytes_per_second"

LOGITS_ROWS = 512
"""Rows of logits that `edge_logprobs` has in float32 at a time."""

MONOMIALS = ("1", "N", "P", "E", "N*N", "N*P", f"min(N, {LOGITS_ROWS})", "block(N, P)")
"""Monomials of the coefficients of a row of `Bytes`.

N tokens, P boundary tokens, E edges, `flash_block`.
"""


def coefficients(**known: float) -> list[float]:
    """Make a row of `Bytes` with the given coefficients.

    Names are `constant`, `tokens`, `boundary`, `logits_rows`, `block`.
    """
    places = {"constant": 0, "tokens": 1, "boundary": 2, "logits_rows": 6, "block": 7}
    row = [0.0] * len(MONOMIALS)
    for name, value in known.items():
        row[places[name]] = value
    return row


def sum_rows(*rows: Sequence[float]) -> list[float]:
    """Rows of coefficients added up; short ones end in zeros."""
    return [sum(row[place] for row in rows if place < len(row)) for place in range(len(MONOMIALS))]


def flash_block(tokens: int, boundary: int) -> int:
    """Pairs in a block of ATen's flash attention on the CPU, of which each thread has one.

    Never fewer for a larger part: blocks have 32, 64 or 256 queries, by the number of queries, and up to 512 keys
    (`FlashAttentionKernel.cpp`).
    """
    queries = 256 if tokens >= 768 else 64 if tokens >= 192 else min(tokens, 32)
    return queries * min(max(tokens, boundary), 512)


def _flash_blocks(tokens: FloatArray, boundary: FloatArray) -> FloatArray:
    """`flash_block` for many sizes."""
    queries = np.where(tokens >= 768, 256, np.where(tokens >= 192, 64, np.minimum(tokens, 32)))
    result: FloatArray = queries * np.minimum(np.maximum(tokens, boundary), 512)
    return result


class Size(NamedTuple):
    """How big a part is."""

    tokens: int
    """N: running tokens."""
    boundary: int
    """P: outside ancestors of these tokens, read as K/V."""
    edges: int
    """E: predictions with their source in the part."""
    outgoing: int
    """Q: own tokens with K/V that other parts read."""
    pairs: int
    """A: visible (query, key) pairs, the boundary's keys among them."""
    mask: int = 0
    """Elements of the masks that attention on the CPU takes for its forks; known of a finished plan alone."""
    entering: int = 0
    """States of recurrences that enter, one per token of the boundary that the part hangs on; likewise."""
    leaving: int = 0
    """Own tokens that parts below hang on, whose states leave; likewise."""
    chains: int = 0
    """Runs of tokens without a fork, but one; likewise."""


class Bytes:
    """The largest of several polynomials in (N, P, E), in bytes.

    Args:
        rows: one row of coefficients per polynomial, in the order of `MONOMIALS`, at its end zeros may be left out;
            none negative, so that a larger part never needs less.

    Raises:
        InputError: no row, a row that is longer, or a coefficient that is negative or not finite.
    """

    def __init__(self, rows: Sequence[Sequence[float]]) -> None:
        if not len(rows) or max(map(len, rows)) > len(MONOMIALS):
            raise InputError(f"Bytes expected rows of {len(MONOMIALS)} coefficients {MONOMIALS}, got {rows!r}")
        table = np.array([[*row, *[0.0] * (len(MONOMIALS) - len(row))] for row in rows], dtype=np.float64)
        if not (np.isfinite(table).all() and (table >= 0).all()):
            raise InputError(f"Bytes expected finite coefficients of at least 0, got {rows!r}")
        self.rows: tuple[tuple[float, ...], ...] = tuple(tuple(map(float, row)) for row in _undominated(table))
        self._columns = np.array(self.rows).T
        self._terms = [[(place, value) for place, value in enumerate(row) if value] for row in self.rows]
        self._has_blocks = any(row[-1] for row in self.rows)

    def __call__(self, tokens: int, boundary: int, edges: int) -> float:
        """Bytes for one size."""
        block = flash_block(tokens, boundary) if self._has_blocks else 0
        few = tokens if tokens < LOGITS_ROWS else LOGITS_ROWS
        values = (1, tokens, boundary, edges, tokens * tokens, tokens * boundary, few, block)
        most = 0.0
        # The planner calls this a hundred thousand times: plain loops over terms that are not 0.
        for terms in self._terms:
            total = 0.0
            for place, coefficient in terms:
                total += coefficient * values[place]
            if total > most:
                most = total
        return most

    def of(self, tokens: npt.ArrayLike, boundary: npt.ArrayLike, edges: npt.ArrayLike) -> FloatArray:
        """Bytes for many sizes, all [K]: float64 [K]."""
        n, p, e = (np.asarray(x, dtype=np.float64) for x in (tokens, boundary, edges))
        one, token, bound, edge, square, product, row, block = self._columns[:, :, None]
        linear = one + token * n + bound * p + edge * e + row * np.minimum(n, LOGITS_ROWS)
        if block.any():
            linear = linear + block * _flash_blocks(n, p)
        result: FloatArray = (linear + square * n * n + product * n * p).max(axis=0)
        return result

    @classmethod
    def read_field(cls, field: Field) -> "Bytes":
        """Read the rows of coefficients that a document has.

        Raises:
            InputError: it has something else.
        """
        try:
            return cls(field.read(list[list[float]]))
        except InputError as error:
            raise InputError(f"{field.document}, field {field.name}: {error}") from error

    def __repr__(self) -> str:
        return f"Bytes({[list(row) for row in self.rows]})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Bytes) and self.rows == other.rows

    def __hash__(self) -> int:
        return hash(self.rows)


class Seconds(NamedTuple):
    """Seconds of one run: `part + token * N + pair * A`."""

    part: float
    """Seconds of a part of any size: launches, gathering the boundary, the accumulation of gradients."""
    token: float
    pair: float

    def __call__(self, size: Size) -> float:
        """Seconds for a part of this size."""
        return self.part + self.token * size.tokens + self.pair * size.pairs

    def of(self, tokens: npt.ArrayLike, pairs: npt.ArrayLike) -> FloatArray:
        """Seconds for many sizes, all [K]: float64 [K]."""
        return self.part + self.token * np.asarray(tokens) + self.pair * np.asarray(pairs)


@dataclass(frozen=True, kw_only=True)
class CostModel:
    """Bytes and seconds of the parts of one model on one device.

    Bytes of a run are on top of `resident_bytes` and of bytes held by ancestor parts.

    Attributes:
        resident_bytes: bytes held throughout: parameters, buffers, gradients.
        saved: bytes held between the forward and the backward of a part, its copy of the boundary included.
        forward: peak of the forward, with the bytes it leaves.
        backward: peak of the backward, with the saved bytes it starts from.
        kv: peak of a run that only makes K/V.
        kv_bytes_per_token: K and V of all layers, as they are handed to other parts.
        kv_grad_bytes_per_token: the accumulators of their gradients.
        kv_tangent_bytes_per_token: these gradients once more in the dtype of K/V, for the backward; 0 where it is the
            accumulators' own.
        forward_seconds, backward_seconds, kv_seconds: times of the three runs.
        mask_element_bytes: of the masks that attention takes for forks; 0 where it takes none.
        states: of recurrences; None where there is none.
        forest_bytes_per_token, forest_bytes_per_raw_token: bytes of the whole forest and its edges on the device.
        host_bytes_per_second: bandwidth to host memory and back; None without offloading.
    """

    resident_bytes: float
    saved: Bytes
    forward: Bytes
    backward: Bytes
    kv: Bytes
    kv_bytes_per_token: float
    kv_grad_bytes_per_token: float
    forward_seconds: Seconds
    backward_seconds: Seconds
    kv_seconds: Seconds
    kv_tangent_bytes_per_token: float = 0.0
    mask_element_bytes: float = 0.0
    states: StateCost | None = None
    forest_bytes_per_token: float = 0.0
    forest_bytes_per_raw_token: float = 0.0
    host_bytes_per_second: float | None = None

    def __post_init__(self) -> None:
        """Refuse figures from which no plan can be made.

        Raises:
            InputError: a figure is negative, NaN or infinite.
        """
        for name, value in vars(self).items():
            for number in _numbers(value):
                check_number(number, name, "finite and at least 0", least=0, infinite=name == _HOST)
        if self.host_bytes_per_second == 0:
            raise InputError(f"{_HOST} must be above 0, or None for no host memory, got 0")

    def for_forest(self, forest: Forest) -> "CostModel":
        """Return the model with the forest's own bytes among the resident bytes."""
        tokens = self.forest_bytes_per_token * forest.num_tokens
        raw = self.forest_bytes_per_raw_token * forest.raw_tokens
        return replace(
            self,
            resident_bytes=self.resident_bytes + tokens + raw,
            forest_bytes_per_token=0.0,
            forest_bytes_per_raw_token=0.0,
        )

    def run_bytes(self, tokens: int, boundary: int, edges: int) -> float:
        """Peak of forward and backward."""
        return self._run(tokens, boundary, edges)

    def run_bytes_of(self, tokens: npt.ArrayLike, boundary: npt.ArrayLike, edges: npt.ArrayLike) -> FloatArray:
        """`run_bytes` for many sizes, all [K]: float64 [K]."""
        return self._run.of(tokens, boundary, edges)

    @cached_property
    def _run(self) -> Bytes:
        """The larger of forward and backward, as one maximum."""
        return Bytes([*self.forward.rows, *self.backward.rows])

    def most_tokens(self, budget: float, limit: int = 1 << 40) -> int:
        """Return the most tokens, at most `limit`, that run within `budget` bytes.

        Without a boundary; 0 where none does.
        """
        low, high = 0, limit
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.run_bytes(middle, 0, middle) <= budget else (low, middle - 1)
        return low

    @cached_property
    def store_bytes_per_token(self) -> float:
        """Return bytes of an outgoing token while children run: K/V and their gradients."""
        return self.kv_bytes_per_token + self.kv_grad_bytes_per_token

    def extra_run_bytes_per_token(self, again: bool) -> float:
        """Return bytes that an outgoing token adds to a run besides its store.

        `again`: its K/V are made a second time.
        """
        return self.kv_tangent_bytes_per_token + (self.kv_bytes_per_token if again else 0.0)

    def to_dict(self) -> dict[str, Any]:
        """All figures, for JSON."""
        return {name: _plain(getattr(self, name)) for name in self.__dataclass_fields__}

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> "CostModel":
        """The model that `to_dict` described.

        Raises:
            InputError: it is something else; the field is named.
        """
        return Field(fields, "the dictionary of a cost model").read(cls)


def _plain(value: Any) -> Any:
    if isinstance(value, Bytes):
        return [list(row) for row in value.rows]
    if isinstance(value, StateCost):
        return {name: list(item) if isinstance(item, tuple) else item for name, item in vars(value).items()}
    return list(value) if isinstance(value, Seconds) else value


def _numbers(value: Any) -> tuple[float, ...]:
    """The numbers of a field, but for polynomials, which check their own."""
    if isinstance(value, StateCost):
        return sum(map(_numbers, vars(value).values()), ())
    if isinstance(value, tuple):
        return tuple(value)
    return () if isinstance(value, Bytes | None) else (value,)


def _undominated(table: FloatArray) -> FloatArray:
    """Return rows that are the largest for some size.

    These are rows that no other row exceeds in every coefficient.
    """
    distinct = np.unique(table, axis=0)
    covered = (distinct[None, :, :] >= distinct[:, None, :]).all(axis=2).sum(axis=1) > 1
    kept: FloatArray = distinct[~covered]
    return kept
