"""Hold the inputs of an LM head's loss."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["HeadLoss", "accumulate_dtype", "loss_of_picks"]


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of sums: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@dataclass(frozen=True)
class HeadLoss:
    """Hold picks of logits z = scale * cap(hidden weight^T + bias).

    cap(x) = softcap * tanh(x / softcap).

    Attributes:
        hidden: [N, H].
        weight: [V, H], of hidden's dtype.
        bias: [V] or None.
        slot: int64 [R], rows of hidden; a negative one picks nothing.
        token: int64 [R], entries of the vocabulary; a negative one picks nothing.
        scale: one over the temperature.
        softcap: None for no cap.
        chunk: entries of the vocabulary per step; 0 for the default.
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    slot: Tensor
    token: Tensor
    scale: float
    softcap: float | None
    chunk: int

    def rows_of_picks(self) -> Tensor:
        """Return the row of each pick [R], N for a pick of nothing."""
        return torch.where((self.slot >= 0) & (self.token >= 0), self.slot, len(self.hidden))

    def sums_of_rows(self, of_picks: Tensor) -> Tensor:
        """Return the sums [N] of numbers [R] over the picks of each row."""
        zeros = of_picks.new_zeros(len(self.hidden) + 1)
        return zeros.index_add_(0, self.rows_of_picks(), of_picks)[:-1]


def loss_of_picks(lse: Tensor, row: Tensor, chosen: Tensor) -> Tensor:
    """Return lse[row] - chosen [R]; 0 for an empty pick, with row N and logit 0."""
    return torch.cat([lse, lse.new_zeros(1)])[row] - chosen  # there may be no row at all
