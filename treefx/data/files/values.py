"""Wrap a JSON value with its place, so that errors name file, line and field."""

import json
import math
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from treefx.data.files.nulls import NullFields
from treefx.documents import names, outline
from treefx.errors import RecordError, shorten

__all__ = ["Place", "Value", "outline"]

_LONGEST_FIELD = 200


@dataclass(frozen=True)
class Place:
    """Where something stands: a file, a line of it, and the path of a field within the record."""

    path: str
    line: int | None = None
    """From 1, of the record's first character; None for the file as a whole."""
    record: int = 0
    """Number of the record in its file, from 0."""
    field: str = ""
    """Such as ``messages[2].content``, after ``[7]`` for record 7 of a list; empty for another record as a whole."""

    def __str__(self) -> str:
        path = self.path.encode(errors="backslashreplace").decode()  # a file's name need not be UTF-8
        field = shorten(self.field, _LONGEST_FIELD)
        parts = [path, f"line {self.line}" if self.line else "", f"field {field}" if field else ""]
        return ", ".join(part for part in parts if part)

    def inside(self, name: str | int) -> "Place":
        """Return the place of an entry of the value at this place."""
        if isinstance(name, int):
            return replace(self, field=f"{self.field}[{name}]")
        return replace(self, field=f"{self.field}.{name}" if self.field else name)

    def error(self, problem: str) -> RecordError:
        """Make an error that names this place."""
        return RecordError(f"{self}: {shorten(problem)}", self.path, self.line, self.field)


@dataclass(frozen=True, eq=False)
class Value:
    """Wrap a parsed JSON value; its methods check the type or raise `RecordError`.

    Attributes:
        raw: the value as ``json`` parsed it.
        place: where it stands.
        nulls: counts or drops the null fields of `free` objects; handed on to every value inside.
    """

    raw: Any
    place: Place
    nulls: NullFields | None = None

    def fail(self, expected: str) -> NoReturn:
        """Refuse the value.

        Raises:
            RecordError: always.
        """
        raise self.place.error(f"expected {expected}, got {outline(self.raw)}")

    def get(self, name: str) -> "Value | None":
        """Return a field of this object; None where it is absent or null."""
        if not isinstance(self.raw, dict):
            self.fail("an object")
        raw = self.raw.get(name)
        return None if raw is None else self._inside(name, raw)

    def __getitem__(self, name: str) -> "Value":
        """A field of this object that has to be there."""
        found = self.get(name)
        if found is None:
            state = "is null" if name in self.raw else "is missing"
            raise self.place.inside(name).error(f"{state}; the fields are {names(self.raw)}")
        return found

    def items(self, expected: str = "a list") -> list["Value"]:
        """Return the entries of this list."""
        if not isinstance(self.raw, list):
            self.fail(expected)
        return [self._inside(number, raw) for number, raw in enumerate(self.raw)]

    def _inside(self, name: str | int, raw: Any) -> "Value":
        return Value(raw, self.place.inside(name), self.nulls)

    def text(self, expected: str = "text") -> str:
        """This string; half of a surrogate pair is refused, which no tokenizer and no file takes."""
        if not isinstance(self.raw, str):
            self.fail(expected)
        _check_characters(self.raw, self.place)
        return self.raw

    def choice(self, among: Collection[str], expected: str = "one of") -> str:
        """This string, which has to be one of those."""
        if not isinstance(self.raw, str) or self.raw not in among:
            self.fail(f"{expected} {', '.join(among)}")
        return self.raw

    def number(self, expected: str = "a finite number") -> float:
        """This number, an integer or not; true, false, NaN and infinities are none."""
        if isinstance(self.raw, bool) or not isinstance(self.raw, int | float):
            self.fail(expected)
        try:
            number = float(self.raw)
        except OverflowError:  # a whole number of more than 308 digits
            number = math.inf
        return number if math.isfinite(number) else self.fail(expected)

    def integer(self, expected: str = "a whole number") -> int:
        """This number, which has to be whole and to fit 64 bits."""
        if isinstance(self.raw, bool) or not isinstance(self.raw, int):
            self.fail(expected)
        if not -(2**63) <= self.raw < 2**63:
            self.fail(f"{expected} of at most 64 bits")
        return self.raw

    def boolean(self, expected: str = "true or false") -> bool:
        """This truth value; 0, 1 and "true" are none."""
        if not isinstance(self.raw, bool):
            self.fail(expected)
        return self.raw

    def free(self, expected: str = "an object") -> dict[str, Any]:
        """Return this object of free fields, fit to be written as JSON.

        Its null fields are counted or dropped, see `nulls`.
        """
        if not isinstance(self.raw, dict):
            self.fail(expected)
        _check_free(self)
        return self.raw if self.nulls is None else self.nulls.read(self.raw, str(self.place))

    def parsed(self, expected: str) -> "Value":
        """Return the JSON value in this string."""
        try:
            return Value(json.loads(self.text(expected)), self.place, self.nulls)
        except (ValueError, RecursionError):
            self.fail(expected)


def _check_characters(text: str, place: Place) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise place.error(
            f"character {error.start} is {ascii(text[error.start])}, half of a surrogate pair: the text was "
            "cut inside a character, or its writer escaped broken text"
        ) from error


def _check_free(value: Value) -> None:
    """Refuse values that only ``json`` accepts: NaN, infinities, lone surrogates."""
    waiting = [value]
    while waiting:
        here = waiting.pop()
        if isinstance(here.raw, str):
            _check_characters(here.raw, here.place)
        elif isinstance(here.raw, float) and not math.isfinite(here.raw):
            here.fail("a finite number: NaN and infinities are no JSON")
        elif isinstance(here.raw, dict):
            for name in here.raw:
                _check_characters(name, here.place)
            waiting += [here._inside(name, raw) for name, raw in here.raw.items() if not _is_plain(raw)]
        elif isinstance(here.raw, list):
            waiting += [here._inside(number, raw) for number, raw in enumerate(here.raw) if not _is_plain(raw)]


def _is_plain(raw: Any) -> bool:
    return raw is None or isinstance(raw, int)
