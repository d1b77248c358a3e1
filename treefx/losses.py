"""Losses over a forest's edges, equal in value and gradient to the same loss over the rows one by one.

Equal terms of rows that share an edge are collected, L = sum_e (sum over the edge's rows of w) l_e, so the
gradient that enters each edge's term carries the sum of its rows' weights and nothing else needs a scale.
With w the forest's weights, W_b the sum of row b's, W the sum of all and R the number of rows, the reductions
are

    sum         sum_{b,t} w[b,t] l[b,t]
    token_mean  sum_{b,t} w[b,t] l[b,t] / W
    row_mean    sum_b (sum_t w[b,t] l[b,t] / W_b) / R

With weights 0 or 1, token_mean is the mean over the tokens of weight 1: what `torch.nn.CrossEntropyLoss`
gives for labels that are -100 elsewhere. A row whose weights are all 0 has no mean; it adds 0 and still
counts in R.
"""

from collections.abc import Sequence
from typing import Literal

import torch

from treefx.errors import ForestError, InputError
from treefx.forests.forest import Forest

__all__ = ["Reduction", "policy", "sft"]

Reduction = Literal["sum", "token_mean", "row_mean"]
PerRow = torch.Tensor | Sequence[float] | Sequence[torch.Tensor]


def sft(logp: torch.Tensor, forest: Forest, reduction: Reduction = "sum") -> torch.Tensor:
    """Weighted negative log-likelihood of all rows, each distinct prediction computed once.

    Args:
        logp: [E], log-probability of every edge, from `edge_logprobs`.
        forest: the forest; its weights weigh the predictions.
        reduction: "sum", "token_mean" or "row_mean", defined in the module's docstring.

    Returns:
        Scalar of `logp`'s dtype; value and gradient equal to those of separate rows.

    Raises:
        ForestError: `logp` does not fit the forest, or a mean is asked for whose weights sum to 0 but are not
            all 0.
        InputError: no such reduction.
    """
    _check_logp(logp, forest)
    if reduction == "row_mean":
        edges = forest.edges
        weight = edges.sum_entries(edges.row_weight * _row_scale(forest, reduction)[edges.row_index])
    else:
        weight = forest.edges.weight * _row_scale(forest, reduction)[0]
    return -(weight.to(logp.dtype) * logp).sum()


def policy(
    logp: torch.Tensor,
    forest: Forest,
    old_logp: torch.Tensor | Sequence[torch.Tensor],
    advantages: PerRow,
    clip: float | tuple[float, float] = 0.2,
    reduction: Reduction = "token_mean",
) -> torch.Tensor:
    """Clipped policy loss (PPO: Schulman et al. 2017, equation 7; asymmetric bounds: DAPO, Yu et al. 2025).

    A row's term is -w min(r A, clamp(r, 1 - low, 1 + high) A) with r = exp(logp - old_logp). It is not linear
    in A, so advantages of rows that share an edge must not be summed; it is linear on each side of 0, so the
    edge's term is

        -(A+ min(r, 1 + high) + A- max(r, 1 - low)),  A+ = sum_b w_b max(A_b, 0),  A- = sum_b w_b min(A_b, 0).

    That needs weights of at least 0 and one old log-probability per edge. Samplers give a shared token
    slightly different ones in each row; given per row, the same term is summed over (edge, row) pairs
    instead.

    Args:
        logp: [E], log-probability of every edge under the policy that is trained.
        forest: the forest; its weights weigh the predictions.
        old_logp: [E], of the policy that sampled; or per row a vector as long as the row, whose entry t
            belongs to token t and whose entry 0 is not used.
            Also [B, T] for a forest from a padded batch.
        advantages: one number per row, or per token in either of these two forms.
        clip: the bound on both sides, or (low, high); at least 0.
        reduction: "sum", "token_mean" or "row_mean", defined in the module's docstring.

    Returns:
        Scalar of `logp`'s dtype; value and gradient equal to those of separate rows.

    Raises:
        ForestError: an argument does not fit the forest, or a weight is negative.
        InputError: `clip` is out of range, or no such reduction.
    """
    _check_logp(logp, forest)
    low, high = _read_clip(clip)
    edges = forest.edges
    if bool((edges.row_weight < 0).any()):
        raise ForestError("the clipped policy loss needs weights of at least 0; put the sign into the advantages")
    scale = _row_scale(forest, reduction)[edges.row_index] * edges.row_weight
    advantage = _read_advantages(advantages, forest)[edges.raw_index]
    advantage = scale * _check_finite(advantage, "advantages", scale != 0)
    positive, negative = advantage.clamp(min=0), advantage.clamp(max=0)
    if isinstance(old_logp, torch.Tensor) and old_logp.shape == logp.shape:
        old = old_logp.detach()
        positive, negative = edges.sum_entries(positive), edges.sum_entries(negative)
    else:
        old = _read_per_token(old_logp, forest, "old_logp")[edges.raw_index]
        logp = logp[edges.edge_of_entry]
    # Where nothing is gained or lost the ratio does not count, and samplers leave such entries unset.
    counts = (positive != 0) | (negative != 0)
    old = torch.where(counts, _check_finite(old, "old_logp", counts).to(logp), logp.detach())
    ratio = (logp - old).exp()
    gain = positive.to(logp.dtype) * ratio.clamp(max=1 + high) + negative.to(logp.dtype) * ratio.clamp(min=1 - low)
    return -gain.sum()


def _check_logp(logp: torch.Tensor, forest: Forest) -> None:
    count = len(forest.edges)
    if not isinstance(logp, torch.Tensor) or logp.shape != (count,) or not logp.is_floating_point():
        got = f"{logp.dtype} {list(logp.shape)}" if isinstance(logp, torch.Tensor) else type(logp).__name__
        raise ForestError(f"expected one log-probability per edge, floats [{count}], got {got}; use edge_logprobs")
    if logp.device != forest.device:
        raise ForestError(f"log-probabilities are on {logp.device}, the forest on {forest.device}; use forest.to(...)")


def _row_scale(forest: Forest, reduction: Reduction) -> torch.Tensor:
    """float64 [R]: what multiplies every row's weighted terms."""
    totals = forest.row_weight
    if reduction == "sum":
        return torch.ones_like(totals)
    if reduction == "token_mean":
        return _invert(totals.sum()[None], forest.raw_weight.any()[None]).expand(len(totals))
    if reduction == "row_mean":
        counted = (forest.raw_weight != 0).to(totals.dtype)
        has_weight = torch.segment_reduce(counted, "max", offsets=forest.row_offsets) > 0
        return _invert(totals, has_weight) / len(forest)
    raise InputError(f"reduction must be 'sum', 'token_mean' or 'row_mean', got {reduction!r}")


def _invert(totals: torch.Tensor, has_weight: torch.Tensor) -> torch.Tensor:
    """1 / totals, and 0 where there is no weight at all."""
    if bool((has_weight & (totals == 0)).any()):
        raise ForestError("weights that sum to 0 without all being 0 have no mean; use reduction='sum'")
    return torch.where(has_weight, 1.0 / totals, 0.0)


def _read_clip(clip: float | tuple[float, float]) -> tuple[float, float]:
    low, high = clip if isinstance(clip, tuple) else (clip, clip)
    if not (0 <= low and 0 <= high):
        raise InputError(f"clip must be at least 0, or a pair (low, high) of such, got {clip}")
    return float(low), float(high)


def _read_advantages(advantages: PerRow, forest: Forest) -> torch.Tensor:
    """float64 [raw]: the advantage of every raw token."""
    if isinstance(advantages, torch.Tensor) and advantages.ndim == 1 and len(advantages) == len(forest):
        values = advantages.detach().to(forest.device, torch.float64)
        return torch.repeat_interleave(values, forest.row_lengths)
    if not isinstance(advantages, torch.Tensor) and all(isinstance(a, int | float) for a in advantages):
        return _read_advantages(torch.tensor(advantages, dtype=torch.float64), forest)
    return _read_per_token(advantages, forest, "advantages")  # type: ignore[arg-type]


def _read_per_token(values: torch.Tensor | Sequence[torch.Tensor], forest: Forest, name: str) -> torch.Tensor:
    """float64 [raw]: values of all rows end to end, from a vector per row or the padded batch's [B, T]."""
    if isinstance(values, torch.Tensor):
        got = str(list(values.shape))
        if values.shape == (len(forest), forest.padded_width):
            return values.detach().to(forest.device, torch.float64)[forest.padded_token_of() >= 0]
    else:
        rows = [torch.as_tensor(row).detach().to(forest.device, torch.float64) for row in values]
        got = ", ".join(str(list(row.shape)) for row in rows)
        if [row.shape for row in rows] == [(length,) for length in forest.row_lengths.tolist()]:
            return torch.cat(rows)
    raise ForestError(
        f"{name} must be a tensor [{len(forest.edges)}] (old_logp, per edge) or [{len(forest)}] (advantages, "
        f"per row), a list of {len(forest)} vectors as long as their rows, or a tensor of the padded batch's "
        f"shape; got shape {got[:80]}"
    )


def _check_finite(values: torch.Tensor, name: str, counts: torch.Tensor) -> torch.Tensor:
    """Refuse NaN and infinity where an entry counts; elsewhere they become 0."""
    finite = values.isfinite()
    if bool((counts & ~finite).any()):
        raise ForestError(f"{name} must be finite wherever a weight is not 0, got NaN or infinity")
    return values.where(finite, 0.0)
