"""Passes, calls and plans as events of Chrome's trace format, which Perfetto reads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from treefx.inspection.report.call_records import Call
from treefx.inspection.report.records import PassRun

__all__ = ["perfetto_events"]

_PROCESS = 1
_THREADS = {1: "passes", 2: "calls", 3: "plan"}
_MEASURED = 4
"""The plan as it ran, where that was measured."""
_GAP = 1e-3
"""Seconds between calls at an unknown distance."""


def perfetto_events(passes: Sequence[PassRun], calls: Sequence[Call], plan: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return ``{"traceEvents": [...]}``: passes, calls, and tokens of calls as counters.

    Passes and calls stand end to end.

    Events have the lengths that were measured. Their places are in order: when exactly each began is not recorded.
    """
    events = [_named("process_name", 0, "treefx"), *(_named("thread_name", k, name) for k, name in _THREADS.items())]
    made = [*events, *_of_passes(passes), *_of_calls(calls), *_of_plan(plan), *_of_measured(plan)]
    return {"traceEvents": made, "displayTimeUnit": "ms"}


def _named(what: str, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": _PROCESS, "tid": thread, "args": {"name": name}}


def _event(thread: int, name: str, start: float, seconds: float, **args: Any) -> dict[str, Any]:
    times = {"ts": start * 1e6, "dur": seconds * 1e6}
    return {
        "ph": "X",
        "name": name,
        "cat": _THREADS.get(thread, "plan"),
        "pid": _PROCESS,
        "tid": thread,
        **times,
        "args": args,
    }


def _of_passes(passes: Sequence[PassRun]) -> Iterator[dict[str, Any]]:
    start = 0.0
    for item in passes:
        yield _event(
            1, item.name, start, item.seconds, nodes_before=item.nodes_before, nodes_after=item.nodes_after,
            changes=list(item.changes),
        )  # fmt: skip
        start += item.seconds


def _of_calls(calls: Sequence[Call]) -> Iterator[dict[str, Any]]:
    start = 0.0
    for item in calls:
        seconds = item.seconds or 0.0
        given = {"raw_tokens": item.raw_tokens, "tokens": item.tokens, "code": item.code, "reason": item.reason}
        yield _event(2, f"call {item.number}: {item.ran}", start, seconds, compiles=item.compiles, **given)
        figures = {"raw": item.raw_tokens, "ran": item.tokens}
        yield {"ph": "C", "name": "tokens", "pid": _PROCESS, "ts": start * 1e6, "args": figures}
        start += seconds + _GAP


def _of_plan(plan: Mapping[str, Any] | None) -> Iterator[dict[str, Any]]:
    """Yield steps of a plan end to end by predicted seconds; bytes are a counter.

    Each has the tokens of its part.
    """
    start = 0.0
    parts = {part["index"]: part for part in _records(plan, "parts") if "index" in part}
    for item in _records(plan, "steps"):
        seconds, part = _number(item, "seconds"), item.get("part")
        yield _event(3, f"{item.get('kind')} part {part}", start, seconds, predicted=item, part=parts.get(part, {}))
        figures = {"held": _number(item, "held_bytes"), "peak": _number(item, "peak_bytes")}
        yield {"ph": "C", "name": "predicted bytes", "pid": _PROCESS, "ts": start * 1e6, "args": figures}
        start += seconds


def _of_measured(plan: Mapping[str, Any] | None) -> Iterator[dict[str, Any]]:
    """Steps of the plan end to end by measured seconds, with the predicted ones."""
    found = (plan or {}).get("measured")
    steps = _records(found, "steps") if isinstance(found, Mapping) else []
    if steps:
        yield _named("thread_name", _MEASURED, "plan, measured")
    predicted, start = _records(plan, "steps"), 0.0
    for number, item in enumerate(steps):
        seconds = _number(item, "seconds")
        given = {"predicted_seconds": _number(predicted[number], "seconds")} if number < len(predicted) else {}
        yield _event(_MEASURED, f"{item.get('kind')} part {item.get('part')}", start, seconds, **given)
        start += seconds


def _records(plan: Mapping[str, Any] | None, name: str) -> list[Mapping[str, Any]]:
    """Return the records of a list in a plan; other items, possible in files, are skipped."""
    found = (plan or {}).get(name)
    return [item for item in found if isinstance(item, Mapping)] if isinstance(found, list) else []


def _number(item: Mapping[str, Any], name: str) -> float:
    value = item.get(name)
    return float(value) if isinstance(value, int | float) else 0.0
