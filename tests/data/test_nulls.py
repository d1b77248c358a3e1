"""Fields that are null because Arrow keeps one struct for a column: told of by name, and dropped on request."""

import json
import warnings
from pathlib import Path
from typing import Any

import pytest

from treefx.data import ReadReport, load, read_conversations, read_groups, read_judged, read_preferences

KINDS = (None, True, False)


def _call(arguments: Any, kind: str = "tool_calls") -> dict[str, Any]:
    function = {"name": "f", "arguments": arguments}
    called: Any = [{"id": "a", "type": "function", "function": function}] if kind == "tool_calls" else function
    return {"role": "assistant", "content": None, kind: called}


def _write(folder: Path, *records: Any) -> Path:
    path = folder / "x.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def _chat(message: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "Go."}, message], **fields}


WRITTEN = {
    "a field": ({"city": "Paris", "query": None}, {"city": "Paris"}, ["query"]),
    "a struct": ({"city": "Paris", "filter": None}, {"city": "Paris"}, ["filter"]),
    "inside a struct": ({"where": {"city": "Paris", "zip": None}}, {"where": {"city": "Paris"}}, ["zip"]),
    "of a list of structs": ({"all": [{"a": 1, "b": None}, {"b": 2, "a": None}]}, {"all": [{"a": 1}, {"b": 2}]}, "ab"),
    "a struct of nulls alone": ({"where": {"zip": None}}, {"where": {}}, ["zip"]),
    "entries of a list": ({"ids": [1, None]}, {"ids": [1, None]}, []),
    "values that only look empty": ({"a": 0, "b": "", "c": False, "d": [], "e": {}}, ..., []),
}


@pytest.mark.parametrize("kind", ["tool_calls", "function_call"])
@pytest.mark.parametrize("drop", KINDS)
@pytest.mark.parametrize("case", WRITTEN)
def test_nulls_of_arguments(tmp_path: Path, case: str, drop: bool | None, kind: str) -> None:
    given, without, names = WRITTEN[case]
    path = _write(tmp_path, _chat(_call(given, kind)), _chat(_call({"x": 1}, kind)))
    report = ReadReport()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        first, second = load(path, drop_null_arguments=drop, report=report)
    expected = given if without is ... or not drop else without
    assert first.messages[1].tool_calls[0].arguments == json.dumps(expected)
    assert second.messages[1].tool_calls[0].arguments == '{"x": 1}'
    assert sorted(report.null_fields) == sorted(names)
    assert len(told) == (drop is None and bool(names))
    for warning in told:
        assert all(f"'{name}' (1)" in str(warning.message) for name in names)
        assert f"{path}, line 1, field messages[1].{kind}" in str(warning.message)
        assert "drop_null_arguments=True" in str(warning.message)


def test_text_that_the_agent_wrote_is_never_touched(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (chat,) = load(_write(tmp_path, _chat(_call('{"query":  null}'))), drop_null_arguments=True)
    assert chat.messages[1].tool_calls[0].arguments == '{"query":  null}'


@pytest.mark.parametrize("as_text", [False, True])
def test_nulls_of_tools_and_template_options(tmp_path: Path, as_text: bool) -> None:
    properties = {"city": {"type": "string", "enum": None}, "limit": None}
    tools: Any = [{"function": {"name": "f", "parameters": {"properties": properties, "required": ["city"]}}}]
    record = _chat(_call({}), tools=json.dumps(tools) if as_text else tools, chat_template_kwargs={"a": None, "b": 1})
    path = _write(tmp_path, record)
    with pytest.warns(UserWarning, match=r"'limit' \(1\), 'enum' \(1\), 'a' \(1\)"):
        (kept,) = load(path)
    assert list(kept.tools) == tools and kept.template_options == {"a": None, "b": 1}
    (dropped,) = load(path, drop_null_arguments=True)
    assert dropped.tools[0]["function"]["parameters"]["properties"] == {"city": {"type": "string"}}
    assert dropped.template_options == {"b": 1}


def test_every_reader_drops_and_warns_once(tmp_path: Path) -> None:
    call = _call({"a": 1, **{f"n{number}": None for number in range(20)}})
    judged = {"prompt": [{"role": "user", "content": "Go."}], "completion": [call], "label": True}
    pair = {"prompt": judged["prompt"], "chosen": [call], "rejected": [{"role": "assistant", "content": "no"}]}
    trials = {"prompt": "Go.", "completions": [[call]] * 3, "rewards": [1, 2, 3]}
    for reader, record in (
        (load, _chat(call)),
        (read_conversations, _chat(call)),
        (read_judged, judged),
        (read_preferences, pair),
        (read_groups, trials),
    ):
        path = _write(tmp_path, record, record)
        with pytest.warns(UserWarning, match=r"'n0' \(\d\), .*'n7' \(\d\) and 12 more") as told:
            assert '"n3": null' in repr(list(reader(path)))
        assert len(told) == 1
        assert "null" not in repr(list(reader(path, drop_null_arguments=True)))


def test_a_reading_that_is_left_early_warns_too(tmp_path: Path) -> None:
    reading = read_conversations(_write(tmp_path, _chat(_call({"a": None})), _chat(_call({"b": None}))))
    next(reading)
    with pytest.warns(UserWarning, match=r"'a' \(1\)\. Arrow"):
        reading.close()  # type: ignore[attr-defined]
