"""Predict the cost of a step on many ranks, with every share planned under the limit."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from treefx.arguments import check_number
from treefx.forests.forest import Forest
from treefx.planning.cost.model import CostModel
from treefx.planning.search.plan import Plan
from treefx.planning.search.planner import plan
from treefx.scale.assign import Assignment, shard_rows

__all__ = ["Step", "predict_step"]


@dataclass(frozen=True, eq=False)
class Step:
    """Hold a predicted training step.

    Attributes:
        assignment: the forests of all ranks.
        plans: of every rank with rows; they exclude the all-reduce of gradients at the end.
        resident_bytes: bytes of the parameters and gradients of the model, whole.
        link_bytes_per_second: bytes that a rank sends per second while it receives as many; None: gradients travel in
            no time.
    """

    assignment: Assignment
    plans: dict[int, Plan]
    resident_bytes: float
    link_bytes_per_second: float | None = None

    def __post_init__(self) -> None:
        if self.link_bytes_per_second is not None:
            check_number(
                self.link_bytes_per_second, "link_bytes_per_second", "above 0, or None", above=0, infinite=True
            )

    @property
    def wire_bytes(self) -> float:
        """Return the bytes that every rank sends, with ring collectives.

        DDP: gradients reduced and passed round. FSDP2: parameters gathered and gradients reduced, which is as much, as
        parameters are as large as their gradients.
        """
        ranks = len(self.assignment)
        return self.resident_bytes * (ranks - 1) / ranks

    @property
    def wire_seconds(self) -> float:
        """Return the seconds of that transfer, not overlapped with computation."""
        return self.wire_bytes / self.link_bytes_per_second if self.link_bytes_per_second else 0.0

    @property
    def seconds(self) -> float:
        """Predicted seconds of the step: those of the slowest rank, then of the exchange."""
        return max(found.seconds for found in self.plans.values()) + self.wire_seconds

    def to_dict(self) -> dict[str, Any]:
        """Return the figures, for JSON."""
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
            "wire_bytes": self.wire_bytes,
            "wire_seconds": self.wire_seconds,
            "slowest_seconds": max(seconds),
            "mean_seconds": float(np.sum(seconds)) / len(self.assignment),
            "seconds": self.seconds,
        }


def predict_step(
    forest: Forest, ranks: int, cost: CostModel, memory_limit_bytes: int, *, link_bytes_per_second: float | None = None
) -> Step:
    """Assign a forest to ranks and plan each one's share.

    Args:
        forest: all rows of the step.
        ranks: number of processes.
        cost: of the model on one of them.
        memory_limit_bytes: most bytes on one of them.
        link_bytes_per_second: see `Step`.

    Returns:
        The assignment, the plans of all ranks, and the predicted seconds and bytes.

    Raises:
        MemoryLimitError: a rank's share has no plan within the limit.
        InputError: an argument of the wrong value.
    """
    shares = shard_rows(forest, ranks, cost)
    busy = [rank for rank, rows in enumerate(shares.split.rows) if len(rows)]
    plans = {rank: plan(shares[rank], cost, memory_limit_bytes) for rank in busy}
    return Step(shares, plans, cost.resident_bytes, link_bytes_per_second)
