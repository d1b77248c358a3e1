"""Compute terms added to a policy's loss: divergence from a reference, and entropy."""

from typing import Literal

import torch
from torch import Tensor

from treefx.errors import InputError
from treefx.forests.forest import Forest
from treefx.losses.metrics import Metrics
from treefx.losses.reading import PerEdge, check_logp, counted
from treefx.losses.reductions import Reduction, edge_scale, entry_scale
from treefx.losses.terms import align

__all__ = ["entropy", "kl"]

Estimator = Literal["k1", "k2", "k3"]
_NOT_ENTROPY = -1e-3
"""Rounding makes entropies of nearly certain tokens slightly negative; log-probabilities are far below."""


def kl(
    logp: Tensor,
    forest: Forest,
    ref_logp: PerEdge,
    estimator: Estimator = "k3",
    reduction: Reduction = "token_mean",
    *,
    old_logp: PerEdge | None = None,
    metrics: Metrics | None = None,
) -> Tensor:
    """Estimated divergence KL(policy || reference) of the tokens that were sampled.

    With d = logp - ref_logp, after Schulman, "Approximating KL divergence" (2020):

        k1 = d,  k2 = d^2 / 2,  k3 = exp(-d) - 1 + d

    A row's term depends on the row by its weight alone, so terms of an edge are one term with the sum of the weights,
    unless the rows of the edge gave unequal reference or old log-probabilities: then they stay one per row. As a loss
    k1 has no gradient on average; k2 has that of the divergence; k3 is GRPO's.

    Args:
        logp: [E], log-probability of every edge under the policy that is trained.
        forest: the forest; its weights weigh the predictions.
        ref_logp: of the reference: [E], or per row a vector as long as the row, or [B, T].
        estimator: "k1", "k2" or "k3".
        reduction: defined in `treefx.losses`.
        old_logp: of the policy that sampled, in the same forms as `ref_logp`. Each term is then multiplied by
            exp(logp - old_logp), gradient included, which makes the estimate unbiased (DeepSeek-V3.2 2025).
        metrics: gets "kl", the mean over tokens.

    Returns:
        Scalar of `logp`'s dtype; add it, times a coefficient, to the policy's loss.

    Raises:
        ForestError: an argument does not fit the forest.
        InputError: no such estimator or reduction.
    """
    check_logp(logp, forest)
    scale = entry_scale(forest, reduction)
    needed = scale != 0
    terms = align(logp, forest, ref_logp, "ref_logp", needed)
    if old_logp is None:
        values = _estimate(terms.log_ratio(needed), estimator)
    else:
        old = align(logp, forest, old_logp, "old_logp", needed)
        if terms.per_edge != old.per_edge:
            terms, old = terms.spread(), old.spread()
        values = _estimate(terms.log_ratio(needed), estimator) * old.log_ratio(needed).exp()
    if metrics is not None:
        metrics.add("kl", values, terms.collect(forest.edges.row_weight))
    return (terms.collect(scale) * values).sum()


def _estimate(difference: Tensor, estimator: Estimator) -> Tensor:
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return difference.square() / 2
    if estimator == "k3":
        return torch.expm1(-difference) + difference
    raise InputError(f"estimator must be 'k1', 'k2' or 'k3', got {estimator!r}")


def entropy(
    entropies: Tensor, forest: Forest, reduction: Reduction = "token_mean", *, metrics: Metrics | None = None
) -> Tensor:
    """Compute the entropy of the policy, a bonus.

    Subtract it, times a coefficient, from the loss.

    It is a sum over edges of sum_b w_b H: the distribution at a token is the same for all rows through it.

    Args:
        entropies: [E], from `treefx.edge_entropy`; log-probabilities of the sampled tokens will not do, since the
            gradient of their mean is no estimate of the entropy's.
        forest: the forest; its weights weigh the predictions.
        reduction: defined in `treefx.losses`.
        metrics: gets "entropy", the mean over tokens.

    Returns:
        Scalar of the entropies' dtype, in nats.

    Raises:
        ForestError: the entropies do not fit the forest.
        InputError: they are negative, or no such reduction.
    """
    check_logp(entropies, forest, "entropy", "edge_entropy")
    if bool((entropies < _NOT_ENTROPY).any()):
        raise InputError("entropies are at least 0, got negative numbers: log-probabilities? use treefx.edge_entropy")
    if metrics is not None:
        metrics.add("entropy", entropies, forest.edges.weight)
    scale = edge_scale(forest, reduction).to(entropies.dtype)
    return (scale * counted(entropies, scale != 0)).sum()
