"""Log-probabilities of whole rows, and which rows are compared."""

from collections.abc import Sequence
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from treefx.errors import ForestError, InputError
from treefx.forests.forest import Forest
from treefx.losses.reading import (
    PerEdge,
    check_finite,
    check_logp,
    counted,
    read_per_edge,
    read_per_token,
    require_whole,
)

__all__ = ["PairReduction", "Pairs", "read_pairs", "reduce_rows", "ref_sums", "row_sums", "row_totals"]

Pairs: TypeAlias = Tensor | Sequence[tuple[int, int]]
"""[P, 2] row numbers: (chosen, rejected)."""
PairReduction: TypeAlias = Literal["mean", "sum"]
"""Over the pairs, or the rows, that are compared."""


def row_sums(logp: Tensor, forest: Forest, name: str) -> Tensor:
    """[R]: sum_t w[b,t] logp[b,t], for the loss of this name.

    The gradient of an edge is the sum over its rows of weight times the gradient of the row.
    """
    check_logp(logp, forest)
    require_whole(forest, name)
    edges = forest.edges
    weight = edges.row_weight.to(logp.dtype)
    entries = weight * counted(logp[edges.edge_of_entry], weight != 0)
    raw = logp.new_zeros(forest.raw_tokens).index_put((edges.raw_index,), entries)
    return torch.segment_reduce(raw, "sum", offsets=forest.row_offsets)


def row_totals(forest: Forest, name: str, used: Tensor) -> Tensor:
    """Return float64 [R]: the sum of each row's weights; rows in `used` must have some."""
    empty = forest.row_weight[used] == 0
    if bool(empty.any()):
        row = int(used[empty][0])
        raise ForestError(f"{name} compares means over tokens, but the weights of row {row} sum to 0; leave it out")
    return torch.where(forest.row_weight == 0, 1.0, forest.row_weight)


def ref_sums(ref_logp: PerEdge, forest: Forest) -> Tensor:
    """float64 [R]: `row_sums` of a reference, without gradient."""
    edges, weight = forest.edges, forest.raw_weight
    per_edge = read_per_edge(ref_logp, forest)
    if per_edge is None:
        raw = read_per_token(ref_logp, forest, "ref_logp")
    else:
        raw = torch.zeros_like(weight)
        raw[edges.raw_index] = per_edge[edges.edge_of_entry].double()
    return torch.segment_reduce(weight * check_finite(raw, "ref_logp", weight != 0), "sum", offsets=forest.row_offsets)


def read_pairs(pairs: Pairs, forest: Forest) -> Tensor:
    """int64 [2, P]: the chosen rows and the rejected ones."""
    values = torch.as_tensor(pairs, device=forest.device)
    if values.ndim != 2 or values.shape[1] != 2 or not len(values) or values.is_floating_point():
        got = f"{values.dtype} {list(values.shape)}"
        raise ForestError(f"pairs must be [P, 2] row numbers (chosen, rejected), at least one, got {got}")
    first, last = int(values.min()), int(values.max())
    if first < 0 or last >= len(forest):
        raise ForestError(f"pairs name rows from 0 to {len(forest) - 1}, got {first} to {last}")
    same = values[:, 0] == values[:, 1]
    if bool(same.any()):
        raise ForestError(f"pair {int(same.nonzero()[0])} compares row {int(values[same][0, 0])} with itself")
    return values.to(torch.int64).T


def reduce_rows(values: Tensor, forest: Forest, reduction: PairReduction) -> Tensor:
    """Mean or sum over pairs or rows."""
    if reduction not in ("mean", "sum"):
        raise InputError(f"reduction must be 'mean' or 'sum' over the compared rows or pairs, got {reduction!r}")
    if reduction == "mean" and forest.share is not None:
        raise InputError(
            "reduction='mean' would be the mean of this rank alone: the forest is its share of "
            f"{len(forest.share)} rows; use reduction='sum' and divide by the number on all ranks"
        )
    return values.mean() if reduction == "mean" else values.sum()
