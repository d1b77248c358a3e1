"""The forms of the records of ``treefx bench``, by command. A field whose name ends with "?" may be missing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from treefx.cli.json_schema import REST

__all__ = ["MEASUREMENTS"]

_WAYS = ("forward", "backward")
_OPTIONAL_FLOAT = float | None
_FIGURE_OR_NONE = float | str
"""A trainer's figure; "" where it does not apply."""
_ERRORS = dict[str, float]


def _times(*methods: str, optional: bool = False) -> dict[str, Any]:
    return {f"{method}_{way}_ms{'?' * optional}": float for method in methods for way in _WAYS}


_ON_GPU: Mapping[str, Any] = {
    **{f"{name}_{way}_tflops?": float for name in ("tree", "flex", "flash") for way in _WAYS},
    **{f"{name}_over_tree_{way}?": float for name in ("flex", "flash", "rows") for way in _WAYS},
    "visible_pairs?": int, "device?": str, "tree_first_call_s?": float, "compiled?": int,
    "slowest_compilation_s?": float, "compiled_for_another_length?": int, "warnings?": list[str],
    "tree_errors?": _ERRORS, "rows_errors?": _ERRORS,
    "wrong?": list[str], "tree_host_ms?": float, "rows?": str, "matmul_tflops?": float,
    "copy_tb_per_s?": float, "total_s?": float, "lost?": bool, "path?": str,
}  # fmt: skip
"""Fields in addition to those of a record of the CPU.

Each variant of FlexAttention has a name, with times, errors or the failure.
"""
_PEAKS: Mapping[str, Any] = {
    "limit": str, "forests": int, "over": int, "of_limit": float, "predicted_least": float, "predicted_most": float,
    "parts_most": int, "recomputed_most": float, "loss_error": float,
}  # fmt: skip
_POLICIES: Mapping[str, Any] = {
    "policy": str, "parts": int, "tokens_forward": int, "per_distinct": float, "gflop": float, "flop_ratio": float,
    "predicted_time": float, "predicted_mib": float, "fits": bool, "measured_mib": float, "cpu_s": float,
    "cpu_ratio": float, "loss": float, "gradient_error": float,
}  # fmt: skip
_UNSHARED: Mapping[str, Any] = {
    "model": str, "baseline_seconds?": float, "seconds?": float, "ratio?": float, "ran?": str, "note?": str,
}  # fmt: skip
_SHARED: Mapping[str, Any] = {
    "sharing?": str, "sharing_possible?": str, "compiles?": int | str, "fallbacks?": int | str,
}  # fmt: skip


def _overlap(half: str) -> dict[str, Any]:
    ways = {f"{half}_{way}_ms": float for way in (1, 2, 4, 8, "gate", "link")}
    return {**ways, f"{half}_best": int, f"{half}_saved": float, f"{half}_hidden": float}


MEASUREMENTS: Mapping[str, Mapping[str, Any]] = {
    "forest": {
        "case": str, "rows": int, "raw_tokens": int, "tokens": int, "build_ms": float, "edges_ms": float,
    },
    "attention": {
        "case": str, "dtype?": str, "score?": str, "tokens?": int, "raw_tokens?": int, "threads?": int,
        **_times("tree", "dense", "rows", "floor", "flex", "flash", optional=True), "dense_over_tree?": float,
        "rows_over_tree?": float, "tree_over_floor?": float, "before?": dict[str, list[float]],
        "before_dense_over_tree?": float, "before_rows_over_tree?": float, **_ON_GPU,
        REST: str | list[float] | _ERRORS,
    },
    "kernel": {
        "triton": str, "kernel": str, "path": str, "dtype": str, "head_dim": int, "head_dim_v": int, "group": int,
        "features": list[str], "registers": int, "spill_bytes": int, "scalar_spills": int, "shared_bytes": int,
        "wgmma": int, "tcgen05": int, "mma": int, "mfma": int, "setmaxnreg": bool, "race_free": bool | None,
        "prefetch": list[int] | None, "instructions_per_logit": list[float], "overlap": list[int], "tile": str,
        "seconds": float, "problems": list[str],
    },
    "host": {
        "kind": str, "kernels": int, "first_forward_ms": float, "first_backward_ms": float, "forward_ms": float,
        "backward_ms": float,
    },
    "gpu": {
        "stage": str, "rehearsal": bool, "device": str, "date": str, "versions": dict[str, str | None],
        "records": [{"case": str, "wrong": list[str], "seconds?": float, REST: Any}],
    },
    "mixers": {
        "case": str, "tokens": int, "raw_tokens": int, "sharing_ratio": float, "tree_ms": float, "rows_ms": float,
        "rows_over_tree": float,
    },
    "plan": {
        "case": str, "limit_tokens": int, "plan_ms": float, "nodes": int, "parts": int, "tokens": int, "planned": int,
        "one_branch": int, "micro_batches": int, "separate_rows": int, "sampler": int | None,
        "first_fit": int | None,
    },
    "calibrate": {
        "forests": int, "layouts": int, "error_median": float, "error_95": float, "pairs": int, "pairs_right": float,
        "regret_median": float, "regret_95": float, "regret_most": float,
    },
    "sampler": {
        "data": str, "rows": int, "raw_tokens": int, "minimum": int, "batches": int, "sampler": int,
        "sampler_ratio": float, "first_fit_batches": int, "first_fit": int, "first_fit_ratio": float,
    },
    "parts": {"peaks": [_PEAKS], "policies": [_POLICIES]},
    "assign": {
        "forest": str, "rows": int, "ranks": int, "balance": float, "duplicated": float, "bound_by": str, "idle": int,
        "ms": float, "whole trees, LPT": float, "whole trees, KK": float, "rows, LPT": float,
    },
    "context": {
        "tree": str, "tokens": int, "above": float, "ranks": int, "way": str, "balance": float, "most_tokens": float,
        "of_ring": float, "busiest_of_ring": float, "MB_per_layer": int, "ms": int, REST: str,
    },
    "overlap": {
        "collectives": str, "ratio": float, "product_ms": float, "link_GB_per_second": float, "gate_chunks": list[int],
        "gate_GFLOP_per_second": float, "gate_GB_per_second": float, "gate_latency_ms": float,
        "gate_product_ms": float, "gate_hidden": float, **_overlap("forward"), **_overlap("backward"),
        "gate_step": float,
    },
    "large": {
        "way": str, "parts": int, "limit_mib?": _OPTIONAL_FLOAT, "predicted_mib?": float, "raw_tokens": int,
        "distinct_tokens": int, "peak_mib": float, "seconds": float, "raw_tokens_per_s": float,
        "distinct_tokens_per_s": float, "loss": float,
    },
    "step": {
        "case": str, "raw_tokens": int, "tokens": int, "baseline_seconds": float, "seconds": float, "speed_up": float,
        "token_bound": float, "share_of_bound": float, "compile_seconds": float, "baseline_compile_seconds": float,
        "loss_error": float, "gradient_error": float,
    },
    "shapes": {
        "way": str, "compiles": int, "whole_seconds": float, "steps_seconds": float, "bound": float, "whole": float,
        "steps": float, "of_bound": float,
    },
    "calls": {
        "entry": str, "calls": int, "files": int, "switches": int, "passes": int, "labels": int,
        "backward_calls": int | None, "backward_files": int | None,
    },
    "first-step": {
        "way": str, "wall": float, "python": float, "compilers": float, "step": float, "second_wall": float,
        "second_python": float, "second_compilers": float, "wall_of_first_way": float, "python_of_first_way": float,
        "second_of_wall": float, "second_of_python": float, REST: float,
    },
    "trainer": {
        "way": str, "whole_seconds": float, "processor_seconds": float, "first_seconds": float,
        "second_seconds": float, "later_seconds": float, "slowest_seconds": float, "compiles": int, "sharing": float,
        "fallbacks": int, "bound": float, "whole": float, "processor": float, "later": float,
    },
    "trainers": {
        "run": str, "trainer": str, "steps?": int | str, "whole_seconds?": _FIGURE_OR_NONE, "error?": _FIGURE_OR_NONE,
        "whole?": _FIGURE_OR_NONE, **_SHARED, "note?": str,
    },
    "trl": {
        "run": str, "version": str, "write": str, "steps": int, **_SHARED, "error": float,
        "eager_seconds": _FIGURE_OR_NONE, "inductor_seconds": _FIGURE_OR_NONE, "treefx_seconds": _FIGURE_OR_NONE,
        "whole": _FIGURE_OR_NONE, "note": str,
    },
    "unshared": {"models": [_UNSHARED], "geometric_mean": float},
    "memory": {
        "case": str, "backend": str, "raw_tokens": int, "tokens": int, "sharing_ratio": float, "peak_mib": float,
        "bytes_per_token": int, "saved_bytes_per_token": int, "logits_mib": float, "source": str,
    },
}  # fmt: skip
"""``REST`` stands for fields whose names differ: passes of a step, ways of sharing a tree, figures of a stage."""
