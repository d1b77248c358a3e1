"""Read files of any size record by record; raise for broken records, or skip and count."""

import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, TypeVar

from treefx.arguments import check_whole
from treefx.data.files.nulls import NullFields
from treefx.data.files.opening import open_bytes
from treefx.data.files.parsing import parse_records
from treefx.data.files.progress import byte_progress
from treefx.data.files.torch_files import is_torch_file, parse_torch_file
from treefx.data.files.values import Value
from treefx.errors import InputError, RecordError

__all__ = ["JSON_SUFFIXES", "MAX_RECORD_BYTES", "OnError", "ReadReport", "read_records"]

OnError = Literal["raise", "skip"]
JSON_SUFFIXES = tuple(f".{kind}{packed}" for kind in ("json", "jsonl", "ndjson") for packed in ("", ".gz"))
_KEPT_ERRORS = 100
MAX_RECORD_BYTES = 1 << 28
"""Longest record unless the caller says otherwise: a file of some megabytes, packed by gzip, may be one line without
end. ``json`` makes several times as many bytes of it."""
_STEP_BYTES = 1 << 18
T = TypeVar("T")


@dataclass
class ReadReport:
    """Count the files and records of a reading; updated while it runs."""

    files: int = 0
    records: int = 0
    """Records that were read and are whole."""
    skipped: int = 0
    """Broken records, and files that could not be read on, left out under ``on_error="skip"``."""
    errors: list[RecordError] = field(default_factory=list)
    """Of the first hundred of them."""
    null_fields: Counter[str] = field(default_factory=Counter)
    """How often a field of call arguments, tools or ``chat_template_kwargs`` was null, by name, kept or dropped."""

    def skip(self, error: RecordError) -> None:
        """Count a skipped record."""
        self.skipped += 1
        if len(self.errors) < _KEPT_ERRORS:
            # Drop the cause and context, which hold the record or the whole window.
            error.__cause__ = error.__context__ = None
            self.errors.append(error.with_traceback(None))

    def summary(self) -> str:
        """Format one line: numbers, and the first skipped record."""
        text = f"read {self.records:,} records of {self.files:,} files"
        if not self.skipped:
            return text
        return f"{text}, skipped {self.skipped:,}; the first: {self.errors[0]}"


def read_records(
    path: str | Path,
    parse: Callable[[Value], Iterable[T]],
    *,
    on_error: OnError = "raise",
    report: ReadReport | None = None,
    progress: bool = True,
    drop_null_arguments: bool | None = None,
    max_record_bytes: int = MAX_RECORD_BYTES,
    suffixes: tuple[str, ...] = JSON_SUFFIXES,
) -> Iterator[T]:
    """Read a file, or each file of a folder, record by record.

    A record is a line of JSON lines, an entry of a JSON list, a whole JSON document, or a whole file of ``torch.save``;
    gzip is unpacked. Of lines and lists no more than the record at hand is in memory.

    Args:
        path: a file of any name, or a folder: its files with one of the suffixes are read in sorted order.
        parse: yields any number of items of a record; a record for which it raises `RecordError` is broken.
        on_error: "raise" ends the reading at the first broken record; "skip" leaves it out, counts it in ``report``,
            and goes on with the next record, or with the next file where the rest of one cannot be read.
        report: counts records and errors. Without one, a reading that skipped something ends with a warning.
        progress: show a bar of bytes on standard error, if that is a terminal.
        drop_null_arguments: whether fields that are null are left out of call arguments, tools and
            ``chat_template_kwargs``, at any depth. Files that went through Arrow hold null for every field that another
            record has; see ``treefx.data.files.nulls``. None keeps them, and warns at the end of the reading.
        max_record_bytes: longest record, in bytes of unpacked text; a longer one is broken.
        suffixes: the files of a folder that are read; ``.json``, ``.jsonl`` and ``.ndjson``, packed by gzip or not,
            unless given.

    Returns:
        An iterator over the items that `parse` yields.

    Raises:
        InputError: there is no such file or folder, no file to read in it, or an argument is out of range.
        RecordError: while reading, with the file, the line and the field.

    Example:
        >>> read_records("trials.jsonl", lambda record: [record["reward"].number()])  # doctest: +SKIP
    """
    if on_error not in ("raise", "skip"):
        raise InputError(f"on_error must be 'raise' or 'skip', got {on_error!r}")
    if drop_null_arguments is not None and not isinstance(drop_null_arguments, bool):
        raise InputError(f"drop_null_arguments must be True, False or None, got {drop_null_arguments!r}")
    check_whole(max_record_bytes, "max_record_bytes", least=1)
    counts = ReadReport() if report is None else report
    records = _walk(_find_files(path, suffixes), progress, counts, max_record_bytes)
    nulls = NullFields(drop_null_arguments, counts.null_fields)
    return _read(records, parse, nulls, counts, on_error, report is None)


def _find_files(given: str | Path, suffixes: tuple[str, ...]) -> list[Path]:
    try:
        path = Path(given)
        if not path.exists():
            raise InputError(f"no file or folder {path}")
        if not path.is_dir():
            return [path]
        files = sorted(file for file in path.rglob("*") if file.name.endswith(suffixes) and file.is_file())
    except (OSError, TypeError, ValueError) as error:
        raise InputError(f"expected the path of a file or folder that can be read, got {given!r}: {error}") from error
    if not files:
        plain = [suffix for suffix in suffixes if not suffix.endswith(".gz")]
        raise InputError(f"the folder {path} holds no {', '.join(plain[:-1])} or {plain[-1]} file")
    return files


def _read(
    records: Iterator[Value | RecordError],
    parse: Callable[[Value], Iterable[T]],
    nulls: NullFields,
    counts: ReadReport,
    on_error: OnError,
    warn: bool,
) -> Iterator[T]:
    try:
        for found in records:
            try:
                items = _parse(found, parse, nulls)
            except RecordError as error:
                if on_error == "raise":
                    raise
                counts.skip(error)
            else:
                counts.records += 1
                yield from items
        if warn and counts.skipped:
            warnings.warn(counts.summary(), stacklevel=2)
    finally:
        if nulls.warning():
            warnings.warn(nulls.warning(), stacklevel=2)


def _parse(found: Value | RecordError, parse: Callable[[Value], Iterable[T]], nulls: NullFields) -> list[T]:
    if isinstance(found, RecordError):
        raise found
    try:
        return list(parse(replace(found, nulls=nulls)))
    except RecursionError as error:
        raise found.place.error("is nested too deeply to be read") from error


def _walk(files: list[Path], progress: bool, report: ReadReport, longest: int) -> Iterator[Value | RecordError]:
    """Every record of every file, or the error in its place."""
    sizes = [file.stat().st_size if file.exists() else 0 for file in files]
    before = shown = 0
    with byte_progress(sum(sizes), progress) as show:
        for file, size in zip(files, sizes, strict=True):
            report.files += 1
            show(before, file.name)
            try:
                if is_torch_file(file):
                    yield parse_torch_file(file, longest)
                    before += size
                    continue
                with open_bytes(file) as opened:
                    for record in parse_records(opened, longest):
                        yield record
                        if before + opened.position() - shown >= _STEP_BYTES:
                            shown = before + opened.position()
                            show(shown, file.name)
            except RecordError as error:
                yield error
            before += size
