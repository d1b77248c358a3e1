"""Malformed records and files: each is one refusal that names its place, and reading goes on."""

import gzip
import json
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.data.chats import make_engine
from treefx.data import (
    ByteTokenizer,
    ChatTokenizer,
    Conversation,
    Judged,
    Preference,
    ReadReport,
    TrialGroup,
    Value,
    group_batch,
    judged_batch,
    load,
    make_samples,
    preference_batch,
    read_conversations,
    read_groups,
    read_judged,
    read_preferences,
    read_records,
)
from treefx.errors import InputError, RecordError, TreefxError

LONGEST_MESSAGE = 2000

CALL = {"id": "1", "type": "function", "function": {"name": "get", "arguments": {"id": 7, "deep": [{"a": None}]}}}
MESSAGES: list[Any] = [
    {"role": "user", "content": [{"type": "text", "text": "Hello."}]},
    {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning": "look", "weight": 1},
    {"role": "tool", "name": "get", "tool_call_id": "1", "content": "Ann"},
    {"role": "assistant", "content": "Good day.", "token_ids": [1, 2, 3], "function_call": None},
]
TOOLS = [{"type": "function", "function": {"name": "get", "parameters": {"type": "object"}}}]
NODE = {"node_type": "Thought", "description": "t", "children": [], "observation": "o"}
RECORDS: list[Any] = [
    {"messages": MESSAGES, "tools": TOOLS, "task": 3, "trial": 1, "reward": 0.5, "chat_template_kwargs": {"a": 1}},
    {"task_id": 3, "traj": MESSAGES, "trial": 0, "reward": 1, "tools": json.dumps(TOOLS)},
    {"tree": {"tree": {"children": [NODE]}}, "answer_generation": {"query": "q", "train_messages": [MESSAGES[:2]]}},
    {"prompt": MESSAGES[:1], "completions": ["four", MESSAGES[3:]], "rewards": [1, 0.0], "task": "t"},
    {"prompt": "a", "chosen": MESSAGES[3:], "rejected": [{"role": "assistant", "content": "no"}]},
    {"prompt": "two?", "completion": "2", "label": True},
]
SCALARS: list[Any] = [None, True, 0, -1, 3, 10**399, 1e308, float("nan"), float("-inf")]
TEXTS: list[Any] = ["", "\ud83d", "[" * 2000, "9" * 5000, "x" * 5000]
LISTS: list[Any] = [[], [[]], [{}], [None], ["user"], json.loads("[" * 400 + "]" * 400)]
OBJECTS: list[Any] = [{}, {"role": "user"}, {"x" * 3000: None}, {"\ud83d": 1}, {"a": {"b": "\udc00"}}]
DEEP = json.loads('{"a":' * 400 + "1" + "}" * 400)
HOSTILE = st.sampled_from([*SCALARS, *TEXTS, *LISTS, *OBJECTS, DEEP, {"chat_template": "x"}])


def _places(raw: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    entries = raw.items() if isinstance(raw, dict) else enumerate(raw) if isinstance(raw, list) else ()
    for name, value in entries:
        yield from _places(value, (*path, name))


def _replaced(raw: Any, path: tuple[Any, ...], value: Any) -> Any:
    if not path:
        return value
    copy = raw.copy()
    copy[path[0]] = _replaced(raw[path[0]], path[1:], value)
    return copy


@st.composite
def hostile_records(draw: st.DrawFn) -> Any:
    """A record of a known format with up to three of its values replaced, or one dropped."""
    record = draw(st.sampled_from(RECORDS))
    for _ in range(draw(st.integers(1, 3))):
        path = draw(st.sampled_from(list(_places(record))[1:]))
        record = _replaced(record, path, draw(HOSTILE))
    return record


def read_all(path: Path, **how: Any) -> None:
    """Every reader, and what comes behind it: samples by the two kinds of templates."""
    readers: list[Callable[..., Any]] = [load, read_conversations, read_preferences, read_judged, read_groups]
    for reader in readers:
        report = ReadReport()
        found = list(reader(path, on_error="skip", report=report, **how))
        assert report.records + report.skipped == 2
        for error in report.errors:
            assert isinstance(error, RecordError) and len(str(error)) < LONGEST_MESSAGE
            str(error).encode()  # may be printed and logged
        for item in found if reader is not read_conversations else ():
            for tokenizer in (ByteTokenizer(), ChatTokenizer(make_engine("thinking"))):
                _encode(item, tokenizer)


def _encode(item: Any, tokenizer: ByteTokenizer | ChatTokenizer) -> None:
    """What comes behind the readers: samples and batches, or a refusal."""
    try:
        match item:
            case Conversation():
                make_samples([item], tokenizer)
            case Preference():
                preference_batch([item], tokenizer)
            case Judged():
                judged_batch([item], tokenizer)
            case TrialGroup():
                group_batch([item], tokenizer)
    except TreefxError as refusal:
        assert len(str(refusal)) < LONGEST_MESSAGE
        str(refusal).encode()


@pytest.mark.filterwarnings("ignore:conversations come with", "ignore:.*are null, and a model")
@settings(max_examples=150, deadline=None)
@given(hostile_records())
@example(_replaced(RECORDS[0], ("messages", 0, "role"), ["user"]))
@example(_replaced(RECORDS[0], ("messages", 0, "role"), {}))
@example(_replaced(RECORDS[0], ("reward",), 10**399))
@example(_replaced(RECORDS[1], ("tools",), "[" * 2000 + "]" * 2000))
@example(_replaced(RECORDS[0], ("messages", 3, "token_ids", 0), 10**30))
@example(_replaced(RECORDS[0], ("messages", 1, "tool_calls", 0, "function", "arguments"), "[" * 2000 + "]" * 2000))
@example(_replaced(RECORDS[0], ("tools", 0, "function", "name"), "\ud83d"))
@example(_replaced(RECORDS[0], ("chat_template_kwargs",), {"a": float("nan")}))
def test_a_hostile_record_is_read_or_skipped(tmp_path_factory: pytest.TempPathFactory, record: Any) -> None:
    path = tmp_path_factory.mktemp("hostile") / "x.jsonl"
    path.write_text(json.dumps(record) + "\n" + json.dumps(RECORDS[0]) + "\n")
    read_all(path)


@settings(max_examples=80, deadline=None)
@given(
    st.sampled_from(RECORDS).map(lambda record: json.dumps(record, indent=1).encode()),
    st.sampled_from(["x.json", "x.jsonl", "x.txt"]),
    st.sampled_from([b"", b"\xef\xbb\xbf", b"[", b"\n \n", b"\xff", b"\0"]),
    st.lists(st.tuples(st.integers(0, 400), st.binary(max_size=3)), max_size=3),
    st.booleans(),
    st.integers(0, 60),
)
def test_a_file_of_damaged_bytes_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory,
    data: bytes,
    name: str,
    before: bytes,
    changes: list[tuple[int, bytes]],
    packed: bool,
    cut: int,
) -> None:
    for at, put in changes:
        data = data[:at] + put + data[at + 1 :]
    data = before + data
    if packed:
        data = bytearray(gzip.compress(data))[: -cut or None]
        for at, put in changes:
            data[at : at + 1] = put
    path = tmp_path_factory.mktemp("damaged") / name
    path.write_bytes(data)
    report = ReadReport()
    for reader in (load, read_judged):
        assert isinstance(list(reader(path, on_error="skip", report=report, drop_null_arguments=True)), list)  # type: ignore[operator]
    assert all(len(str(error)) < LONGEST_MESSAGE for error in report.errors)


# Long records and white space -----------------------------------------------------------------------------------------


def _raw(record: Value) -> list[Any]:
    return [record.raw]


@pytest.mark.parametrize("suffix", [".jsonl.gz", ".json.gz", ".txt"])
def test_blank_lines_are_not_kept(tmp_path: Path, suffix: str) -> None:
    path, text = tmp_path / f"x{suffix}", b"\r\n" * 2**21 + b'  {"n": 1}\n\n{"n": 2}'
    path.write_bytes(gzip.compress(text) if suffix.endswith(".gz") else text)
    tracemalloc.start()
    records = list(read_records(path, lambda record: [(record.raw["n"], record.place.line)]))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert records == [(1, 2**21 + 1), (2, 2**21 + 3)] and peak < 2**20


LONG = b'"' + b"x" * 5000 + b'"'
TOO_LONG = {
    "a line": ("x.jsonl", b'{"n": 1}\n' + LONG + b'\n{"n": 2}', [{"n": 1}, {"n": 2}]),
    "the first line": ("x.jsonl", LONG + b'\n{"n": 2}', [{"n": 2}]),
    "the last line": ("x.jsonl", b'{"n": 1}\n' + LONG, [{"n": 1}]),
    "a line without end": ("x.jsonl", b'{"n": 1}\n"' + b"x" * 10**6, [{"n": 1}]),
    "an entry": ("x.json", b'[{"n": 1},' + LONG + b"]", [{"n": 1}]),
    "an entry without end": ("x.json", b'[{"n": 1}, "' + b"x" * 10**6, [{"n": 1}]),
    "a document": ("x.json", b'{\n"n": ' + LONG + b"}", []),
}


@pytest.mark.parametrize("case", TOO_LONG)
def test_a_record_that_is_too_long_is_refused_and_not_kept(tmp_path: Path, case: str) -> None:
    name, data, expected = TOO_LONG[case]
    path = tmp_path / f"{name}.gz"
    path.write_bytes(gzip.compress(data))
    report = ReadReport()
    tracemalloc.start()
    assert list(read_records(path, _raw, on_error="skip", report=report, max_record_bytes=4000)) == expected
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert report.skipped == 1 and "at most 4,000 bytes, got a longer one" in str(report.errors[0])
    assert peak < 800_000
    if "without end" not in case:
        assert len(list(read_records(path, _raw))) == len(expected) + 1


def test_the_limit_is_the_longest_record_that_is_read(tmp_path: Path) -> None:
    for name, text in (("a.jsonl", '{"n": 1}  \n'), ("b.json", '[{"n": 1}   ]'), ("c.json", '{"n":\n1}')):
        (tmp_path / name).write_text(text)
        assert list(read_records(tmp_path / name, _raw, max_record_bytes=8)) == [{"n": 1}]
        with pytest.raises(RecordError, match="at most 7 bytes"):
            list(read_records(tmp_path / name, _raw, max_record_bytes=7))


@pytest.mark.parametrize("limit", [0, -1, 1.5, True, float("inf"), None])
def test_limits_that_are_none_are_refused(tmp_path: Path, limit: Any) -> None:
    with pytest.raises(InputError, match="max_record_bytes must be (a whole number of )?at least 1, got"):
        read_records(tmp_path, _raw, max_record_bytes=limit)
