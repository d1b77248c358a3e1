"""The forms of all JSON that commands print with ``--json``, by name and version.

Every record begins with the key ``schema``; a command that prints a list prints records of one form. A change that old
readers cannot read gets another number.

==================================  ==================================================================
``treefx explain``                  ``treefx.report/1``: ``treefx.Report``
``treefx run --report``             ``treefx.report/1``, ``treefx.observation/1``: ``treefx.Observation``
``treefx doctor --zoo``             ``treefx.doctor.zoo/1``, a record per model
``treefx doctor --patches``         ``treefx.doctor.patches/1``, a record per symbol
``treefx plan --compare``           ``treefx.plan.strategies/1``, a record per strategy
``treefx plan --ranks``             ``treefx.plan.ranks/1``
``treefx bench NAME``               ``treefx.bench.NAME/1``, see ``treefx.cli.measurements``; mostly a list of records
others                              ``treefx.COMMAND/1``
==================================  ==================================================================
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from treefx.cli.json_schema import REST, json_schema
from treefx.cli.measurements import MEASUREMENTS

__all__ = ["json_schema_of", "names"]

_Scalar = str | int | float | bool | None
_Records = list[dict[str, Any]]

_DRIFT = {
    "rows": int, "tokens": int, "unshared_tokens": int, "border": int, "history": int, "template": int,
    "recorded": int, "places": _Records,
}  # fmt: skip
_FORMS: Mapping[str, Mapping[str, Any]] = {
    "treefx.data/1": {
        "path": str | None, "vocab_size": int | None, "skipped": int, "tasks": int, "conversations": int, "rows": int,
        "merged_rows": int, "raw_tokens": int, "merged_tokens": int, "tokens": int, "longest_row_tokens": int,
        "labelled_tokens": int, "sharing_ratio": float, "merged_ratio": float, "branching_ratio": float,
        "drift?": _DRIFT,
    },
    "treefx.demo/1": {
        "backend": str, "baseline": str, "raw_tokens": int, "tokens": int, "token_bound": float,
        "padded_share": float, "seconds": dict[str, float], "compile_seconds": dict[str, float], "speed_up": float,
        "median_speed_up": float, "loss_error": float, "gradient_errors": dict[str, float], "steps": _Records,
    },
    "treefx.doctor/1": {
        "python": str, "system": str, "torch": str | None, "backend registered": bool, "self-check?": float,
        "problems": list[str], REST: _Scalar,
    },
    "treefx.doctor.patches/1": {"symbol": str, "versions": str, "why": str, "test": str},
    "treefx.doctor.zoo/1": {
        "model": str, "library": str, "verdict": str, "loss_error": float | None, "gradient_error": float | None,
        "raw_tokens": int, "tokens": int, "distinct_tokens": int, "attention_rewritten": int, "packed_share": float,
        "packed_share_of_all": float, "expansions": _Records, "note": str | None,
        "float64_errors": tuple[float, float] | None, "batches": _Records, "compiles": int, "code": str,
        "line": str, "seconds": float, "exactness": float | None,
    },
    "treefx.fuzz/1": {
        "programs": int, "seconds": float, "classes": dict[str, int], "families": dict[str, dict[str, int]],
        "failures": _Records,
    },
    "treefx.inspect/1": {
        "stats": dict[str, Any], "gradient_error": float | None, "gradient_error_of": str | None,
        "eager_gradient_error": float | None, "not_compared": str | None,
    },
    "treefx.plan/1": {
        "tokens": int, "raw_tokens": int, "memory_limit_bytes": int, "peak_bytes": int, "recomputed_tokens": int,
        "seconds": float, "strategy": str, "unshared": _Records, "parts": _Records, "steps": _Records,
        "policies": _Records,
    },
    "treefx.plan.ranks/1": {
        "ranks": int, "idle_ranks": int, "balance": float, "distinct_tokens": int, "duplicated_tokens": int,
        "recomputed_tokens": int, "most_parts": int, "peak_bytes": int, "wire_bytes": int, "wire_seconds": float | None,
        "slowest_seconds": float, "mean_seconds": float, "seconds": float | None,
    },
    "treefx.plan.strategies/1": {
        "strategy": str, "refusal?": str, "parts?": int, "forward_tokens?": int, "peak_bytes?": int, "seconds?": float,
    },
    "treefx.simulate.t3/1": {
        "machine": dict[str, dict[str, Any]], "figures": _Records, "points": float, "sublayers": _Records,
    },
    "treefx.simulate.chunks/1": {"best_chunks": int, "seconds": dict[str, float]},
    **{f"treefx.bench.{name}/1": form for name, form in MEASUREMENTS.items()},
}  # fmt: skip


def names() -> list[str]:
    """All forms."""
    return ["treefx.report/1", "treefx.observation/1", *_FORMS]


def json_schema_of(name: str) -> dict[str, Any]:
    """The JSON Schema (draft 7) of a form.

    Args:
        name: As records have it under ``schema``.

    Raises:
        KeyError: There is no such form.
    """
    if name == "treefx.report/1":
        from treefx.inspection.report.report import Report

        return json_schema(name, Report)
    if name == "treefx.observation/1":
        from treefx.inspection.observation.observed import Observation

        return json_schema(name, Observation)
    return json_schema(name, _FORMS[name])
