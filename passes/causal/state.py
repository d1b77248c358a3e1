"""Describe a value as a function of one row: columns read, and known elements."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

__all__ = ["FILL", "LARGEST_TABLE", "Options", "RowDigit", "State", "States", "Unknown"]

LARGEST_TABLE = 1 << 26
"""Values with larger tables are unknown."""


FILL = -(2.0**120)
"""Numbers at or below this are fills of masks.

The sum of one and a number of a model, which counts as smaller than 2**60 as in ``treefx.passes.scores.hidden``, rounds
to the fill in float32, bfloat16 and float64.
"""


class Unknown(Exception):
    """No law covers this use of an operator."""


@dataclass(frozen=True)
class RowDigit:
    """Where the row index is: dimension ``dim`` of the full value is (outer, rows, inner)."""

    dim: int
    inner: int


@dataclass(frozen=True)
class Options:
    """Describe elements as functions of one open choice, such as that of a key by ``topk``.

    ``value`` and ``mask`` are tables as those of a state, with the options of the choice in one more dimension. Two
    values are functions of the same choice if they have the same ``origin``.
    """

    origin: object
    value: Tensor
    mask: Tensor

    def mapped(self, move: Callable[[Tensor], Tensor]) -> Options:
        """The options after a movement of elements: another choice, since elements have other places."""
        moved = [torch.stack([move(one) for one in table.unbind(-1)], -1) for table in (self.value, self.mask)]
        return Options(object(), *moved)


@dataclass(frozen=True)
class State:
    """Hold the dependence of one row of a value.

    ``shape`` is the full shape with the row digit taken out; the tables have its rank, and per dimension its size or 1.
    ``row`` is None for a value that is the same for all rows. ``sources`` are the inputs [B, T] that the value read on
    its way, ``packed`` whether it read a packed value. ``floored`` is a table, too: which unknown elements are above
    all fills of masks; None: no element is known to be. ``options`` say more about unknown elements, see there.
    """

    shape: tuple[int, ...]
    column: Tensor
    value: Tensor
    mask: Tensor
    row: RowDigit | None = None
    sources: frozenset[fx.Node] = frozenset()
    packed: bool = False
    floored: Tensor | None = None
    options: Options | None = None

    @property
    def rank(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    @property
    def knows(self) -> bool:
        """Whether any element is known."""
        return bool(self.mask.any())

    @property
    def says_more(self) -> bool:
        """Whether anything is known of elements besides their columns."""
        return self.knows or self.options is not None or (self.floored is not None and bool(self.floored.any()))

    def is_zero(self) -> Tensor:
        """Where the value is known to be zero (or False)."""
        return self.mask & (self.value == 0)

    def is_floored(self) -> Tensor:
        """Where the value is above all fills of masks."""
        unknown = torch.zeros_like(self.mask) if self.floored is None else self.floored
        return torch.where(self.mask, self.value > FILL, unknown)

    def above_fills(self) -> State:
        """The same, all unknown elements above the fills of masks."""
        return replace(self, floored=torch.ones([1] * self.rank, dtype=torch.bool))

    def is_fill(self) -> Tensor:
        """Where the value is known to be a fill of a mask, -inf included."""
        return self.mask & (self.value <= FILL) if self.value.dtype.is_floating_point else torch.zeros_like(self.mask)

    def mapped(self, move: Callable[[Tensor], Tensor], shape: Sequence[int], row: RowDigit | None) -> State:
        """The state after a movement of elements."""
        column, value, mask = (move(table) for table in (self.column, self.value, self.mask))
        floored = None if self.floored is None else move(self.floored)
        options = None if self.options is None else self.options.mapped(move)
        return State(tuple(shape), column, value, mask, row, self.sources, self.packed, floored, options)

    def spread(self, *dims: int) -> State:
        """The same tables, of full size along the given dimensions."""
        sizes = [size if d in dims else -1 for d, size in enumerate(self.shape)]
        largest = max(
            math.prod(self.shape[d] if d in dims else table.shape[d] for d in range(self.rank))
            for table in (self.column, self.value, self.mask)
        )
        if largest > LARGEST_TABLE:
            raise Unknown
        return self.mapped(lambda table: table.expand(sizes), self.shape, self.row)

    @staticmethod
    def of(shape: Sequence[int], dtype: torch.dtype, known: Any = None) -> State:
        """A value that reads nothing: the same known number everywhere, or unknown."""
        ones = [1] * len(shape)
        value = torch.full(ones, 0 if known is None else known, dtype=dtype)
        column = torch.zeros(ones, dtype=torch.int32)
        return State(tuple(shape), column, value, torch.full(ones, known is not None))

    @staticmethod
    def constant(value: Tensor) -> State:
        """A known tensor."""
        value = value.detach().cpu()
        ones = [1] * value.dim()
        column, mask = torch.zeros(ones, dtype=torch.int32), torch.ones(ones, dtype=torch.bool)
        return State(tuple(value.shape), column, _compacted(value), mask)


States = State | tuple[State, ...]


def _compacted(x: Tensor) -> Tensor:
    """The table with dimensions of stride zero cut to one."""
    for d, (size, stride) in enumerate(zip(x.shape, x.stride(), strict=True)):
        if size > 1 and stride == 0:
            x = x.narrow(d, 0, 1)
    return x
