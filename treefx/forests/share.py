"""Describe one rank's share of the rows of a step; means divide by the whole step."""

from dataclasses import dataclass

from torch import Tensor

__all__ = ["Share"]


@dataclass(frozen=True, eq=False)
class Share:
    """Name a forest's rows within a whole step, and the facts losses need of the rest.

    With the whole step's denominators, "token_mean", "row_mean" and the like add up over the ranks to the loss of the
    whole, value and gradient.

    Attributes:
        rows: int64 [R], the forest's rows among those of the whole, ascending.
        row_weight: float64 [W], sum of every row's weights, of all W rows.
        has_weight: bool [W], whether a row has any weight that is not 0.
        is_idle: whether nothing of the whole is left for this rank: its one row has weight 0, so that the rank takes
            part in every collective and adds nothing.
    """

    rows: Tensor
    row_weight: Tensor
    has_weight: Tensor
    is_idle: bool = False

    def __len__(self) -> int:
        """Number W of rows of the whole."""
        return len(self.row_weight)
