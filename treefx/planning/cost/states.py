"""Price the states of recurrences: bytes per state that crosses a cut, and per chain of a part.

A state of a recurrence is as large as the keys and values of many tokens. It enters a part once per path
(``treefx.passes.cuts.boundary_states``), leaves it once per token that parts below hang on, and is computed at the end
of each chain, a run of tokens without a fork.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

__all__ = ["FEWEST_STATES", "PerRun", "StateCost"]

FEWEST_STATES = 2
"""Compiled graphs take at least so many states, zeros where fewer enter or leave."""


class PerRun(NamedTuple):
    """Bytes between forward and backward, and at the peaks of the three runs."""

    saved: float
    forward: float
    backward: float
    kv: float


@dataclass(frozen=True, kw_only=True)
class StateCost:
    """Bytes of one state of every recurrence of a model.

    Attributes:
        state_bytes: of the copy that parts below read.
        gradient_bytes: the accumulators of its gradient.
        entering: per state that enters a part.
        leaving: per state that leaves it, besides the state.
        chain: per chain of a part after the first.
    """

    state_bytes: float
    gradient_bytes: float
    entering: PerRun
    leaving: PerRun
    chain: PerRun

    def run_bytes(self, sizes: Any) -> dict[str, Any]:
        """Bytes of a part, or of all parts, on top of what its tokens take: by the names of `PerRun`.

        Args:
            sizes: has `entering`, `leaving` and `chains` of `Size`, a number or an array each.
        """
        given, left = (np.maximum(count, FEWEST_STATES) for count in (sizes.entering, sizes.leaving))
        terms = zip(self.entering, self.leaving, self.chain, strict=True)
        return dict(zip(PerRun._fields, (given * a + left * b + sizes.chains * c for a, b, c in terms), strict=True))

    def handed_bytes(self, sizes: Any) -> Any:
        """Bytes of the states that a run of a part hands out."""
        return self.state_bytes * np.maximum(sizes.leaving, FEWEST_STATES)

    def sum_bytes(self, sizes: Any) -> Any:
        """Bytes of the accumulators of their gradients, which parts with children have."""
        return self.gradient_bytes * np.where(sizes.leaving > 0, np.maximum(sizes.leaving, FEWEST_STATES), 0)
