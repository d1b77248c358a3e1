"""Compute treefx's metrics for the logs of trainers."""

from collections.abc import Mapping
from typing import Any

from treefx.runtime.observed.tallies import StepTally

__all__ = ["metrics_of", "metrics_of_step"]


def metrics_of(stats: Mapping[str, Any]) -> dict[str, float]:
    """Return the last step's sharing, whether its last call fell back, and compilations.

    Compilations count from the beginning of the run.

    Args:
        stats: Of ``treefx.inspect(model)``.
    """
    return {
        "treefx/sharing": stats["step_sharing_ratio"] or stats["sharing_ratio"],
        "treefx/sharing_possible": stats["sharing_possible"] or stats["possible_ratio"] or stats["sharing_ratio"],
        "treefx/fallback": float(stats["fallback"] is not None),
        "treefx/compiles": float(stats["compiles"]),
        "treefx/compile_seconds": float(sum(stats["seconds"].values())),
    }


def metrics_of_step(step: StepTally) -> dict[str, float]:
    """Return the actual and the possible sharing of an observed step.

    Args:
        step: The last one of ``treefx.runtime.observed``.
    """
    return {
        "treefx/observed_raw_tokens": float(step.raw_tokens),
        "treefx/observed_distinct_tokens": float(step.step_tokens),
        "treefx/observed_sharing": step.raw_tokens / max(1, step.call_tokens),
        "treefx/observed_sharing_possible": step.raw_tokens / max(1, step.step_tokens),
    }
