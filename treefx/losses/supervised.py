"""Weighted likelihood of the rows."""

from torch import Tensor

from treefx.forests.forest import Forest
from treefx.losses.reading import check_logp, counted
from treefx.losses.reductions import Reduction, edge_scale

__all__ = ["sft"]


def sft(logp: Tensor, forest: Forest, reduction: Reduction = "sum") -> Tensor:
    """Weighted negative log-likelihood of all rows, each distinct prediction computed once.

    Args:
        logp: [E], log-probability of every edge, from `edge_logprobs`.
        forest: the forest; its weights weigh the predictions.
        reduction: "sum", "token_mean", "row_mean", `Constant` or `PromptMean`, defined in `treefx.losses`.

    Returns:
        Scalar of `logp`'s dtype; value and gradient equal to those of separate rows.

    Raises:
        ForestError: `logp` does not fit the forest, or the weights of a mean sum to 0 but are not all 0.
        InputError: no such reduction.
    """
    check_logp(logp, forest)
    scale = edge_scale(forest, reduction).to(logp.dtype)
    return -(scale * counted(logp, scale != 0)).sum()
