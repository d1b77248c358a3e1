"""Whole steps of treefx against the same batches on rows: whether they are the same, and how many times faster."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from treefx.bench.gpu.scale import Scale
from treefx.bench.gpu.steps import OURS, ROWS

__all__ = ["compare_steps"]

_CLOSE = {
    torch.bfloat16: {"loss": 1e-2, "norm": 1e-2, "worst_norm": 1e-1},
    torch.float32: {"loss": 1e-4, "norm": 1e-4, "worst_norm": 1e-3},
}
"""How far loss, norm of all gradients, and norm of the gradient of one parameter may be apart, relative."""
_LEAST = 1e-3
"""Of the largest norm of a parameter's gradient: one that is smaller counts as that large."""


def compare_steps(scale: Scale, records: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Compare the ways on every batch that treefx and a way of rows have run.

    Args:
        scale: where they ran.
        records: of `step`.

    Yields:
        One record per model, batch and way of treefx: how far its loss and gradients are from those on rows, how many
        times faster it is than each, and how much of the bound that the tokens set it reaches.
    """
    found = {
        (record["model"], sharing, record["way"]): measured
        for record in records
        for sharing, measured in record.get("steps", {}).items()
        if "problem" not in measured
    }
    for (model, sharing, way), ours in found.items():
        others = {rows: found[model, sharing, rows] for rows in ROWS if (model, sharing, rows) in found}
        if way in OURS and others:
            yield {"case": f"{model}, {sharing}: {way}", **_compared(ours, others, _CLOSE[scale.dtype])}


def _compared(ours: dict[str, Any], others: dict[str, dict[str, Any]], close: dict[str, float]) -> dict[str, Any]:
    bound = ours["raw_tokens"] / ours["tokens"]
    faster = {way: other["seconds"] / ours["seconds"] for way, other in others.items()}
    record: dict[str, Any] = {f"times_{way.replace(' ', '_')}": round(ratio, 3) for way, ratio in faster.items()}
    record |= {"token_bound": round(bound, 3), "of_bound": round(min(faster.values()) / bound, 3), "wrong": []}
    distances = [_apart(ours, other) for other in others.values()]
    for name, limit in close.items():
        apart = record[f"{name}_apart"] = max((one[name] for one in distances), key=_or_infinite)
        if not apart <= limit:  # NaN too
            record["wrong"].append(f"{name} must be {limit:.0e} apart at most, got {apart:.1e}")
    return record


def _apart(ours: dict[str, Any], other: dict[str, Any]) -> dict[str, float]:
    a, b = ours["norms"], other["norms"]
    if a.keys() != b.keys():
        return dict.fromkeys(("loss", "norm", "worst_norm"), float("nan"))
    whole, rows = (sum(norm**2 for norm in norms.values()) ** 0.5 for norms in (a, b))
    least = _LEAST * max(b.values())
    worst = max((abs(a[name] - b[name]) / max(b[name], least) for name in b), key=_or_infinite)
    return {"loss": abs(ours["loss"] / other["loss"] - 1), "norm": abs(whole / rows - 1), "worst_norm": worst}


def _or_infinite(value: float) -> float:
    return value if value == value else float("inf")
