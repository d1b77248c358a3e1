"""Importance weights for rollouts that another program, or an older policy, sampled."""

from typing import Literal

import torch
from torch import Tensor

from treefx.errors import InputError
from treefx.forests.forest import Forest
from treefx.forests.subset import EdgeSubset
from treefx.losses.metrics import Metrics
from treefx.losses.reading import PerEdge, check_finite, read_per_edge, read_per_token

__all__ = ["importance_weights"]


def importance_weights(
    old_logp: PerEdge,
    sampling_logp: PerEdge,
    forest: Forest,
    bounds: tuple[float, float] = (0.0, 2.0),
    *,
    mode: Literal["truncate", "mask"] = "truncate",
    level: Literal["token", "sequence"] = "token",
    metrics: Metrics | None = None,
) -> list[Tensor]:
    """Compute truncated importance weights p_old / p_sampling, without gradient.

    TIS: Yao et al. 2025.

    The engine that samples and the one that trains give the same token slightly different probabilities. The losses
    take the result as `importance=`; it multiplies a term and never counts in the divisor of a mean. The weights differ
    from row to row, and so do their products: they are summed into (A+, A-) with the advantages.

    Args:
        old_logp: by the model that is trained, before the step: [E], or per row a vector as long as the row, or [B, T].
        sampling_logp: by the engine that sampled, in the same forms as `old_logp`.
        forest: the forest. Tokens of weight 0 were not sampled: they are left out, and their weight is 1.
        bounds: smallest and largest weight.
        mode: treatment of weights out of bounds: "truncate" moves them to the bound, "mask" to 0.
        level: "token", or "sequence": the product over the row's sampled tokens, the same for all of them.
        metrics: gets "importance" (mean weight) and "importance/outside" (share of tokens outside of the bounds).

    Returns:
        Per row a float64 vector as long as the row, [length].

    Raises:
        ForestError: an argument does not fit the forest, or is not finite where a token was sampled.
        InputError: `bounds`, `mode` or `level` is none.
    """
    low, high = bounds
    if not 0 <= low < high:
        raise InputError(f"bounds must be (low, high) with 0 <= low < high, got {bounds}")
    if mode not in ("truncate", "mask") or level not in ("token", "sequence"):
        raise InputError(f"expected mode 'truncate' or 'mask', level 'token' or 'sequence', got {mode!r}, {level!r}")
    forest = forest.uncut if isinstance(forest, EdgeSubset) else forest
    sampled = forest.raw_weight != 0
    old, sampling = (_to_raw(x, forest, name) for x, name in ((old_logp, "old_logp"), (sampling_logp, "sampling_logp")))
    difference = torch.where(sampled, old - sampling, 0.0)
    if level == "sequence":
        sums = torch.segment_reduce(difference, "sum", offsets=forest.row_offsets)
        difference = torch.repeat_interleave(sums, forest.row_lengths)
    ratio = torch.where(sampled, difference.exp(), 1.0)
    outside = sampled & ((ratio < low) | (ratio > high))
    weights = ratio.clamp(low, high) if mode == "truncate" else ratio.where(~outside, 0.0)
    weights = weights.where(sampled, 1.0)
    if metrics is not None:
        metrics.add("importance", weights, forest.raw_weight)
        metrics.add("importance/outside", outside, forest.raw_weight)
    return list(torch.split(weights, forest.row_lengths.tolist()))


def _to_raw(values: PerEdge, forest: Forest, name: str) -> Tensor:
    """float64 [raw], finite where a token was sampled."""
    per_edge = read_per_edge(values, forest)
    if per_edge is None:
        raw = read_per_token(values, forest, name)
    else:
        edges = forest.edges
        raw = torch.zeros_like(forest.raw_weight)
        raw[edges.raw_index] = per_edge[edges.edge_of_entry].double()
    return check_finite(raw, name, forest.raw_weight != 0)
