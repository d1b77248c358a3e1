"""Losses over pairs of a chosen and a rejected row: DPO, IPO, SimPO, ORPO.

Each reads the log-probability of whole rows, L_b = sum_t w[b,t] logp[b,t] with the forest's weights: 1 for the tokens
of the answer and 0 for the prompt's. The shared prefix of a pair cancels in L_chosen - L_rejected; its gradient is
exactly 0 where the weights of both rows are equal. A row may stand in many pairs; it is computed once.
"""

from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from treefx.arguments import check_number
from treefx.errors import InputError
from treefx.forests.forest import Forest
from treefx.losses.metrics import Metrics
from treefx.losses.reading import PerEdge
from treefx.losses.rows import PairReduction, Pairs, read_pairs, reduce_rows, ref_sums, row_sums, row_totals

__all__ = ["dpo", "ipo", "orpo", "simpo"]


def dpo(
    logp: Tensor,
    forest: Forest,
    ref_logp: PerEdge,
    pairs: Pairs,
    beta: float = 0.1,
    *,
    label_smoothing: float = 0.0,
    reduction: PairReduction = "mean",
    metrics: Metrics | None = None,
) -> Tensor:
    """Direct preference optimisation (Rafailov et al. 2023, equation 7).

    With h = (L_chosen - ref L_chosen) - (L_rejected - ref L_rejected), a pair's term is -log sigmoid(beta h); with
    label smoothing s it is -(1 - s) log sigmoid(beta h) - s log sigmoid(-beta h) (conservative DPO: Mitchell 2023).

    Args:
        logp: [E], log-probability of every edge under the policy that is trained.
        forest: the forest; its weights say which tokens a row's log-probability counts.
        ref_logp: of the reference: [E], or per row a vector as long as the row, or [B, T].
        pairs: [P, 2] row numbers, (chosen, rejected); where chosen rows come first and the rejected ones after them, as
            in TRL's batches, `[(i, i + P) for i in range(P)]`.
        beta: greater than 0.
        label_smoothing: probability that a label is wrong, from 0 to below 0.5.
        reduction: "mean" or "sum" over the pairs.
        metrics: gets, as means over pairs, "rewards/chosen", "rewards/rejected" (beta times the log-ratio to the
            reference), "rewards/accuracies", "rewards/margins", "logps/chosen" and "logps/rejected".

    Returns:
        Scalar of `logp`'s dtype; value and gradient equal to those of separate rows.

    Raises:
        ForestError: an argument does not fit the forest.
        InputError: a number is out of range, or no such reduction.
        CoupledLossError: called on some of a forest's edges.
    """
    _check_positive(beta, "beta")
    sums = row_sums(logp, forest, "dpo")
    log_ratio = sums - ref_sums(ref_logp, forest).to(sums.dtype)
    chosen, rejected = read_pairs(pairs, forest)
    if metrics is not None:
        _record_pairs(metrics, beta * log_ratio, sums, chosen, rejected)
    return reduce_rows(
        _preference(beta * (log_ratio[chosen] - log_ratio[rejected]), label_smoothing), forest, reduction
    )


def ipo(
    logp: Tensor,
    forest: Forest,
    ref_logp: PerEdge,
    pairs: Pairs,
    beta: float = 0.1,
    *,
    length_normalized: bool = True,
    reduction: PairReduction = "mean",
    metrics: Metrics | None = None,
) -> Tensor:
    """Compute the loss of identity preference optimisation, (h - 1 / (2 beta))^2.

    Azar et al. 2024, equation 17; h as in `dpo`.

    Args:
        logp: as in `dpo`.
        forest: as in `dpo`.
        ref_logp: as in `dpo`.
        pairs: as in `dpo`.
        beta: the paper's tau, greater than 0.
        length_normalized: whether each row's log-ratio is divided by its weights, so that h compares means over tokens,
            as TRL has it after its authors; the paper's text has sums.
        reduction: "mean" or "sum" over the pairs.
        metrics: as in `dpo`.

    Returns:
        Scalar of `logp`'s dtype; value and gradient equal to those of separate rows.

    Raises:
        ForestError: an argument does not fit the forest, or a compared row has no weight to divide by.
        InputError: `beta` is out of range, or no such reduction.
        CoupledLossError: called on some of a forest's edges.
    """
    _check_positive(beta, "beta")
    chosen, rejected = indices = read_pairs(pairs, forest)
    sums, reference = row_sums(logp, forest, "ipo"), ref_sums(ref_logp, forest)
    log_ratio = scores = sums - reference.to(sums.dtype)
    if length_normalized:
        scores = log_ratio / row_totals(forest, "ipo", indices).to(sums.dtype)
    if metrics is not None:
        _record_pairs(metrics, beta * log_ratio, sums, chosen, rejected)
    return reduce_rows((scores[chosen] - scores[rejected] - 1 / (2 * beta)).square(), forest, reduction)


def simpo(
    logp: Tensor,
    forest: Forest,
    pairs: Pairs,
    beta: float = 2.0,
    gamma: float = 1.0,
    *,
    label_smoothing: float = 0.0,
    reduction: PairReduction = "mean",
    metrics: Metrics | None = None,
) -> Tensor:
    """Simple preference optimisation (Meng et al. 2024, equation 6), without a reference.

    With M_b = L_b / W_b, the mean over the row's tokens, a pair's term is

        -log sigmoid(beta (M_chosen - M_rejected) - gamma)

    Args:
        logp: as in `dpo`.
        forest: as in `dpo`.
        pairs: as in `dpo`.
        beta: greater than 0.
        gamma: the margin, at least 0.
        label_smoothing: as in `dpo`.
        reduction: "mean" or "sum" over the pairs.
        metrics: as in `dpo`, of means over tokens; rewards are beta M.

    Returns:
        Scalar of `logp`'s dtype; value and gradient equal to those of separate rows.

    Raises:
        ForestError: an argument does not fit the forest, or a compared row has no weight to divide by.
        InputError: a number is out of range, or no such reduction.
        CoupledLossError: called on some of a forest's edges.
    """
    _check_positive(beta, "beta")
    check_number(gamma, "gamma", "a finite number")
    chosen, rejected = indices = read_pairs(pairs, forest)
    means = row_sums(logp, forest, "simpo") / row_totals(forest, "simpo", indices).to(logp.dtype)
    if metrics is not None:
        _record_pairs(metrics, beta * means, means, chosen, rejected)
    return reduce_rows(
        _preference(beta * (means[chosen] - means[rejected]) - gamma, label_smoothing), forest, reduction
    )


def orpo(
    logp: Tensor,
    forest: Forest,
    pairs: Pairs,
    beta: float = 0.1,
    *,
    nll: Literal["row_mean", "token_mean"] | None = "row_mean",
    reduction: PairReduction = "mean",
    metrics: Metrics | None = None,
) -> Tensor:
    """Compute the loss of odds ratio preference optimisation, without a reference.

    Hong et al. 2024, equations 4 to 7.

    With M_b = L_b / W_b and log odds o_b = M_b - log(1 - exp(M_b)), a pair's term is

        nll - beta log sigmoid(o_chosen - o_rejected)

    Args:
        logp: as in `dpo`.
        forest: as in `dpo`.
        pairs: as in `dpo`.
        beta: the paper's lambda, greater than 0.
        nll: the likelihood of the chosen rows: "row_mean", nll = -M_chosen; "token_mean", the mean over all of their
            tokens, as TRL has it; None leaves it out.
        reduction: "mean" or "sum" over the pairs.
        metrics: as in `dpo`, of means over tokens, rewards being beta M; also "nll_loss", "log_odds_chosen" (mean of
            o_chosen - o_rejected) and "log_odds_ratio" (mean of its log sigmoid).

    Returns:
        Scalar of `logp`'s dtype; value and gradient equal to those of separate rows.

    Raises:
        ForestError: an argument does not fit the forest, or a compared row has no weight to divide by.
        InputError: `beta` is out of range, or no such reduction.
        CoupledLossError: called on some of a forest's edges.
    """
    _check_positive(beta, "beta")
    chosen, rejected = indices = read_pairs(pairs, forest)
    totals = row_totals(forest, "orpo", indices).to(logp.dtype)
    sums = row_sums(logp, forest, "orpo")
    means = sums / totals
    difference = _log_odds(means[chosen]) - _log_odds(means[rejected])
    likelihood = _likelihood(sums[chosen], totals[chosen], nll)
    if metrics is not None:
        _record_pairs(metrics, beta * means, means, chosen, rejected)
        found = {"nll_loss": likelihood, "log_odds_chosen": difference, "log_odds_ratio": logsigmoid(difference)}
        for name, values in found.items():
            metrics.add(name, values, torch.ones_like(values))
    return reduce_rows(likelihood - beta * logsigmoid(difference), forest, reduction)


def _preference(margin: Tensor, label_smoothing: float) -> Tensor:
    """Compute -log of the probability of the pair's label.

    With some probability the label is the other way round.
    """
    check_number(label_smoothing, "label_smoothing", "from 0 to below 0.5", least=0, below=0.5)
    return -(1 - label_smoothing) * logsigmoid(margin) - label_smoothing * logsigmoid(-margin)


def _log_odds(logp: Tensor) -> Tensor:
    """log(p / (1 - p)), accurate for p near 0 and near 1."""
    near_one = logp > -0.6931471805599453
    # Each form on its own side only: outside of it the gradient would be infinite times 0.
    inside = torch.log(-torch.expm1(logp.where(near_one, -0.5)))
    outside = torch.log1p(-torch.exp(logp.where(~near_one, -1.0)))
    return logp - torch.where(near_one, inside, outside)


def _likelihood(sums: Tensor, totals: Tensor, nll: str | None) -> Tensor:
    """Return [P], with the negative log-likelihood of the chosen rows as its mean."""
    if nll is None:
        return torch.zeros_like(sums)
    if nll == "row_mean":
        return -sums / totals
    if nll == "token_mean":
        return -sums * len(sums) / totals.sum()
    raise InputError(f"nll must be 'row_mean', 'token_mean' or None, got {nll!r}")


def _record_pairs(metrics: Metrics, rewards: Tensor, logps: Tensor, chosen: Tensor, rejected: Tensor) -> None:
    better, worse = rewards.detach()[chosen], rewards.detach()[rejected]
    found = {
        "rewards/chosen": better,
        "rewards/rejected": worse,
        "rewards/accuracies": better > worse,
        "rewards/margins": better - worse,
        "logps/chosen": logps[chosen],
        "logps/rejected": logps[rejected],
    }
    for name, values in found.items():
        metrics.add(name, values, torch.ones_like(better))


def _check_positive(value: float, name: str) -> None:
    check_number(value, name, "greater than 0", above=0)
