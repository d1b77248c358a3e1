"""Reading files record by record: every record of every shape of file, and one clear error for each thing wrong."""

import gzip
import io
import json
import math
import pickle
import tracemalloc
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from rich.progress import Progress

from treefx.data import ReadReport, Value, read_records
from treefx.data.files.parsing import _CHUNK
from treefx.data.files.progress import byte_progress
from treefx.errors import InputError, RecordError

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**20), 10**20)
    | st.floats(allow_nan=False, allow_infinity=False)
    # Lone surrogates are escaped by JSON, and refused when they are read as text.
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), inner)
    ),
    max_leaves=12,
)
RECORDS = st.lists(st.dictionaries(st.text('ab\u2028"\\'), JSON, min_size=1, max_size=3), min_size=1, max_size=5)


def raw(record: Value) -> Iterator[Any]:
    yield record.raw


def read(path: Path, **options: Any) -> list[Any]:
    return list(read_records(path, raw, **options))


def write(folder: Path, name: str, data: bytes | str) -> Path:
    path = folder / name
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return path


# Shapes of files ------------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(RECORDS, st.booleans(), st.sampled_from([None, 2]), st.booleans(), st.booleans())
def test_every_shape_of_file_gives_the_records_that_were_written(
    tmp_path_factory: pytest.TempPathFactory, records: Any, ascii_only: bool, indent: Any, packed: bool, mark: bool
) -> None:
    folder = tmp_path_factory.mktemp("files")
    lines = "\n".join(json.dumps(record, ensure_ascii=ascii_only) for record in records)
    listed = json.dumps(records, ensure_ascii=ascii_only, indent=indent)
    single = json.dumps(records[0], ensure_ascii=ascii_only, indent=indent)
    for name, text, expected in (
        ("lines.jsonl", lines + "\n", records),
        ("lines.json", "\n" + lines.replace("\n", "\r\n\n"), records),
        ("list.json", listed, records),
        ("list.txt", f" \n{listed}\n", records),
        ("single.json", single, records[:1]),
    ):
        data = (b"\xef\xbb\xbf" if mark else b"") + text.encode()
        path = write(folder, name + ".gz" * packed, gzip.compress(data) if packed else data)
        assert read(path) == expected, name


@pytest.mark.parametrize("name", ["big.json", "big.jsonl"])
def test_records_over_the_borders_of_chunks(tmp_path: Path, name: str) -> None:
    records = [{"n": n, "text": "ä" * size} for n, size in enumerate((_CHUNK - 20, 3 * _CHUNK, 1, 5 * _CHUNK, 0))]
    text = json.dumps(records) if name == "big.json" else "\n".join(map(json.dumps, records))
    assert read(write(tmp_path, name, text)) == records
    numbers = list(range(10**4, 10**4 + 3 * _CHUNK // 6))  # cut at a chunk's border, each would be another number
    assert read(write(tmp_path, "numbers.json", json.dumps(numbers))) == numbers


def test_places_name_the_line_on_which_a_record_begins(tmp_path: Path) -> None:
    def places(record: Value) -> Iterator[tuple[int | None, int]]:
        yield record.place.line, record.place.record

    listed = write(tmp_path, "a.json", '\n[{"a":\n1},\n\n{"b": 2}, {"c": 3}]')
    lines = write(tmp_path, "a.jsonl", '\n{"a": 1}\n\n{"b": 2}')
    assert list(read_records(listed, places)) == [(2, 0), (5, 1), (5, 2)]
    assert list(read_records(lines, places)) == [(2, 0), (4, 1)]


def test_a_folder_is_read_in_sorted_order(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    write(tmp_path, "c.jsonl", '{"n": 3}')
    write(tmp_path / "b", "x.json.gz", gzip.compress(b'[{"n": 1}, {"n": 2}]'))
    write(tmp_path, "notes.txt", "not read")
    assert read(tmp_path) == [{"n": 1}, {"n": 2}, {"n": 3}]


@pytest.mark.parametrize("shape", ["lines", "list", "gzip"])
def test_memory_does_not_grow_with_the_file(tmp_path: Path, shape: str) -> None:
    line = json.dumps({"text": "x" * 1000})
    text = f"[{','.join([line] * 8000)}]" if shape == "list" else "\n".join([line] * 8000)
    path = write(tmp_path, "big.json", gzip.compress(text.encode()) if shape == "gzip" else text)
    tracemalloc.start()
    assert sum(1 for _ in read_records(path, raw)) == 8000
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < len(text) / 8


# Broken files --------------------------------------------------------------------------------------------------------

GOOD = b'{"n": 1}'
BROKEN = {
    "no file": (None, None, "cannot be opened|no file or folder"),
    "empty": ("a.jsonl", b"", "is empty"),
    "empty but for its mark": ("a.jsonl", b"\xef\xbb\xbf", "is empty"),
    "blank": ("a.json", b" \n\n", "holds no record"),
    "an empty list": ("a.json", b"[]", "holds no record"),
    "zeros": ("a.json", b"\0\0\0", "binary: byte 0 is 0"),
    "UTF-16": ("a.json", GOOD.decode().encode("utf-16"), "UTF-16 text: convert it"),
    "a zip archive": ("a.json", b"PK\x03\x04rest", "a zip archive"),
    "Parquet": ("a.json", b"PAR1rest", "a Parquet file"),
    "zstd": ("a.jsonl", b"\x28\xb5\x2f\xfdrest", "compressed by zstd"),
    "half a gzip header": ("a.gz", b"\x1f\x8b\x08", "no whole gzip file"),
    "a truncated gzip file": (
        "a.gz",
        gzip.compress(b"\n".join(b'{"n": %d}' % n for n in range(9999)))[:-99],
        "data end .* may be truncated",
    ),
    "a byte that is not UTF-8": ("a.jsonl", b'{"n": "\xff"}\n' + GOOD, "line 1: is not UTF-8: byte 7 is 0xff"),
    "one in a list": ("a.json", b'[{"n": "\xff"},\n{}]', r"line 1, field \[0\]: is not UTF-8: it holds the byte 0xff"),
    "Latin-1": ("a.json", '{\n"n": "ü"}'.encode("latin-1"), "line 1: is not UTF-8: byte 8 is 0xfc"),
    "no JSON": ("a.jsonl", GOOD + b"\n{n: 1}\n" + GOOD, "line 2: is not JSON: Expecting property name .* column 2"),
    "two records on a line": ("a.jsonl", GOOD + GOOD, "line 1: is not JSON: Extra data at column 9"),
    "a cut last line": (
        "a.jsonl",
        GOOD + b'\n{"n": ',
        "line 2: is not JSON.*without a line break: it may be truncated",
    ),
    "a cut list": (
        "a.json",
        b'[{"n": 1}, {"n": "ab',
        r"line 1, field \[1\]: is not JSON: Unterminated string starting at char.*the file ends inside the list",
    ),
    "a list that is not closed": ("a.json", b'[{"n": 1}\n', "line 2: the list must .* got the end: .* truncated"),
    "no comma": ("a.json", b'[{"n": 1}\n{"n": 2}]', "line 2: the list must go on .* got '{' at line 2"),
    "an error inside a list": (
        "a.json",
        b'[{"n": 1},\n{"n":\n oops}' + b" " * 99,
        r"line 2, field \[1\]: is not JSON: .* at line 3",
    ),
    "two lists": ("a.jsonl", b"[1]\n[2]", "nothing may follow the list, got '\\[' at line 2"),
    "a cut document": ("a.json", b'{\n"n": 1', "line 1: is not JSON: Expecting ',' delimiter at line 2"),
    "a number without end": ("a.jsonl", b'{"n": ' + b"9" * 5000 + b"}", "line 1: is not JSON that can be read"),
    "brackets without end": ("a.jsonl", b'{"n": ' + b"[" * 10**5, "line 1: is nested too deeply|line 1: is not JSON"),
}
SURVIVORS = {
    "a byte that is not UTF-8": 1,
    "one in a list": 1,
    "no JSON": 2,
    "a cut last line": 1,
    "a cut list": 1,
    "a list that is not closed": 1,
    "no comma": 1,
    "an error inside a list": 1,
    "two lists": 1,
}
"""Whole records of those files."""


@pytest.mark.parametrize("case", BROKEN)
def test_what_is_wrong_is_named_with_its_file_and_line(tmp_path: Path, case: str) -> None:
    name, data, words = BROKEN[case]
    path = tmp_path / "missing" if name is None else write(tmp_path, name, data or b"")
    with pytest.raises(InputError, match=words) as refusal:
        read(path)
    assert str(path) in str(refusal.value)
    assert len(str(refusal.value).splitlines()) == 1


@pytest.mark.parametrize("case", [case for case in BROKEN if BROKEN[case][0]])
def test_what_is_wrong_is_skipped_and_counted(tmp_path: Path, case: str) -> None:
    name, data, words = BROKEN[case]
    write(tmp_path, f"0.{name}" if name != "a.gz" else "0.json.gz", data or b"")
    write(tmp_path, "1.jsonl", b'{"last": true}')
    report = ReadReport()
    records = read(tmp_path, on_error="skip", report=report)
    assert records[-1] == {"last": True}
    if case == "a truncated gzip file":
        assert 1000 < len(records) < 9999
    else:
        assert len(records) - 1 == SURVIVORS.get(case, 0)
    assert (report.files, report.records, report.skipped) == (2, len(records), 1)
    with pytest.raises(RecordError, match=words):
        raise report.errors[0]
    assert "skipped 1; the first: " in report.summary()


def test_reading_goes_on_after_a_broken_record(tmp_path: Path) -> None:
    lines = write(tmp_path, "a.jsonl", b'{"n": 0}\n{"n": \n{"n": "\xff"}\n"3"\n{"n": 4}\n')
    listed = write(tmp_path, "b.json", b'[{"n": 0}, {"n": "\xff"}, "2", {"n": 3}]')

    def number(record: Value) -> Iterator[int]:
        yield record["n"].integer()

    for path, expected, lost in ((lines, [0, 4], 3), (listed, [0, 3], 2)):
        report = ReadReport()
        assert list(read_records(path, number, on_error="skip", report=report)) == expected
        assert (report.records, report.skipped, len(report.errors)) == (2, lost, lost)


def test_a_reading_that_skipped_without_a_report_warns(tmp_path: Path) -> None:
    path = write(tmp_path, "a.jsonl", "{}\nno\n{}")
    with pytest.warns(UserWarning, match="read 2 records of 1 files, skipped 1; the first: .*line 2"):
        assert read(path, on_error="skip") == [{}, {}]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        read(path, on_error="skip", report=ReadReport())


def test_a_broken_list_is_not_read_to_its_end(tmp_path: Path) -> None:
    path = write(tmp_path, "a.json", b'[{"n": oops},' + b"1," * 4_000_000)
    tracemalloc.start()
    with pytest.raises(
        RecordError, match=r"line 1, field \[0\]: is not JSON: Expecting value at character 6 of the record$"
    ):
        read(path)
    assert tracemalloc.get_traced_memory()[1] < 10**6
    tracemalloc.stop()


def test_what_was_skipped_is_not_kept_in_memory(tmp_path: Path) -> None:
    for number in range(9):
        write(tmp_path, f"{number}.json", "{\n" + "x" * 10**6)
    report = ReadReport()
    tracemalloc.start()
    assert read(tmp_path, on_error="skip", report=report) == []
    kept = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert report.skipped == len(report.errors) == 9
    assert kept < 10**6 and pickle.loads(pickle.dumps(report.errors[3])).path.endswith("3.json")


def test_arguments_are_checked_at_the_call(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="on_error must be 'raise' or 'skip', got 'ignore'"):
        read_records(tmp_path, raw, on_error="ignore")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="holds no .json"):
        read_records(tmp_path, raw)


# Values ---------------------------------------------------------------------------------------------------------------

WRONG = [
    (lambda v: v["a"]["b"].text(), {"a": {"b": 3}}, "a.b", "expected text, got the number 3"),
    (lambda v: v["a"], {"b": 1, "c": 2}, "a", "is missing; the fields are 'b', 'c'"),
    (lambda v: v["a"], {"a": None}, "a", "is null"),
    (lambda v: v["a"], [], "[0]", "expected an object, got an empty list"),
    (lambda v: v["a"].items()[1].number(), {"a": [1, "2"]}, "a[1]", "expected a finite number, got text '2'"),
    (lambda v: v["a"].number(), {"a": True}, "a", "expected a finite number, got true"),
    (lambda v: v["a"].number(), {"a": math.nan}, "a", "expected a finite number, got the number nan"),
    (lambda v: v["a"].integer(), {"a": 1.0}, "a", "expected a whole number, got the number 1.0"),
    (lambda v: v["a"].boolean(), {"a": 1}, "a", "expected true or false, got the number 1"),
    (lambda v: v["a"].items(), {"a": {}}, "a", "expected a list, got an object with the fields (none)"),
    (lambda v: v["a"].text(), {"a": "ok \ud83d"}, "a", "character 3 is '\\ud83d', half of a surrogate pair"),
]


@pytest.mark.parametrize(("use", "value", "field", "words"), WRONG)
def test_values_name_the_field(tmp_path: Path, use: Any, value: Any, field: str, words: str) -> None:
    path = write(tmp_path, "a.jsonl", "{}\n" + json.dumps(value) if isinstance(value, dict) else json.dumps([value]))
    line = 2 if isinstance(value, dict) else 1
    with pytest.raises(RecordError) as refusal:
        list(read_records(path, lambda record: [use(record)] if record.raw != {} else []))
    error = refusal.value
    assert (error.path, error.line, error.field) == (str(path), line, field)
    assert words in str(error)


# Progress -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("terminal", [True, False])
def test_the_bar_is_drawn_on_terminals_only(terminal: bool) -> None:
    console = Console(file=io.StringIO(), force_terminal=terminal, width=90)
    with byte_progress(2000, console=console) as show:
        show(1000, "trials.jsonl")
    written = console.file.getvalue()  # type: ignore[attr-defined]
    assert ("trials.jsonl" in written and "kB" in written) if terminal else written == ""


def test_a_bar_inside_the_callers_own_bar_does_no_harm() -> None:
    console = Console(file=io.StringIO(), force_terminal=True)
    with Progress(console=console), byte_progress(10, console=console) as show:
        show(5, "name")


def test_bytes_are_counted_to_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    class Bar:
        def __init__(self, total: int, enabled: bool) -> None:
            self.total = total

        def __enter__(self) -> Any:
            return lambda done, name: seen.append(done)

        def __exit__(self, *reason: object) -> None:
            seen.append(self.total)

    monkeypatch.setattr("treefx.data.files.reading.byte_progress", Bar)
    path = write(tmp_path, "a.jsonl", "\n".join([json.dumps({"t": "x" * 999})] * 1200))
    read(path)
    assert len(seen) > 4 and seen == sorted(seen) and seen[-1] == path.stat().st_size
