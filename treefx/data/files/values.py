"""A JSON value that knows where it stands, so that whoever reads it names the place of what is wrong."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from treefx.errors import RecordError

__all__ = ["Place", "Value", "outline"]


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
        parts = [self.path, f"line {self.line}" if self.line else "", f"field {self.field}" if self.field else ""]
        return ", ".join(part for part in parts if part)

    def inside(self, name: str | int) -> "Place":
        """The place of an entry of the value that stands here."""
        if isinstance(name, int):
            return replace(self, field=f"{self.field}[{name}]")
        return replace(self, field=f"{self.field}.{name}" if self.field else name)

    def error(self, problem: str) -> RecordError:
        """The error that names this place."""
        return RecordError(f"{self}: {problem}", self.path, self.line, self.field)


@dataclass(frozen=True, eq=False)
class Value:
    """A parsed JSON value; its methods return what was expected, or raise `RecordError` with the place.

    Attributes:
        raw: what ``json`` made of it.
        place: where it stands.
    """

    raw: Any
    place: Place

    def fail(self, expected: str) -> NoReturn:
        """Refuse the value.

        Raises:
            RecordError: always.
        """
        raise self.place.error(f"expected {expected}, got {outline(self.raw)}")

    def get(self, name: str) -> "Value | None":
        """A field of this object; None where it is absent or null."""
        if not isinstance(self.raw, dict):
            self.fail("an object")
        raw = self.raw.get(name)
        return None if raw is None else Value(raw, self.place.inside(name))

    def __getitem__(self, name: str) -> "Value":
        """A field of this object that has to be there."""
        found = self.get(name)
        if found is None:
            state = "is null" if name in self.raw else "is missing"
            raise self.place.inside(name).error(f"{state}; the fields are {_names(self.raw)}")
        return found

    def items(self, expected: str = "a list") -> list["Value"]:
        """The entries of this list."""
        if not isinstance(self.raw, list):
            self.fail(expected)
        return [Value(raw, self.place.inside(number)) for number, raw in enumerate(self.raw)]

    def text(self, expected: str = "text") -> str:
        """This string; half of a surrogate pair is refused, which no tokenizer and no file takes."""
        if not isinstance(self.raw, str):
            self.fail(expected)
        try:
            self.raw.encode()
        except UnicodeEncodeError as error:
            raise self.place.error(
                f"character {error.start} is {ascii(self.raw[error.start])}, half of a surrogate pair: the text was "
                "cut inside a character, or its writer escaped broken text"
            ) from error
        return self.raw

    def number(self, expected: str = "a finite number") -> float:
        """This number, an integer or not; true, false, NaN and infinities are none."""
        if isinstance(self.raw, bool) or not isinstance(self.raw, int | float) or not math.isfinite(self.raw):
            self.fail(expected)
        return float(self.raw)

    def integer(self, expected: str = "a whole number") -> int:
        """This number, which has to be whole."""
        if isinstance(self.raw, bool) or not isinstance(self.raw, int):
            self.fail(expected)
        return self.raw

    def boolean(self, expected: str = "true or false") -> bool:
        """This truth value; 0, 1 and "true" are none."""
        if not isinstance(self.raw, bool):
            self.fail(expected)
        return self.raw


def outline(raw: Any) -> str:
    """The outer shape of a JSON value, for messages of errors."""
    if isinstance(raw, dict):
        return f"an object with the fields {_names(raw)}"
    if isinstance(raw, list):
        return f"a list of {len(raw)}, its first entry {outline(raw[0])}" if raw else "an empty list"
    if raw is None or isinstance(raw, bool):
        return {None: "null", True: "true", False: "false"}[raw]
    kind = "text" if isinstance(raw, str) else "the number"
    shown = ascii(raw)
    return f"{kind} {shown if len(shown) <= 40 else shown[:37] + '...'}"


def _names(fields: Sequence[str] | dict[str, Any]) -> str:
    names = [repr(name) for name in fields]
    return ", ".join(names[:8] + (["..."] if len(names) > 8 else [])) or "(none)"
