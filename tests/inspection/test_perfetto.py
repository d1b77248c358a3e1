"""Traces for Perfetto: what its importer of Chrome's JSON demands of an event, and that they are the report's."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

import treefx
from tests.inspection.situations import compiled, ids_of, train
from tests.planning.costs import linear_cost
from treefx.inspection.report.report import Report
from treefx.inspection.report.traces import perfetto_events

ROWS = [[1, 2, 3, 4, 5, 6], [1, 2, 3, 7, 8, 9], [1, 2, 10, 11, 12]]


@pytest.fixture(scope="module")
def report() -> Report:
    model = compiled(min_sharing=1.0)
    for _ in range(3):
        train(model, ids_of())
    plan = treefx.plan(treefx.Forest.from_sequences(ROWS), linear_cost(resident=5.0), memory_limit_bytes=14)
    return treefx.inspect(model).with_plan(plan)


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def check_events(trace: dict[str, Any]) -> None:
    """Perfetto drops events without a known phase, time or process, and slices of a track that overlap in part."""
    assert set(trace) == {"traceEvents", "displayTimeUnit"} and trace["displayTimeUnit"] in ("ms", "ns")
    ends: dict[int, float] = {}
    for event in trace["traceEvents"]:
        assert event["ph"] in ("M", "X", "C") and isinstance(event["name"], str) and event["pid"] == 1
        assert isinstance(event["args"], dict)
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "thread_name") and isinstance(event["args"]["name"], str)
            continue
        assert is_number(event["ts"]) and event["ts"] >= 0
        if event["ph"] == "C":
            assert event["args"] and all(map(is_number, event["args"].values()))
            continue
        assert is_number(event["dur"]) and event["dur"] >= 0
        assert event["ts"] >= ends.get(event["tid"], 0.0) - 1e-6
        ends[event["tid"]] = event["ts"] + event["dur"]


def test_events_are_those_of_the_report(report: Report, tmp_path: Path) -> None:
    trace = json.loads(report.to_perfetto(tmp_path / "deep" / "trace.json").read_text(encoding="utf-8"))
    check_events(trace)
    spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    tracks = {e["tid"]: e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"}
    assert tracks == {1: "passes", 2: "calls", 3: "plan"}
    assert [event["name"] for event in spans if event["tid"] == 1] == [item.name for item in report.passes]
    calls = [event for event in spans if event["tid"] == 2]
    assert [event["dur"] for event in calls] == pytest.approx([1e6 * (call.seconds or 0) for call in report.calls])
    assert len(calls) == 3 and calls[0]["args"]["raw_tokens"] == 36


def test_steps_of_a_plan_have_their_predicted_seconds(report: Report) -> None:
    assert report.plan is not None and len(report.plan["parts"]) > 1
    events = perfetto_events((), (), report.plan)["traceEvents"]
    steps = [event for event in events if event["ph"] == "X"]
    assert sum(step["dur"] for step in steps) == pytest.approx(1e6 * report.plan["seconds"])
    assert [step["args"]["predicted"] for step in steps] == report.plan["steps"]
    assert all(step["args"]["part"]["intervals"] for step in steps)
    peaks = [event["args"]["peak"] for event in events if event["ph"] == "C"]
    assert max(peaks) == report.plan["peak_bytes"]


@pytest.mark.parametrize("plan", [None, {}, {"steps": 3}, {"steps": [1, {"kind": None}], "parts": [{}]}])
def test_a_plan_of_another_form_leaves_a_trace_that_can_be_read(plan: Any) -> None:
    check_events(perfetto_events((), (), plan))
