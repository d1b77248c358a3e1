"""Losses over rows that are each judged good or bad: KTO."""

from collections.abc import Sequence

import torch
from torch import Tensor

from treefx.arguments import check_number
from treefx.errors import ForestError, InputError
from treefx.forests.forest import Forest
from treefx.losses.metrics import Metrics
from treefx.losses.reading import PerEdge
from treefx.losses.rows import PairReduction, reduce_rows, ref_sums, row_sums

__all__ = ["kto"]


def kto(
    logp: Tensor,
    forest: Forest,
    ref_logp: PerEdge,
    desirable: Tensor | Sequence[bool],
    beta: float = 0.1,
    *,
    kl: float | Tensor | None = None,
    kl_rows: Tensor | Sequence[int] | None = None,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
    reduction: PairReduction = "mean",
    metrics: Metrics | None = None,
) -> Tensor:
    """Kahneman-Tversky optimisation (Ethayarajh et al. 2024, arXiv 2402.01306).

    With h_b = L_b - ref L_b, L_b = sum_t w[b,t] logp[b,t], and the reference point z, a row's term is

        desirable_weight (1 - sigmoid(beta (h_b - z)))      for a desirable row
        undesirable_weight (1 - sigmoid(beta (z - h_b)))    for another one

    z estimates the divergence from the reference, max(0, mean of h) over prompts with answers to other prompts, and has
    no gradient. Such mismatched rows may stand in the same forest, where they share the prompts of the others.

    Args:
        logp: [E], log-probability of every edge under the policy that is trained.
        forest: the forest; its weights say which tokens a row's log-probability counts.
        ref_logp: of the reference: [E], or per row a vector as long as the row, or [B, T].
        desirable: bool [R]; entries of `kl_rows` are not used.
        beta: greater than 0.
        kl: z itself, a scalar of at least 0: from elsewhere, or 0.0 for no reference point. Either this or `kl_rows`.
        kl_rows: int [k], numbers of the mismatched rows, which have no term of their own.
        desirable_weight: the paper's lambda_D.
        undesirable_weight: lambda_U.
        reduction: "mean" or "sum" over the judged rows.
        metrics: gets "kl" (z), and means over rows "rewards/chosen", "rewards/rejected" (beta h), "logps/chosen" and
            "logps/rejected", chosen being the desirable ones.

    Returns:
        Scalar of `logp`'s dtype; value and gradient equal to those of separate rows.

    Raises:
        ForestError: an argument does not fit the forest.
        InputError: a number is out of range, no such reduction, or not one of `kl` and `kl_rows`.
        CoupledLossError: called on some of a forest's edges.
    """
    check_number(beta, "beta", "greater than 0", above=0)
    check_number(desirable_weight, "desirable_weight", "a finite number of at least 0", least=0)
    check_number(undesirable_weight, "undesirable_weight", "a finite number of at least 0", least=0)
    good, other = _read_judgements(desirable, forest), _read_rows(kl_rows, forest)
    sums = row_sums(logp, forest, "kto")
    log_ratio = sums - ref_sums(ref_logp, forest).to(sums.dtype)
    point = _reference_point(log_ratio.detach(), kl, other)
    judged = torch.full_like(good, forest.share is None or not forest.share.is_idle)
    if other is not None:
        judged[other] = False
    gain = torch.where(good, log_ratio - point, point - log_ratio)
    lost = 1 - torch.sigmoid(beta * gain)
    values = torch.where(good, desirable_weight * lost, undesirable_weight * lost)
    if metrics is not None:
        _record(metrics, point, beta * log_ratio, sums, {"chosen": judged & good, "rejected": judged & ~good})
    return reduce_rows(values[judged], forest, reduction)


def _reference_point(log_ratio: Tensor, kl: float | Tensor | None, rows: Tensor | None) -> Tensor:
    if (kl is None) == (rows is None):
        raise InputError(
            "kto needs one reference point: numbers of mismatched rows as kl_rows=, or a number as kl= (0.0 for none)"
        )
    if rows is not None:
        return log_ratio[rows].mean().clamp(min=0)
    return log_ratio.new_tensor(check_number(kl, "kl", "one number of at least 0", least=0))


def _read_judgements(desirable: Tensor | Sequence[bool], forest: Forest) -> Tensor:
    values = torch.as_tensor(desirable, device=forest.device)
    if values.shape != (len(forest),) or values.dtype != torch.bool:
        got = f"{values.dtype} {list(values.shape)}"
        raise ForestError(f"desirable must be one bool per row, [{len(forest)}], got {got}")
    return values


def _read_rows(rows: Tensor | Sequence[int] | None, forest: Forest) -> Tensor | None:
    if rows is None:
        return None
    values = torch.as_tensor(rows, device=forest.device)
    inside = values.ndim == 1 and len(values) > 0 and not values.is_floating_point() and values.dtype != torch.bool
    if not inside or not bool(((values >= 0) & (values < len(forest))).all()):
        raise ForestError(f"kl_rows must be row numbers from 0 to {len(forest) - 1}, at least one, got {rows}")
    if len(torch.unique(values)) == len(forest):
        raise ForestError("kl_rows are all rows of the forest: none is left to be judged")
    return values.to(torch.int64)


def _record(metrics: Metrics, point: Tensor, rewards: Tensor, logps: Tensor, kinds: dict[str, Tensor]) -> None:
    metrics.add("kl", point, torch.ones_like(point))
    for name, rows in kinds.items():
        metrics.add(f"rewards/{name}", rewards, rows)
        metrics.add(f"logps/{name}", logps, rows)
