"""JSON Schema (draft 7) of records, made from the types of their fields."""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any, Union, get_args, get_origin, get_type_hints

__all__ = ["REST", "json_schema"]

REST = "*"
"""Stands for all fields that are not named."""
_SCALARS: Mapping[Any, str] = {bool: "boolean", int: "integer", str: "string", type(None): "null"}
_NUMBER = {"anyOf": [{"type": "number"}, {"enum": ["inf", "-inf", "nan"]}]}
"""JSON has no word for infinity."""


def json_schema(schema: str, form: Any) -> dict[str, Any]:
    """The JSON Schema of a record.

    Args:
        schema: Name and version, which the record has as its key ``schema``.
        form: A dataclass, or the types of fields by name. A name that ends with "?" may be missing, and `REST` is the
            type of all other fields. A list of one form stands for a list of such records.
    """
    definitions: dict[str, Any] = {}
    made = _object(_fields(form) if is_dataclass(form) else form, definitions)
    made["properties"]["schema"] = {"const": schema}
    made["required"] = sorted({*made["required"], "schema"})
    head = {"$schema": "http://json-schema.org/draft-07/schema#", "title": schema}
    return {**head, **made, "definitions": definitions}


def _fields(kind: Any) -> dict[str, Any]:
    hints = get_type_hints(kind)
    return {item.name: hints[item.name] for item in fields(kind)}


def _object(form: Mapping[str, Any], definitions: dict[str, Any]) -> dict[str, Any]:
    named = {name: kind for name, kind in form.items() if name != REST}
    return {
        "type": "object",
        "properties": {name.rstrip("?"): _of(kind, definitions) for name, kind in named.items()},
        "required": [name for name in named if not name.endswith("?")],
        "additionalProperties": _of(form[REST], definitions) if REST in form else False,
    }


def _of(kind: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    """The schema of a type: a record is defined once, and referred to."""
    if kind is Any:
        return {}
    if isinstance(kind, Mapping):
        return _object(kind, definitions)
    if isinstance(kind, list):
        return {"type": "array", "items": _of(kind[0], definitions)}
    if kind is float:
        return _NUMBER
    if kind in _SCALARS:
        return {"type": _SCALARS[kind]}
    if is_dataclass(kind):
        name = getattr(kind, "__name__", "")
        if name not in definitions:
            definitions[name] = {}  # it may hold itself
            definitions[name] = _object(_fields(kind), definitions)
        return {"$ref": f"#/definitions/{name}"}
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (types.UnionType, Union):
        return {"anyOf": [_of(item, definitions) for item in arguments]}
    if origin is dict:
        return {"type": "object", "additionalProperties": _of(arguments[1], definitions)}
    if origin is tuple and arguments[1:] != (...,):
        items = [_of(item, definitions) for item in arguments]
        return {"type": "array", "items": items, "minItems": len(items), "maxItems": len(items)}
    return {"type": "array", "items": _of(arguments[0], definitions)}
