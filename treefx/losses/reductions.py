"""How the terms of rows become one number: the weight of every row's terms."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from treefx.errors import ForestError, InputError
from treefx.forests.forest import Forest

__all__ = ["Constant", "PromptMean", "Reduction", "edge_scale", "entry_scale"]


@dataclass(frozen=True)
class Constant:
    """Sum over tokens, divided by the rows and by a length that depends on no row.

    Dr. GRPO: Liu et al. 2025, arXiv 2503.20783. `Constant(1)` is the mean over rows of their sums.

    Attributes:
        length: usually the largest number of tokens that could be sampled; greater than 0.
    """

    length: float

    def __post_init__(self) -> None:
        if not self.length > 0:
            raise InputError(f"Constant(length) must be greater than 0, got {self.length}")


@dataclass(frozen=True, eq=False)
class PromptMean:
    """Mean over prompts of the mean over the tokens of the prompt's rows.

    Attributes:
        prompts: [R] integers; rows with the same number answer the same prompt.
    """

    prompts: Sequence[int] | Tensor


Reduction: TypeAlias = Literal["sum", "token_mean", "row_mean"] | Constant | PromptMean


def entry_scale(forest: Forest, reduction: Reduction) -> Tensor:
    """float64 [entries]: what multiplies every (edge, row) term, the row's weight included."""
    edges = forest.edges
    return edges.row_weight * _row_scale(forest, reduction)[edges.row_index]


def edge_scale(forest: Forest, reduction: Reduction) -> Tensor:
    """float64 [E]: the sum of `entry_scale` over every edge's rows."""
    if reduction == "row_mean" or isinstance(reduction, PromptMean):
        return forest.edges.sum_entries(entry_scale(forest, reduction))
    return forest.edges.weight * _row_scale(forest, reduction)[0]


def _row_scale(forest: Forest, reduction: Reduction) -> Tensor:
    """float64 [R]: what multiplies every row's weighted terms."""
    totals = forest.row_weight
    if reduction == "sum":
        return torch.ones_like(totals)
    if isinstance(reduction, Constant):
        return torch.full_like(totals, 1.0 / (len(forest) * reduction.length))
    if isinstance(reduction, PromptMean):
        return _group_means(forest, _read_prompts(reduction.prompts, forest))
    if reduction == "token_mean":
        return _group_means(forest, torch.zeros_like(forest.row_lengths))
    if reduction == "row_mean":
        return _group_means(forest, torch.arange(len(forest), device=forest.device))
    raise InputError(
        f"reduction must be Constant(length), PromptMean(prompts), 'sum', 'token_mean' or 'row_mean', got {reduction!r}"
    )


def _group_means(forest: Forest, group: Tensor) -> Tensor:
    """[R]: 1 / (weight of the row's group) / (number of groups), and 0 where a group has no weight at all."""
    count = int(group.max()) + 1
    totals = forest.row_weight.new_zeros(count).index_add_(0, group, forest.row_weight)
    weighted = (forest.raw_weight != 0).to(totals.dtype)
    rows = torch.segment_reduce(weighted, "max", offsets=forest.row_offsets)
    has_weight = totals.new_zeros(count).index_add_(0, group, rows) > 0
    if bool((has_weight & (totals == 0)).any()):
        raise ForestError("weights that sum to 0 without all being 0 have no mean; use reduction='sum'")
    inverse: Tensor = torch.where(has_weight, 1.0 / totals, 0.0)
    return inverse[group] / count


def _read_prompts(prompts: Sequence[int] | Tensor, forest: Forest) -> Tensor:
    """int64 [R], counting from 0."""
    values = torch.as_tensor(prompts, device=forest.device)
    if values.shape != (len(forest),) or values.is_floating_point():
        raise ForestError(
            f"PromptMean(prompts) needs one integer per row, [{len(forest)}], got {values.dtype} {list(values.shape)}"
        )
    index: Tensor = torch.unique(values, return_inverse=True)[1]
    return index
