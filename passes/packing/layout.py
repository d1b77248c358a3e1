"""Packed form of a labelled value, and the way to and from rows.

The packed form of dimensions replaces every row factor by 1 and every token factor by N, so ``[B, H, T, D]`` becomes
``[1, H, N, D]`` and ``[B * T, V]`` becomes ``[N, V]``: the graph runs on one packed row.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from treefx.kernels.expand import expand
from treefx.passes.labels.facts import Axis, Dims, Factor
from treefx.passes.labels.rows import factors_of, position_of, rows_in_order

__all__ = [
    "Metadata",
    "at_columns",
    "at_own_row",
    "expand_rows",
    "gather_tokens",
    "packed_shape",
    "tokens_first",
]


@dataclass(frozen=True)
class Metadata:
    """The trie of one call, as the graph sees it.

    ``row`` [N] int64: a representative row of each distinct token; ``column`` [N] int64: its column; ``subtree_end``
    [N] int32; ``token_of`` [B, T] int64, -1 at dropped padding.
    """

    row: Tensor
    column: Tensor
    subtree_end: Tensor
    token_of: Tensor

    @property
    def tokens(self) -> Any:
        """N, a symbol while tracing."""
        return self.column.shape[0]


def _packed_size(factor: Factor, tokens: Any, positions: int) -> Any:
    if factor.axis is Axis.ROW:
        return 1
    if factor.axis is Axis.TOKEN:
        return tokens
    return factor.size // positions * tokens if factor.axis is Axis.SLOT else factor.size


def packed_shape(dims: Dims, tokens: Any, positions: int) -> list[Any]:
    """Return the packed shape; ``positions`` is B * T, the traced graph's positions."""
    return [math.prod(_packed_size(factor, tokens, positions) for factor in dim) for dim in dims]


def gather_tokens(x: Tensor, dims: Dims, metadata: Metadata) -> Tensor:
    """Read a full value once per distinct token, at its representative row and column."""
    factors = factors_of(dims)
    split = x.reshape([factor.size for factor in factors])
    row, token = position_of(factors, Axis.ROW), position_of(factors, Axis.TOKEN)
    front = split.movedim((row, token), (0, 1))
    gathered = front[metadata.row, metadata.column].unsqueeze(0)  # [1, N, ...]
    result = gathered.movedim((0, 1), (row, token))
    return result.reshape(packed_shape(dims, metadata.tokens, 1))


def tokens_first(x: Tensor, dims: Dims, tokens: Any) -> Tensor:
    """Return a packed value as [N, ...]: tokens first, no row axis, other factors in order."""
    factors = factors_of(dims)
    split = x.reshape([_packed_size(factor, tokens, 1) for factor in factors])
    row, token = position_of(factors, Axis.ROW), position_of(factors, Axis.TOKEN)
    return split.movedim((row, token), (0, 1)).squeeze(0)


def expand_rows(first: Tensor, dims: Dims, token_of: Tensor) -> Tensor:
    """A value as ``tokens_first`` gives it, back on rows with the dimensions ``dims``."""
    return rows_in_order(expand(first.contiguous(), token_of), dims)


def at_columns(x: Tensor, dims: Dims, metadata: Metadata) -> Tensor:
    """Read an invariant operand at the tokens' columns and row 0.

    It is right-aligned with packed dimensions.
    """
    for position, dim in _wide_dims(x.shape, dims):
        rows = Axis.TOKEN not in {factor.axis for factor in dim}
        x = _at_first_row(x, position, dim) if rows else x.index_select(position, metadata.column)
    return x


def _at_first_row(x: Tensor, position: int, dim: tuple[Factor, ...]) -> Tensor:
    if len(dim) == 1:
        return x.narrow(position, 0, 1)
    before, after = list(x.shape[:position]), list(x.shape[position + 1 :])
    split = x.reshape([*before, *(factor.size for factor in dim), *after])
    where = position + [factor.axis for factor in dim].index(Axis.ROW)
    return split.narrow(where, 0, 1).reshape([*before, -1, *after])


def at_own_row(x: Any, dims: Dims, metadata: Metadata) -> Any:
    """Read a full value at each token's row and column, all keys, next to scores.

    It is right-aligned with ``dims``.
    """
    if not isinstance(x, Tensor):
        return x
    x = x.reshape([1] * (len(dims) - x.dim()) + list(x.shape))
    factors = factors_of(dims)
    sizes = [factor.size if x.shape[d] != 1 else 1 for d, dim in enumerate(dims) for factor in dim]
    row, token = position_of(factors, Axis.ROW), position_of(factors, Axis.TOKEN)
    first = torch.zeros_like(metadata.row)
    front = x.reshape(sizes).movedim((row, token), (0, 1))
    own = front[metadata.row if sizes[row] != 1 else first, metadata.column if sizes[token] != 1 else first]
    sizes[row], sizes[token] = 1, metadata.tokens
    places = iter(sizes)
    whole = own.unsqueeze(0).movedim((0, 1), (row, token))
    return whole.reshape([math.prod(next(places) for _ in dim) for dim in dims])


def _wide_dims(shape: Sequence[Any], dims: Dims) -> Iterator[tuple[int, tuple[Factor, ...]]]:
    """Yield dimensions longer than one next to rows and tokens of ``dims``, with their factors."""
    for offset in range(1, min(len(shape), len(dims)) + 1):
        labelled = any(factor.axis is not Axis.PLAIN for factor in dims[-offset])
        if shape[-offset] != 1 and labelled:
            yield len(shape) - offset, dims[-offset]
