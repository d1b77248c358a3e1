"""What trainers log of treefx beside their own metrics."""

from collections.abc import Mapping
from typing import Any

__all__ = ["metrics_of"]


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
