"""What a step would cost on many ranks, on paper: every rank's share planned under the memory limit."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from treefx.forests.forest import Forest
from treefx.planning.cost.model import CostModel
from treefx.planning.search.plan import Plan
from treefx.planning.search.planner import plan
from treefx.scale.assign import Assignment, assign

__all__ = ["Step", "predict_step"]


@dataclass(frozen=True, eq=False)
class Step:
    """A training step on paper.

    Attributes:
        assignment: the forests of all ranks.
        plans: of every rank with rows of its own; the exchange of gradients, when the last has ended, is not in them.
    """

    assignment: Assignment
    plans: dict[int, Plan]

    @property
    def seconds(self) -> float:
        """Predicted time of the step: that of the slowest rank."""
        return max(found.seconds for found in self.plans.values())

    def to_dict(self) -> dict[str, Any]:
        """The figures, for JSON."""
        split = self.assignment.split
        seconds = [found.seconds for found in self.plans.values()]
        return {
            "ranks": len(self.assignment),
            "idle_ranks": len(self.assignment) - len(self.plans),
            "balance": split.balance,
            "distinct_tokens": split.distinct_tokens,
            "duplicated_tokens": int(split.tokens[list(self.plans)].sum()) - split.distinct_tokens,
            "recomputed_tokens": sum(found.recomputed_tokens for found in self.plans.values()),
            "most_parts": max(len(found.parts) for found in self.plans.values()),
            "peak_bytes": max(found.peak_bytes for found in self.plans.values()),
            "seconds": self.seconds,
            "mean_seconds": float(np.sum(seconds)) / len(self.assignment),
        }


def predict_step(forest: Forest, ranks: int, cost: CostModel, memory_limit_bytes: int) -> Step:
    """Assign a forest to ranks and plan each one's share.

    Args:
        forest: all rows of the step.
        ranks: number of processes.
        cost: of the model on one of them.
        memory_limit_bytes: of one of them.

    Raises:
        MemoryLimitError: a rank's share has no plan within the limit.
        InputError: an argument of the wrong value.
    """
    shares = assign(forest, ranks, cost)
    busy = [rank for rank, rows in enumerate(shares.split.rows) if len(rows)]
    return Step(shares, {rank: plan(shares[rank], cost, memory_limit_bytes) for rank in busy})
