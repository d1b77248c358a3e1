"""Compare whole steps of treefx with the same batches on rows: equality and speed."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from treefx.tools.bench.gpu.scale import Scale
from treefx.tools.bench.gpu.steps import OURS, ROWS

__all__ = ["compare_steps"]

_CLOSE = {
    torch.bfloat16: {"loss": 1e-2, "norm": 1e-2, "worst_norm": 1e-1},
    torch.float32: {"loss": 1e-4, "norm": 1e-4, "worst_norm": 1e-3},
}
"""How far loss, norm of all gradients, and norm of the gradient of one parameter may be apart, relative."""
_LEAST = 1e-3
"""Of the largest norm of a parameter's gradient: one that is smaller counts as that large."""


def compare_steps(scale: Scale, records: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Compare the newest record with every earlier record of the same model and batch.

    Args:
        scale: where they ran.
        records: of `step`, one per way and batch, in the order in which they came.

    Yields:
        One record per way of treefx that the newest record completes a pair for: how far its loss and gradients are
        from those on rows, how many times faster it is than each way of rows that is known, and which part of the
        bound that the tokens set it reaches against the fastest of them.
    """
    newest = records[-1]
    if "batch" not in newest or "problem" in newest:
        return
    same = {
        record["way"]: record
        for record in records
        if (record.get("model"), record.get("batch")) == (newest["model"], newest["batch"]) and "problem" not in record
    }
    others = {way: same[way] for way in ROWS if way in same}
    completed = [newest["way"]] if newest["way"] in OURS else [way for way in OURS if way in same]
    for way in completed if others else ():
        case = f"{newest['model']}, {newest['batch']}: {way} against {', '.join(others)}"
        yield {"case": case, **_compared(same[way], others, _CLOSE[scale.dtype])}


def _compared(ours: dict[str, Any], others: dict[str, dict[str, Any]], close: dict[str, float]) -> dict[str, Any]:
    bound = ours["raw_tokens"] / ours["tokens"]
    faster = {way: other["seconds"] / ours["seconds"] for way, other in others.items()}
    record: dict[str, Any] = {f"times_{_key(way)}": round(ratio, 3) for way, ratio in faster.items()}
    fresh = min(other["fresh_seconds"] / ours["fresh_seconds"] for other in others.values())
    record |= {"fresh_times": round(fresh, 3), "token_bound": round(bound, 3)}
    record |= {"of_bound": round(min(faster.values()) / bound, 3), "fresh_of_bound": round(fresh / bound, 3)}
    record["wrong"] = []
    distances = [_apart(ours, other) for other in others.values()]
    for name, limit in close.items():
        apart = record[f"{name}_apart"] = max((one[name] for one in distances), key=_or_infinite)
        if not apart <= limit:  # NaN too
            record["wrong"].append(f"{name} must be {limit:.0e} apart at most, got {apart:.1e}")
    return record


def _key(way: str) -> str:
    return way.replace(",", "").replace(" ", "_")


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
