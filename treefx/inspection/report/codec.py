"""Convert frozen records to JSON values and back, by the types of their fields."""

from __future__ import annotations

import functools
import json
import math
import types
from dataclasses import fields, is_dataclass
from typing import Any, Union, get_args, get_origin, get_type_hints

from treefx.errors import InputError

__all__ = ["as_plain", "from_plain", "from_text", "to_text"]


def as_plain(value: Any) -> Any:
    """Convert a record, or a container of them, to dicts, lists and scalars.

    Numbers without a JSON form become text.
    """
    if is_dataclass(value) and not isinstance(value, type):
        return {item.name: as_plain(getattr(value, item.name)) for item in fields(value)}
    if isinstance(value, dict):
        return {str(key): as_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [as_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def to_text(record: Any) -> str:
    """A record with a field ``schema`` as JSON, that field first."""
    plain = as_plain(record)
    return json.dumps({"schema": plain.pop("schema"), **plain})


def from_text(kind: Any, text: str, schema: str, what: str) -> Any:
    """Read the text of ``to_text``.

    Args:
        kind: The record.
        text: JSON.
        schema: Name and version of the form that this version of treefx reads.
        what: Name of the record in errors.

    Raises:
        InputError: The text is no such record, or one of another version.
    """
    try:
        value = json.loads(text)
    except ValueError as error:
        raise InputError(f"a {what} should be the text of {kind.__name__}.to_json(), got no JSON: {error}") from error
    found = value.get("schema") if isinstance(value, dict) else None
    if found != schema:
        raise InputError(
            f"a {what} should have the schema {schema!r}, got {found!r}; read it with the version of treefx that "
            "wrote it, or make it again"
        )
    return from_plain(kind, value, what)


def from_plain(kind: Any, value: Any, where: str = "report") -> Any:
    """The value of a type that ``as_plain`` has written.

    Args:
        kind: A record, ``tuple[X, ...]``, ``dict[str, X]``, a union with None, a scalar, or ``Any``.
        value: From JSON.
        where: Names the value in errors.

    Raises:
        InputError: The value is of another form.
    """
    if kind is Any:
        return value
    if is_dataclass(kind):
        return _record(kind, value, where)
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (types.UnionType, Union):
        return None if value is None else from_plain(next(a for a in arguments if a is not type(None)), value, where)
    if origin is tuple:
        return _tuple(arguments, value, where)
    if origin is dict:
        _expect(isinstance(value, dict), "an object", value, where)
        return {key: from_plain(arguments[1], item, f"{where}.{key}") for key, item in value.items()}
    return _scalar(kind, value, where)


def _scalar(kind: Any, value: Any, where: str) -> Any:
    if kind is float and (value in ("inf", "-inf", "nan") or isinstance(value, int) and not isinstance(value, bool)):
        return float(value)
    _expect(isinstance(value, kind) and (kind is bool or not isinstance(value, bool)), kind.__name__, value, where)
    return value


def _tuple(arguments: tuple[Any, ...], value: Any, where: str) -> tuple[Any, ...]:
    _expect(isinstance(value, list), "a list", value, where)
    kinds = [arguments[0]] * len(value) if arguments[1:] == (...,) else list(arguments)
    _expect(len(kinds) == len(value), f"a list of {len(kinds)}", value, where)
    return tuple(from_plain(kind, x, f"{where}[{i}]") for i, (kind, x) in enumerate(zip(kinds, value, strict=True)))


def _record(kind: Any, value: Any, where: str) -> Any:
    _expect(isinstance(value, dict), "an object", value, where)
    hints = _hints(kind)
    unknown = sorted(set(value) - set(hints))
    _expect(not unknown, f"only the fields {', '.join(hints)}", ", ".join(unknown), where)
    try:
        return kind(**{name: from_plain(hints[name], item, f"{where}.{name}") for name, item in value.items()})
    except TypeError as error:
        raise InputError(f"{where} lacks a field: {error}; write reports with Report.to_json()") from error


@functools.cache
def _hints(kind: Any) -> dict[str, Any]:
    known = get_type_hints(kind)
    return {item.name: known[item.name] for item in fields(kind)}


def _expect(holds: bool, wanted: str, value: Any, where: str) -> None:
    if not holds:
        raise InputError(f"{where} should be {wanted}, got {value!r:.80}; write reports with Report.to_json()")
