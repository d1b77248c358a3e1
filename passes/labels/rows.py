"""A labelled value as [rows, T, ...]: its factors in order, rows and tokens in front."""

from __future__ import annotations

import math

from torch import Tensor

from treefx.passes.labels.facts import Axis, Dims, Factor

__all__ = ["factors_of", "position_of", "rows_first", "rows_in_order", "tokens_in_front"]


def factors_of(dims: Dims) -> list[Factor]:
    """The factors of all dimensions, in order."""
    return [factor for dim in dims for factor in dim]


def position_of(factors: list[Factor], axis: Axis) -> int:
    """Where the one factor of an axis stands."""
    return next(i for i, factor in enumerate(factors) if factor.axis is axis)


def rows_first(x: Tensor, dims: Dims, rows: int) -> Tensor:
    """Return a value of some rows as [rows, T, ...], the other factors in order.

    Undoes ``rows_in_order``.
    """
    factors = factors_of(dims)
    split = x.reshape([rows if factor.axis is Axis.ROW else factor.size for factor in factors])
    return split.movedim((position_of(factors, Axis.ROW), position_of(factors, Axis.TOKEN)), (0, 1))


def tokens_in_front(x: Tensor, dims: Dims) -> Tensor:
    """Return a value with separate dimensions of rows and tokens as [B, T, ...]."""
    axes = [[factor.axis for factor in dim] for dim in dims]
    return x.movedim((axes.index([Axis.ROW]), axes.index([Axis.TOKEN])), (0, 1))


def rows_in_order(rows: Tensor, dims: Dims) -> Tensor:
    """A value [B, T, ...] with its factors moved to their dimensions."""
    factors = factors_of(dims)
    row, token = position_of(factors, Axis.ROW), position_of(factors, Axis.TOKEN)
    sizes = {Axis.ROW: rows.shape[0], Axis.TOKEN: rows.shape[1]}
    ordered = rows.movedim((0, 1), (row, token))
    return ordered.reshape([math.prod(sizes.get(factor.axis, factor.size) for factor in dim) for dim in dims])
