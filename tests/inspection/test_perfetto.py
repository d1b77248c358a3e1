"""Traces for Perfetto: what its importer of Chrome's JSON demands of an event, and that they are the report's."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

import treefx
from tests.inspection.situations import compiled, ids_of, train
from tests.inspection.trace_processor import TraceError, TraceProcessor
from tests.oracle import refused
from tests.planning.costs import linear_cost
from tests.planning.parts import tiny
from treefx.inspection.report.call_records import Call
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


def test_a_plan_as_it_ran_stands_beside_the_predicted_one(report: Report, tmp_path: Path) -> None:
    model, compiled_model = tiny()
    forest = treefx.Forest.from_sequences(ROWS)
    plan, other = (treefx.plan(forest, linear_cost(resident=5.0), limit) for limit in (14, 1000))
    measured = report.with_plan(plan, lambda: treefx.forward_backward(compiled_model, plan, treefx.losses.sft))
    assert measured.plan is not None and Report.from_json(measured.to_json()) == measured
    found = measured.plan["measured"]
    assert [(item["kind"], item["part"]) for item in found["steps"]] == [(s.kind, s.part) for s in plan.steps]
    assert sum(item["seconds"] for item in found["steps"]) == pytest.approx(found["seconds"])
    assert all(item["seconds"] > 0 for item in found["steps"]) and found["added_bytes"] > 0
    trace = json.loads(measured.to_perfetto(tmp_path / "trace.json").read_text(encoding="utf-8"))
    check_events(trace)
    spans = [event for event in trace["traceEvents"] if event["ph"] == "X" and event["tid"] == 4]
    assert [event["dur"] for event in spans] == pytest.approx([1e6 * item["seconds"] for item in found["steps"]])
    predicted = [step["seconds"] for step in measured.plan["steps"]]
    assert [event["args"]["predicted_seconds"] for event in spans] == predicted and len(spans) > 3
    processor = TraceProcessor(tmp_path / "trace.json")
    named = [row for row in processor.query(SLICES) if row[1] == "plan, measured"]
    assert losses(processor) == [] and len(named) == len(spans)
    for wrong in (lambda: None, lambda: treefx.forward_backward(compiled_model, other, treefx.losses.sft)):
        with refused("one step by this plan"):
            report.with_plan(plan, wrong)
    model.zero_grad(set_to_none=True)


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


SLICES = """
    select thread_track.id, thread.name, slice.name, slice.ts, slice.dur, slice.arg_set_id from slice
    join thread_track on slice.track_id = thread_track.id join thread using (utid) order by slice.id
"""


def loaded(trace: dict[str, Any], path: Path) -> TraceProcessor:
    path.write_text(json.dumps(trace), encoding="utf-8")
    return TraceProcessor(path)


def losses(found: TraceProcessor) -> list[Any]:
    """What the importer dropped or did not understand."""
    return found.query("select name, severity, value from stats where value > 0 and severity in ('error', 'data_loss')")


def nanoseconds(event: dict[str, Any], key: str) -> Any:
    return pytest.approx(1e3 * event[key], abs=1)


def flat(value: Any, name: str) -> dict[str, Any]:
    """The arguments of an event by the names that the trace processor gives them."""
    if not isinstance(value, dict | list):
        return {name: value}
    items = value.items() if isinstance(value, dict) else enumerate(value)
    keys = [(f"{name}.{key}" if isinstance(value, dict) else f"{name}[{key}]", item) for key, item in items]
    return {key: item for inner, part in keys for key, item in flat(part, inner).items()}


def test_the_trace_processor_loads_every_event(report: Report, tmp_path: Path) -> None:
    """Slices, tracks, arguments and counters are those that were written, to the nanosecond."""
    path = report.to_perfetto(tmp_path / "trace.json")
    written = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    found = TraceProcessor(path)
    assert losses(found) == []
    spans = [event for event in written if event["ph"] == "X"]
    tracks = {e["tid"]: e["args"]["name"] for e in written if e["name"] == "thread_name"}
    slices = found.query(SLICES)
    assert len(slices) == len(spans) > 10 and {event["cat"] for event in spans} == {"passes", "calls", "plan"}
    for event in spans:
        place = (tracks[event["tid"]], event["name"])
        (same,) = [x for x in slices if x[1:3] == place and x[3] == nanoseconds(event, "ts")]
        assert same[4] == nanoseconds(event, "dur")
        args = found.query(f"select key, string_value, int_value, real_value from args where arg_set_id = {same[5]}")
        read = {key: next((x for x in values if x is not None), None) for key, *values in args}
        assert read == {key: value for key, value in flat(event["args"], "args").items() if value is not None}
    counters = found.query("select t.name, c.ts, c.value from counter c join counter_track t on c.track_id = t.id")
    points = [(f"{e['name']} {k}", e, v) for e in written if e["ph"] == "C" for k, v in e["args"].items()]
    assert len(counters) == len(points) > 6
    for name, event, value in points:
        assert any(x[0] == name and x[1] == nanoseconds(event, "ts") and x[2] == value for x in counters)
    assert found.query("select name from process where name is not null") == [("treefx",)]


def test_the_trace_processor_names_what_is_wrong(tmp_path: Path) -> None:
    """Events that overlap in part, or that have no time, are counted as lost: so the test above can fail."""
    good = perfetto_events((), (Call(1, 0, "packed", 9, 5, seconds=0.5),), None)
    assert losses(loaded(good, tmp_path / "good.json")) == []
    span = next(event for event in good["traceEvents"] if event["ph"] == "X")
    for wrong in ({**span, "ts": span["ts"] + span["dur"] / 2}, {k: v for k, v in span.items() if k != "ts"}):
        found = loaded({**good, "traceEvents": [*good["traceEvents"], wrong]}, tmp_path / "wrong.json")
        assert losses(found), wrong
    (tmp_path / "cut.json").write_text(json.dumps(good)[:-20], encoding="utf-8")
    with pytest.raises(TraceError, match="incomplete"):
        TraceProcessor(tmp_path / "cut.json")
