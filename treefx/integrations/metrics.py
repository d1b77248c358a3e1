"""What trainers log of treefx beside their own metrics."""

from collections.abc import Mapping
from typing import Any

from treefx.runtime.observed.tallies import StepTally

__all__ = ["metrics_of", "metrics_of_step"]


def metrics_of(stats: Mapping[str, Any]) -> dict[str, float]:
    """Sharing of the last optimizer step, whether its last call fell back, compilations of the run so far.

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
    """What an observed step shares, and could share: treefx changed nothing.

    Args:
        step: The last one of ``treefx.runtime.observed``.
    """
    return {
        "treefx/observed_raw_tokens": float(step.raw_tokens),
        "treefx/observed_distinct_tokens": float(step.step_tokens),
        "treefx/observed_sharing": step.raw_tokens / max(1, step.call_tokens),
        "treefx/observed_sharing_possible": step.raw_tokens / max(1, step.step_tokens),
    }
