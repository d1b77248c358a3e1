"""Parse the records of an open file one by one.

A file holds JSON lines, a JSON list, or one JSON document.

Of lines and lists only the record at hand is in memory, and of a record that is too long only its beginning. A broken
line is one error, and reading goes on with the next; after a syntax error in a list the place where the next entry
begins is unknown, so it ends there.
"""

import codecs
import io
import json
import re
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TypeVar

from treefx.data.files.opening import Opened
from treefx.data.files.values import Place, Value
from treefx.errors import RecordError

__all__ = ["parse_records"]

_CHUNK = 1 << 16
_SPACE = re.compile(r"[ \t\n\r]*")
_BLANK = b" \t\r\n"
_NOT_UTF8 = re.compile("[\udc80-\udcff]")
_LINES = (".jsonl", ".ndjson", ".jsonl.gz", ".ndjson.gz")
_LONGEST_WORD = 16
"""Longest JSON word: a parse error further from the end of the buffer is a real error."""
T = TypeVar("T")


def parse_records(opened: Opened, longest: int) -> Iterator[Value | RecordError]:
    """Every record of the file, or the error that stands in its place.

    A file that begins with ``[`` is a list; a file named ``.jsonl`` or ``.ndjson``, or with a JSON value as its first
    line, is lines; anything else is one document.

    Args:
        opened: the file.
        longest: most bytes of a record.
    """
    stream, place = opened.stream, opened.place
    found: Iterator[Value | RecordError]
    if opened.head().lstrip(b" \t\r\n").startswith(b"["):
        found = _parse_list(_Window(stream, longest), place)
    else:
        found = _parse_document_or_lines(stream, place, longest)
    empty = True
    try:
        for record in found:
            empty = False
            yield record
    except (OSError, EOFError, zlib.error) as error:  # from gzip
        yield place.error(f"the compressed data end or break inside ({error}): the file may be truncated")
        return
    if empty:
        yield place.error("holds no record")


def _parse_document_or_lines(stream: io.BufferedReader, place: Place, longest: int) -> Iterator[Value | RecordError]:
    line = _skip_blank_lines(stream) + 1
    first = stream.readline(longest + 1)
    if not first:
        return
    if not place.path.endswith(_LINES) and not _is_json(first):
        here = replace(place, line=line)
        data = first + stream.read(max(longest + 1 - len(first), 0))
        try:
            if len(data) > longest:
                raise _too_long(here, longest)
            yield Value(_guarded(lambda: json.loads(data.decode()), here), here)
        except RecordError as error:
            yield error
        return
    yield from _parse_lines(stream, place, longest, first, line)


def _skip_blank_lines(stream: io.BufferedReader) -> int:
    """Skip blank lines and return their number.

    Of an overlong line, the rest is dropped.
    """
    lines = 0
    while head := stream.peek(_CHUNK)[:_CHUNK]:
        text = head.lstrip(_BLANK)
        blank = head[: len(head) - len(text)]
        lines += blank.count(b"\n")
        stream.read(blank.rfind(b"\n") + 1 if text else len(blank))
        if text:
            break
    return lines


def _parse_lines(
    stream: io.BufferedReader, place: Place, longest: int, line: bytes, number: int
) -> Iterator[Value | RecordError]:
    """The records of a line that was read already, with its number, and of those behind it."""
    record = 0
    while line:
        if line.strip(_BLANK):
            here = replace(place, line=number, record=record)
            record += 1
            yield _parse_line(line, here, longest)
        while len(line) > longest and not line.endswith(b"\n"):
            line = stream.readline(longest + 1)  # the rest of a line that is too long
        line = stream.readline(longest + 1)
        number += 1


def _parse_line(line: bytes, here: Place, longest: int) -> Value | RecordError:
    if len(line) > longest and line.rstrip(_BLANK)[longest:]:
        return _too_long(here, longest)
    try:
        return Value(_guarded(lambda: json.loads(line.decode()), here), here)
    except RecordError as error:
        cut = not line.endswith(b"\n") and "UTF-8" not in str(error)
        hint = "; the file ends in this line without a line break: it may be truncated" if cut else ""
        return here.error(str(error).removeprefix(f"{here}: ") + hint)


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True


def _too_long(place: Place, longest: int) -> RecordError:
    return place.error(
        f"expected a record of at most {longest:,} bytes, got a longer one: line breaks between records may be "
        "missing, or max_record_bytes= has to be larger"
    )


def _guarded(parse: Callable[[], T], place: Place) -> T:
    """Run ``parse`` and convert its failures to errors that name the place."""
    try:
        return parse()
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        raise place.error(f"is not UTF-8: byte {error.start} is 0x{byte:02x} ({error.reason})") from error
    except json.JSONDecodeError as error:
        where = f"line {error.lineno} of it, column {error.colno}" if error.lineno > 1 else f"column {error.colno}"
        raise place.error(f"is not JSON: {_message(error)} at {where}") from error
    except RecursionError as error:
        raise place.error("is nested too deeply to be read") from error
    except ValueError as error:  # a number of thousands of digits
        raise place.error(f"is not JSON that can be read: {error}") from error


def _message(error: json.JSONDecodeError) -> str:
    return error.msg.removesuffix(" at")


class _Window:
    """Hold the current window of a text: earlier text is dropped, later text is not read yet."""

    def __init__(self, stream: io.BufferedReader, longest: int) -> None:
        self._stream, self._longest = stream, longest
        # Bytes that are not UTF-8 become surrogates, so that only the record that holds them is lost.
        self._decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")
        self._json = json.JSONDecoder()
        self.text, self.at, self.line, self.ended = "", 0, 1, False

    def more(self) -> bool:
        """Read as much again as there is; return False at the end.

        Doubling keeps long records from being parsed too often.
        """
        if self.ended:
            return False
        data = self._stream.read(min(max(_CHUNK, len(self.text) - self.at), max(_CHUNK, self._longest)))
        self.ended = not data
        self.text, self.at = self.text[self.at :] + self._decoder.decode(data, self.ended), 0
        return not self.ended

    def skip(self, to: int) -> None:
        """Go on to a place of the window."""
        self.line += self.text.count("\n", self.at, to)
        self.at = to

    def peek(self) -> str:
        """The next character that is no white space; empty at the end."""
        while True:
            match = _SPACE.match(self.text, self.at)
            assert match is not None
            self.skip(match.end())
            if self.at < len(self.text):
                return self.text[self.at]
            if not self.more():
                return ""

    def value(self, place: Place) -> Value | RecordError:
        """The JSON value that begins here.

        Raises:
            RecordError: it is no JSON, so that its end is not known.
        """
        while True:
            try:
                raw, end = self._json.raw_decode(self.text, self.at)
            except json.JSONDecodeError as error:
                inside = error.pos + _LONGEST_WORD < len(self.text) and not error.msg.startswith("Unterminated")
                if not inside and len(self.text) - self.at > self._longest:
                    raise _too_long(place, self._longest) from None
                if inside or not self.more():
                    raise place.error(f"is not JSON: {_message(error)} {self._where(error.pos, inside)}") from error
            else:
                # A number at the end of the window may continue.
                if end < len(self.text) or not self.more():
                    break
        if end - self.at > self._longest:
            raise _too_long(place, self._longest)
        wrong = _NOT_UTF8.search(self.text, self.at, end)
        self.skip(end)
        if wrong:
            return place.error(f"is not UTF-8: it holds the byte 0x{ord(wrong.group()) - 0xDC00:02x}")
        return Value(raw, place)

    def _where(self, position: int, inside: bool) -> str:
        lines = self.text.count("\n", self.at, position)
        where = f"at line {self.line + lines}" if lines else f"at character {position - self.at} of the record"
        return where if inside else f"{where}; the file ends inside the list: it may be truncated"


def _parse_list(window: "_Window", place: Place) -> Iterator[Value | RecordError]:
    window.peek()
    window.skip(window.at + 1)
    record = 0
    while window.peek() not in ("]", ""):
        here = replace(place, line=window.line, record=record, field=f"[{record}]")
        try:
            yield _guarded(lambda: window.value(here), here)
        except RecordError as error:
            yield error
            return
        record += 1
        if window.peek() == ",":
            window.skip(window.at + 1)
        elif window.peek() != "]":
            break
    here = replace(place, line=window.line)
    if window.peek() != "]":
        came = f"{window.peek()!r} at line {window.line}" if window.peek() else "the end: the file may be truncated"
        yield here.error(f"the list must go on with ',' or end with ']', got {came}")
        return
    window.skip(window.at + 1)
    if window.peek():
        yield here.error(f"nothing may follow the list, got {window.peek()!r} at line {window.line}")
