"""Describe a value as a function of one row: columns read, and known elements."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

__all__ = ["LARGEST_TABLE", "RowDigit", "State", "States", "Unknown"]

LARGEST_TABLE = 1 << 26
"""Values with larger tables are unknown."""


class Unknown(Exception):
    """No law covers this use of an operator."""


@dataclass(frozen=True)
class RowDigit:
    """Where the row index is: dimension ``dim`` of the full value is (outer, rows, inner)."""

    dim: int
    inner: int


@dataclass(frozen=True)
class State:
    """Hold the dependence of one row of a value.

    ``shape`` is the full shape with the row digit taken out; the tables have its rank, and per dimension its size or 1.
    ``row`` is None for a value that is the same for all rows. ``sources`` are the inputs [B, T] that the value read on
    its way, ``packed`` whether it read a packed value.
    """

    shape: tuple[int, ...]
    column: Tensor
    value: Tensor
    mask: Tensor
    row: RowDigit | None = None
    sources: frozenset[fx.Node] = frozenset()
    packed: bool = False

    @property
    def rank(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    @property
    def knows(self) -> bool:
        """Whether any element is known."""
        return bool(self.mask.any())

    def is_zero(self) -> Tensor:
        """Where the value is known to be zero (or False)."""
        return self.mask & (self.value == 0)

    def mapped(self, move: Callable[[Tensor], Tensor], shape: Sequence[int], row: RowDigit | None) -> State:
        """The state after a movement of elements."""
        tables = [move(table) for table in (self.column, self.value, self.mask)]
        return replace(self, shape=tuple(shape), column=tables[0], value=tables[1], mask=tables[2], row=row)

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
