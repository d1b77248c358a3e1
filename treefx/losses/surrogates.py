"""Compute policy-gradient losses: plain, clipped, and with clipped weights.

Clipped: PPO, GRPO, DAPO, GSPO; clipped weights: CISPO.
"""

import torch
from torch import Tensor

from treefx.arguments import check_number
from treefx.errors import InputError
from treefx.forests.forest import Forest
from treefx.losses.metrics import Metrics
from treefx.losses.ratios import Groups, Level, Ratios, compute_ratios
from treefx.losses.reading import (
    PerEdge,
    PerRow,
    check_finite,
    check_logp,
    check_weights,
    counted,
    read_bounds,
    read_per_row,
)
from treefx.losses.reductions import Reduction, entry_scale

__all__ = ["cispo", "clipped", "policy", "policy_gradient"]


def policy_gradient(
    logp: Tensor,
    forest: Forest,
    advantages: PerRow,
    reduction: Reduction = "token_mean",
    *,
    importance: PerRow | None = None,
) -> Tensor:
    """REINFORCE (Williams 1992): a row's term is -A logp.

    It is linear in A, so advantages of rows that share an edge are summed: -(sum_b w_b A_b) logp.

    Args:
        logp: [E], log-probability of every edge under the policy that is trained.
        forest: the forest; its weights weigh the predictions.
        advantages: one number per row; or per row a vector as long as the row, with entry t for token t and entry 0
            unused; or [B, T] for a forest from a padded batch.
        reduction: defined in `treefx.losses`.
        importance: factors of at least 0 in the same forms, as `importance_weights` gives for rollouts of another
            policy.

    Returns:
        Scalar of `logp`'s dtype; value and gradient equal to those of separate rows.

    Raises:
        ForestError: an argument does not fit the forest.
        InputError: no such reduction.
    """
    check_logp(logp, forest)
    gain = forest.edges.sum_entries(_gains(forest, advantages, importance, reduction))
    return -(gain.to(logp.dtype) * counted(logp, forest.edges.has_weight)).sum()


def clipped(
    logp: Tensor,
    forest: Forest,
    old_logp: PerEdge | None,
    advantages: PerRow,
    clip: float | tuple[float, float] = 0.2,
    reduction: Reduction = "token_mean",
    *,
    dual_clip: float | None = None,
    level: Level = "token",
    groups: Groups | None = None,
    importance: PerRow | None = None,
    metrics: Metrics | None = None,
) -> Tensor:
    """Compute the clipped policy loss.

    PPO (Schulman et al. 2017, equation 7), GRPO, DAPO's asymmetric bounds, GSPO.

    A row's term is -w min(r A, clamp(r, 1 - low, 1 + high) A), with r = exp(logp - old_logp). It is not linear
    in A, so advantages of rows that share an edge must not be summed; it is linear on each side of 0, so the
    edge's term is

        -(A+ min(r, 1 + high) + A- max(r, 1 - low)),  A+ = sum_b w_b max(A_b, 0),  A- = sum_b w_b min(A_b, 0).

    That needs weights of at least 0 and one ratio for all rows of the edge. Samplers give a shared token slightly
    different log-probabilities in each row; where rows of an edge differ, the same term is summed over (edge, row)
    pairs instead. The ratio of a sequence (GSPO: Zheng et al. 2025, arXiv 2507.18071) belongs to all of its tokens, so
    their advantages collapse to one pair (A+, A-) per sequence.

    Args:
        logp: [E], log-probability of every edge under the policy that is trained.
        forest: the forest; its weights weigh the predictions.
        old_logp: [E], log-probabilities under the policy that sampled; or per row a vector as long as the row, with
            entry t for token t and entry 0 unused; or [B, T] for a forest from a padded batch. None: the trained
            policy, so that all ratios are 1.
        advantages: [R], one number per row; or one per token in either of the last two forms, such as [B, T].
        clip: the bound on both sides, or (low, high); at least 0.
        reduction: defined in `treefx.losses`.
        dual_clip: an upper bound of r where A is negative, greater than 1 (dual-clip PPO: Ye et al. 2020, arXiv
            1912.09729; `delta` of two-sided GRPO, where it is at least 1 + high).
        level: the unit of the ratio r. "token"; "sequence": exp of the weighted mean of logp - old_logp over the row
            (GSPO, equation 7); "sequence_token": the value of that one, the gradient of the token's own (GSPO-token,
            equation 14), for advantages that differ from token to token.
        groups: sequences other than rows. [R] integers: rows with the same number have one ratio together; a vector per
            row as long as the row: its tokens with the same number, the steps of an agent, say.
        importance: factors of at least 0, one per row or per token, as `importance_weights` gives for rollouts of
            another policy.
        metrics: gets "clip_ratio/low_mean" (the share of tokens with r < 1 - low and A < 0), "clip_ratio/high_mean",
            "clip_ratio/region_mean" (either), "clip_ratio/dual_mean" with `dual_clip`, "ratio", and "approx_kl", the
            mean of old_logp - logp. With level "sequence" every sequence counts alike.

    Returns:
        Scalar of `logp`'s dtype; value and gradient equal to those of separate rows.

    Raises:
        ForestError: an argument does not fit the forest, or a weight is negative.
        InputError: `clip` or `dual_clip` is out of range, or no such reduction or level.
        CoupledLossError: a sequence's ratio was asked for on some of a forest's edges.
    """
    check_logp(logp, forest)
    low, high = read_bounds(clip)
    if dual_clip is not None:
        check_number(dual_clip, "dual_clip", "greater than 1, or None", above=1, infinite=True)
    check_weights(forest, "the clipped policy loss")
    gains = _gains(forest, advantages, importance, reduction)
    ratios = compute_ratios(logp, forest, old_logp, level, groups, gains != 0)
    ratio = ratios.log.exp()
    if metrics is not None:
        _record_clips(metrics, ratios, _gains(forest, advantages, None, reduction), (low, high), dual_clip)
    positive, negative = ratios.collect(gains.clamp(min=0)), ratios.collect(gains.clamp(max=0))
    return -(positive * ratio.clamp(max=1 + high) + negative * _clamp(ratio, 1 - low, dual_clip)).sum()


def policy(
    logp: Tensor,
    forest: Forest,
    old_logp: PerEdge,
    advantages: PerRow,
    clip: float | tuple[float, float] = 0.2,
    reduction: Reduction = "token_mean",
) -> Tensor:
    """Compute the clipped policy loss of PPO with ratios of tokens: `clipped`, old name.

    Args:
        logp, forest, old_logp, advantages, clip, reduction: as for `clipped`.

    Returns:
        A scalar, the loss.

    Raises:
        ForestError, InputError: as for `clipped`.
    """
    return clipped(logp, forest, old_logp, advantages, clip, reduction)


def cispo(
    logp: Tensor,
    forest: Forest,
    old_logp: PerEdge | None,
    advantages: PerRow,
    clip: float | tuple[float, float] = (1.0, 4.0),
    reduction: Reduction = "token_mean",
    *,
    level: Level = "token",
    groups: Groups | None = None,
    importance: PerRow | None = None,
    metrics: Metrics | None = None,
) -> Tensor:
    """Compute the loss with clipped importance weights, which keeps every token's gradient.

    CISPO: MiniMax-M1 2025, arXiv 2506.13585.

    A row's term is -w A c logp with c = clamp(exp(logp - old_logp), 1 - low, 1 + high), through which no gradient goes.
    Given c it is linear in A: advantages are summed per edge where the rows of an edge have one c.

    Args:
        logp: [E], log-probability of every edge under the policy that is trained.
        forest: the forest; its weights weigh the predictions.
        old_logp: as in `clipped`.
        advantages: as in `clipped`.
        clip: bounds around 1; by default c is at most 5 and not bounded from below.
        reduction: defined in `treefx.losses`.
        level: the unit of the ratio in c, as in `clipped`; both levels of sequences are the same here.
        groups: as in `clipped`.
        importance: as in `clipped`.
        metrics: gets "cispo_clip_ratio", the share of tokens whose ratio is above 1 + high while A is positive.

    Returns:
        Scalar of `logp`'s dtype; value and gradient equal to those of separate rows.

    Raises:
        ForestError: an argument does not fit the forest.
        InputError: `clip` is out of range, or no such reduction or level.
        CoupledLossError: a sequence's ratio was asked for on some of a forest's edges.
    """
    check_logp(logp, forest)
    low, high = read_bounds(clip)
    gains = _gains(forest, advantages, importance, reduction)
    level = "sequence_token" if level == "sequence" else level
    ratios = compute_ratios(logp, forest, old_logp, level, groups, gains != 0)
    assert ratios.logp is not None, "the ratios of tokens stand next to their log-probabilities"
    ratio = ratios.log.detach().exp()
    if metrics is not None:
        sign = _gains(forest, advantages, None, reduction)
        weight, gaining = ratios.collect(ratios.weight), ratios.collect(ratios.weight * (sign > 0))
        metrics.add_sums("cispo_clip_ratio", (gaining * (ratio > 1 + high)).sum(), weight.sum())
    counts = ratios.collect((ratios.weight != 0).double()) > 0
    return -(ratios.collect(gains) * ratio.clamp(1 - low, 1 + high) * counted(ratios.logp, counts)).sum()


def _gains(forest: Forest, advantages: PerRow, importance: PerRow | None, reduction: Reduction) -> Tensor:
    """float64 [entries]: weight times advantage of every (edge, row) pair."""
    scale = entry_scale(forest, reduction)
    counts, entries = scale != 0, forest.edges.raw_index
    gains = scale * check_finite(read_per_row(advantages, forest, "advantages")[entries], "advantages", counts)
    if importance is None:
        return gains
    factors = check_finite(read_per_row(importance, forest, "importance")[entries], "importance", counts)
    if bool((counts & (factors < 0)).any()):
        raise InputError("importance must be at least 0: a ratio of probabilities; put signs into the advantages")
    return gains * factors


def _clamp(ratio: Tensor, low: float, dual_clip: float | None) -> Tensor:
    """Clamp the ratio of negative advantages to at least `low` and at most the dual clip."""
    return ratio.clamp(min=low) if dual_clip is None else ratio.clamp(min=low, max=dual_clip)


@torch.no_grad()
def _record_clips(
    metrics: Metrics, ratios: Ratios, gains: Tensor, clip: tuple[float, float], dual_clip: float | None
) -> None:
    ratio = ratios.seen.exp()
    weight = ratios.collect(ratios.weight)
    losing, gaining = (ratios.collect(ratios.weight * sign) for sign in (gains < 0, gains > 0))
    low, high = losing * (ratio < 1 - clip[0]), gaining * (ratio > 1 + clip[1])
    shares = {"low": low, "high": high, "region": low + high}
    if dual_clip is not None:
        shares["dual"] = losing * (ratio > dual_clip)
    for name, share in shares.items():
        metrics.add_sums(f"clip_ratio/{name}_mean", share.sum(), weight.sum())
    metrics.add("ratio", ratio, weight)
    metrics.add("approx_kl", -ratios.seen, weight)
