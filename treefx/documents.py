"""Read JSON files of users; each error names the file and the field."""

import functools
import json
import sys
from collections.abc import Iterable
from dataclasses import MISSING, dataclass, fields, is_dataclass
from os import PathLike, fspath
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, NoReturn, TypeVar, Union, get_args, get_origin, get_type_hints

from treefx.errors import InputError, shorten

__all__ = ["Field", "names", "outline", "parse_document", "read_document"]

_SHOWN_CHARACTERS = 40
_NAMES = {float: "a finite number", int: "a whole number", str: "text", bool: "true or false", NoneType: "null"}
T = TypeVar("T")
_hints = functools.lru_cache(maxsize=64)(get_type_hints)


@dataclass(frozen=True)
class Field:
    """A value of a document.

    Attributes:
        raw: the value as ``json`` parsed it.
        document: name of the document in messages, such as its path.
        name: path of the value in the document; empty for the whole document.
        allow_nan: whether numbers may be NaN and infinite, as measurements are.
        what: expected content of the document, for messages.
    """

    raw: Any
    document: str
    name: str = ""
    allow_nan: bool = False
    what: str = ""

    def fail(self, expected: str) -> NoReturn:
        """Refuse the value.

        Raises:
            InputError: always.
        """
        where = f"{self.document}, field {shorten(self.name, 200)}" if self.name else self.document
        about = f"{self.what}, which is " if self.what and not self.name else ""
        raise InputError(f"{where}: expected {about}{expected}, got {outline(self.raw)}")

    def __getitem__(self, name: str) -> "Field":
        """A field of this object, which has to be there."""
        if not isinstance(self.raw, dict) or name not in self.raw:
            self.fail(f"an object with the field {name!r}")
        return self._inside(name, self.raw[name])

    def entries(self) -> list["Field"]:
        """The entries of this list."""
        if not isinstance(self.raw, list):
            self.fail("a list")
        return [self._inside(number, raw) for number, raw in enumerate(self.raw)]

    def items(self) -> dict[str, "Field"]:
        """Return all fields of this object by name."""
        if not isinstance(self.raw, dict):
            self.fail("an object")
        return {name: self._inside(name, raw) for name, raw in self.raw.items()}

    def read(self, kind: type[T]) -> T:
        """Convert this value to a number, text, list, tuple, dict, dataclass or named tuple.

        Types are checked.

        A class may read itself, by a class method ``read_field``. Of classes, fields with defaults may be missing, and
        other fields may not be there.

        Raises:
            InputError: a value inside is of another type; its place is named.
        """
        found: T = self._read(kind)
        return found

    def _inside(self, name: str | int, raw: Any) -> "Field":
        inner = f"{self.name}[{name}]" if isinstance(name, int) else f"{self.name}.{name}" if self.name else name
        return Field(raw, self.document, inner, self.allow_nan)

    def _read(self, kind: Any) -> Any:
        origin, arguments = get_origin(kind), get_args(kind)
        if kind is Any:
            return self.raw
        if origin in (Union, UnionType):
            if self.raw is None and NoneType in arguments:
                return None
            return self._read(next(kind for kind in arguments if kind is not NoneType))
        if origin is Literal:
            return self.raw if self.raw in arguments else self.fail(f"one of {', '.join(map(repr, arguments))}")
        if origin is list:
            return [entry._read(arguments[0]) for entry in self.entries()]
        if origin is tuple:
            return self._read_tuple(arguments)
        if origin is dict:
            return {name: field._read(arguments[1]) for name, field in self.items().items()}
        if hasattr(kind, "read_field"):
            return kind.read_field(self)
        if hasattr(kind, "_fields"):
            return self._read_named_tuple(kind)
        if is_dataclass(kind):
            return self._read_class(kind)
        return self._read_plain(kind)

    def _read_plain(self, kind: Any) -> Any:
        if kind is float and isinstance(self.raw, int | float) and not isinstance(self.raw, bool):
            if abs(self.raw) <= sys.float_info.max or (self.allow_nan and isinstance(self.raw, float)):
                return float(self.raw)
        elif isinstance(self.raw, kind) and isinstance(self.raw, bool) == (kind is bool):
            return self.raw
        self.fail(_NAMES[kind])

    def _read_tuple(self, kinds: tuple[Any, ...]) -> tuple[Any, ...]:
        entries = self.entries()
        if kinds[-1] is ...:
            return tuple(entry._read(kinds[0]) for entry in entries)
        if len(entries) != len(kinds):
            self.fail(f"a list of {len(kinds)} values")
        return tuple(entry._read(kind) for entry, kind in zip(entries, kinds, strict=True))

    def _read_named_tuple(self, kind: Any) -> Any:
        """It is written as a list."""
        names, entries, hints = kind._fields, self.entries(), _hints(kind)
        if not len(names) - len(kind._field_defaults) <= len(entries) <= len(names):
            self.fail(f"a list of {', '.join(names)}")
        return kind(*(entry._read(hints[name]) for name, entry in zip(names, entries, strict=False)))

    def _read_class(self, kind: Any) -> Any:
        hints, given, known = _hints(kind), self.items(), {each.name: each for each in fields(kind)}
        if not given.keys() <= known.keys():
            self.fail(f"an object with fields among {', '.join(known)}")
        needed = [n for n, each in known.items() if each.default is MISSING and each.default_factory is MISSING]
        read = {name: (given[name] if name in given else self[name])._read(hints[name]) for name in [*given, *needed]}
        try:
            return kind(**read)
        except InputError as error:  # the class refuses the values
            raise InputError(f"{self.document}, field {self.name or '(all)'}: {error}") from error


def read_document(path: str | PathLike[str], what: str, *, allow_nan: bool = False) -> Field:
    """Read a file of JSON.

    Args:
        path: the file.
        what: expected content, for messages.
        allow_nan: see `Field`.

    Raises:
        InputError: it holds something else than JSON.
        OSError: it cannot be read.
    """
    return parse_document(Path(path).read_bytes(), fspath(path), what, allow_nan=allow_nan)


def parse_document(text: str | bytes, document: str, what: str, *, allow_nan: bool = False) -> Field:
    """Read the text of a document; see `read_document`.

    Raises:
        InputError: it is no JSON.
    """
    try:
        return Field(json.loads(text), document, "", allow_nan, what)
    except (ValueError, TypeError, RecursionError) as error:
        begins = text[:40] if isinstance(text, str | bytes) else text
        raise InputError(f"{document}: expected {what}, as JSON, got {begins!r}... ({error})") from error


def outline(raw: Any) -> str:
    """Describe the outer shape of a JSON value, two levels of lists deep, for messages."""
    if isinstance(raw, list):
        if not raw:
            return "an empty list"
        first = f"a list of {len(raw[0])}" if isinstance(raw[0], list) and raw[0] else outline(raw[0])
        return f"a list of {len(raw)}, its first entry {first}"
    if isinstance(raw, dict):
        return f"an object with the fields {names(raw)}"
    if raw is None or isinstance(raw, bool):
        return {None: "null", True: "true", False: "false"}[raw]
    return f"text {ascii(_beginning(raw))}" if isinstance(raw, str) else f"the number {_beginning(str(raw))}"


def names(given: Iterable[str]) -> str:
    """Names of fields, for messages of errors: the first eight."""
    shown = [ascii(_beginning(name)) for name in given]
    return ", ".join(shown[:8] + (["..."] if len(shown) > 8 else [])) or "(none)"


def _beginning(text: str) -> str:
    return text if len(text) <= _SHOWN_CHARACTERS else text[: _SHOWN_CHARACTERS - 3] + "..."
