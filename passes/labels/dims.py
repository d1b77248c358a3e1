"""Compute with labelled dimensions: views, broadcasts and contractions of factors.

A labelled factor (row, token, key, slot) is never split and never merged with plain ones out of order; a plain factor
may be split freely. Everything that would need more raises ``NoLaw`` and the value is expanded instead.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from treefx.passes.labels.facts import Axis, Dims, Factor, token_axes

__all__ = [
    "NoLaw",
    "broadcast",
    "coalesce",
    "extent",
    "has_only_row",
    "has_tokens",
    "insert",
    "is_keys",
    "move",
    "plain",
    "regroup",
    "resize",
    "row_before_tokens",
    "same_tokens",
    "unrepeated",
    "with_keys",
]


class NoLaw(Exception):
    """The operator has no token-wise law here; the message is the reason the report gives."""


def plain(size: int) -> tuple[Factor, ...]:
    """The factors of an unlabelled dimension."""
    return () if size == 1 else (Factor(Axis.PLAIN, size),)


def extent(dim: Sequence[Factor]) -> int:
    """The size of a dimension in the traced graph."""
    return math.prod(factor.size for factor in dim)


def has_tokens(dim: Sequence[Factor]) -> bool:
    """Whether a dimension holds a labelled factor."""
    return any(factor.axis is not Axis.PLAIN for factor in dim)


def has_only_row(dim: Sequence[Factor]) -> bool:
    """Whether a dimension begins with the row axis of a batch of one row."""
    return bool(dim) and dim[0].axis is Axis.ROW and dim[0].size == 1


def same_tokens(left: Sequence[Factor], right: Sequence[Factor]) -> bool:
    """Return whether two dimensions run over the same labelled factors and sizes.

    Their plain factors may be split in any way.
    """
    return [(f.axis, f.size) for f in coalesce(left)] == [(f.axis, f.size) for f in coalesce(right)]


def coalesce(dim: Sequence[Factor]) -> tuple[Factor, ...]:
    """Merge neighbouring plain factors into one that counts as not repeated."""
    result: list[Factor] = []
    for factor in dim:
        if factor.axis is Axis.PLAIN and result and result[-1].axis is Axis.PLAIN:
            result[-1] = Factor(Axis.PLAIN, result[-1].size * factor.size)
        else:
            result.append(Factor(factor.axis, factor.size))
    return tuple(result)


def unrepeated(dim: Sequence[Factor]) -> tuple[Factor, ...]:
    """The same factors of a value that may vary along every one of them."""
    return tuple(Factor(factor.axis, factor.size) for factor in dim)


def regroup(dims: Dims, shape: Sequence[int]) -> Dims:
    """Dimensions after a view to ``shape``.

    Raises:
        NoLaw: The view would split a labelled factor.
    """
    queue = [factor for dim in dims for factor in dim]
    result: list[tuple[Factor, ...]] = []
    for position, size in enumerate(shape):
        taken = _take(queue, size)
        following = shape[position + 1] if position + 1 < len(shape) else None
        while following != 1 and queue and queue[0].size == 1:
            taken.append(queue.pop(0))  # a row or token axis of size one stays with the dimension before it
        result.append(tuple(taken))
    if queue:
        raise NoLaw(f"a view to {list(shape)} leaves {queue} without a dimension")
    return tuple(result)


def _take(queue: list[Factor], size: int) -> list[Factor]:
    """Remove factors with the product ``size`` from the front of the queue."""
    taken: list[Factor] = []
    if size == 1:
        return [queue.pop(0)] if queue and queue[0].size == 1 else taken
    product = 1
    while product < size and queue:
        factor = queue.pop(0)
        missing = size // product
        if size % product == 0 and factor.size <= missing and missing % factor.size == 0:
            taken.append(factor)
        elif factor.axis is Axis.PLAIN and size % product == 0 and factor.size % missing == 0:
            taken.append(Factor(Axis.PLAIN, missing, factor.repeated))
            queue.insert(0, Factor(Axis.PLAIN, factor.size // missing, factor.repeated))
            product *= missing
            continue
        else:
            raise NoLaw(f"a view splits the axis {factor}")
        product *= factor.size
    if product != size:
        raise NoLaw(f"a view to a dimension of {size} crosses labelled axes")
    return taken


def broadcast(operands: Sequence[Dims]) -> Dims:
    """Dimensions of a pointwise operator over labelled operands.

    Raises:
        NoLaw: Two operands have different token axes at one position.
    """
    places = sorted({place for dims in operands if (place := _place_of_only_row(dims)) is not None})
    if len(places) > 1:  # [1, T] and [T]: an only row may stand in any dimension
        dims = _broadcast([_without_row(dims) for dims in operands])
        free = [place for place in places if not dims[place] or dims[place][0].axis is Axis.TOKEN]
        place = (free or places)[0] % len(dims)
        dims = dims[:place] + ((Factor(Axis.ROW, 1), *dims[place]),) + dims[place + 1 :]
    else:
        dims = _broadcast(operands)
    labelled = [factor.axis for dim in dims for factor in dim if factor.axis is not Axis.PLAIN]
    if len(labelled) != len(set(labelled)):
        raise NoLaw("a broadcast pairs tokens with tokens")
    return dims


def _broadcast(operands: Sequence[Dims]) -> Dims:
    rank = max(len(dims) for dims in operands)
    result: list[tuple[Factor, ...]] = []
    for position in range(rank):
        choices = [dims[position - rank + len(dims)] for dims in operands if position - rank + len(dims) >= 0]
        result.append(_broadcast_dim([dim for dim in choices if dim]))
    return tuple(result)


def _place_of_only_row(dims: Dims) -> int | None:
    """The dimension that holds the row axis of a batch of one row, counted from the end (-1 is the last)."""
    return next((d - len(dims) for d, dim in enumerate(dims) for f in dim if f.axis is Axis.ROW and f.size == 1), None)


def _without_row(dims: Dims) -> Dims:
    return tuple(tuple(factor for factor in dim if factor.axis is not Axis.ROW) for dim in dims)


def row_before_tokens(dims: Dims, position: int) -> Dims:
    """Move the row axis of a batch of one row from a separate dimension to that of the tokens.

    Raises:
        NoLaw: No dimension runs over tokens.
    """
    rest = dims[:position] + ((),) + dims[position + 1 :]
    for d, dim in enumerate(rest):
        axes = [factor.axis for factor in dim]
        if Axis.TOKEN in axes:
            at = axes.index(Axis.TOKEN)
            return rest[:d] + ((*dim[:at], *dims[position], *dim[at:]),) + rest[d + 1 :]
    raise NoLaw("expands a row or token axis of size one")


def _broadcast_dim(choices: list[tuple[Factor, ...]]) -> tuple[Factor, ...]:
    if not choices:
        return ()
    widest = max(choices, key=extent)
    for dim in choices:
        if dim is widest or same_tokens(dim, widest):
            continue
        if has_tokens(dim) or has_tokens(widest):
            raise NoLaw(f"a broadcast aligns {list(dim)} with {list(widest)}")
    same_split = all([f.size for f in dim] == [f.size for f in widest] for dim in choices)
    if not same_split:
        return coalesce(widest)
    repeated = [all(dim[i].repeated for dim in choices) for i in range(len(widest))]
    return tuple(Factor(f.axis, f.size, r) for f, r in zip(widest, repeated, strict=True))


def insert(dims: Dims, position: int, dim: tuple[Factor, ...] = ()) -> Dims:
    """Insert a dimension, counting from the end when negative as ``unsqueeze`` does."""
    position = position if position >= 0 else position + len(dims) + 1
    return dims[:position] + (dim,) + dims[position:]


def move(dims: Dims, order: Sequence[int]) -> Dims:
    """Permute dimensions."""
    return tuple(dims[i] for i in order)


def resize(dims: Dims, position: int, size: int) -> Dims:
    """Replace an unlabelled dimension by one of another size.

    Raises:
        NoLaw: The dimension runs over tokens.
    """
    position %= len(dims)
    if has_tokens(dims[position]):
        axes = token_axes((dims[position],))
        if set(axes) == {Axis.ROW}:
            raise NoLaw("reads other rows of the batch")
        raise NoLaw(f"mixes positions along the {'/'.join(sorted(axis.name.lower() for axis in axes))} axis")
    return dims[:position] + (plain(size),) + dims[position + 1 :]


def is_keys(dim: tuple[Factor, ...]) -> bool:
    """Whether a dimension runs over the keys of scores."""
    return [factor.axis for factor in dim] == [Axis.KEY]


def with_keys(dims: Dims, dim: int, size: int) -> Dims:
    """Scores with another number of entries per query."""
    dim %= len(dims)
    return dims[:dim] + ((Factor(Axis.KEY, size),),) + dims[dim + 1 :]
