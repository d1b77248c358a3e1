"""How the terms of rows become one number: the weight of every row's terms."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from treefx.arguments import check_number
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
        check_number(self.length, "Constant(length)", "a finite number greater than 0", above=0)


@dataclass(frozen=True, eq=False)
class PromptMean:
    """Mean over prompts of the mean over the tokens of the prompt's rows.

    Attributes:
        prompts: [R] integers, on a rank's share of a step [W], of all its rows; rows with the same number answer the
            same prompt.
    """

    prompts: Sequence[int] | Tensor


Reduction: TypeAlias = Literal["sum", "token_mean", "row_mean"] | Constant | PromptMean


def entry_scale(forest: Forest, reduction: Reduction) -> Tensor:
    """Return float64 [entries]: the factor of every (edge, row) term, with the row's weight."""
    edges = forest.edges
    return edges.row_weight * _row_scale(forest, reduction)[edges.row_index]


def edge_scale(forest: Forest, reduction: Reduction) -> Tensor:
    """float64 [E]: the sum of `entry_scale` over every edge's rows."""
    if reduction == "row_mean" or isinstance(reduction, PromptMean):
        return forest.edges.sum_entries(entry_scale(forest, reduction))
    return forest.edges.weight * _row_scale(forest, reduction)[0]


def _row_scale(forest: Forest, reduction: Reduction) -> Tensor:
    """Return float64 [R]: the factor of every row's weighted terms."""
    if forest.share is None:
        return _scale(forest.row_weight, forest.row_has_weight, reduction)
    share = forest.share
    scale = _scale(share.row_weight.to(forest.device), share.has_weight.to(forest.device), reduction)
    return scale[share.rows.to(forest.device)]


def _scale(weight: Tensor, has_weight: Tensor, reduction: Reduction) -> Tensor:
    """Return float64 [W], the factor of every row of a step.

    Inputs are the sum of each row's weights and whether it has any.
    """
    if reduction == "sum":
        return torch.ones_like(weight)
    if isinstance(reduction, Constant):
        return torch.full_like(weight, 1.0 / (len(weight) * reduction.length))
    if isinstance(reduction, PromptMean):
        return _group_means(weight, has_weight, _read_prompts(reduction.prompts, weight))
    if reduction == "token_mean":
        return _group_means(weight, has_weight, torch.zeros_like(weight, dtype=torch.int64))
    if reduction == "row_mean":
        return _group_means(weight, has_weight, torch.arange(len(weight), device=weight.device))
    raise InputError(
        f"reduction must be Constant(length), PromptMean(prompts), 'sum', 'token_mean' or 'row_mean', got {reduction!r}"
    )


def _group_means(weight: Tensor, has_weight: Tensor, group: Tensor) -> Tensor:
    """Return [W]: 1 / (weight of the row's group) / (number of groups).

    A group without any weight gets 0.
    """
    count = int(group.max()) + 1
    totals = weight.new_zeros(count).index_add_(0, group, weight)
    counts = weight.new_zeros(count).index_add_(0, group, has_weight.to(weight.dtype)) > 0
    if bool((counts & (totals == 0)).any()):
        raise ForestError("weights that sum to 0 without all being 0 have no mean; use reduction='sum'")
    inverse: Tensor = torch.where(counts, 1.0 / totals, 0.0)
    return inverse[group] / count


def _read_prompts(prompts: Sequence[int] | Tensor, weight: Tensor) -> Tensor:
    """int64 [W], counting from 0."""
    values = torch.as_tensor(prompts, device=weight.device)
    if values.shape != (len(weight),) or values.is_floating_point() or values.is_complex():
        raise ForestError(
            f"PromptMean(prompts) needs one integer per row, [{len(weight)}], got {values.dtype} {list(values.shape)}"
        )
    index: Tensor = torch.unique(values, return_inverse=True)[1]
    return index
