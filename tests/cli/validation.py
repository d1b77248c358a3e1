"""Whether what a command prints is valid against its schema, and records that are."""

from __future__ import annotations

import json
import types
from collections.abc import Mapping, Sequence
from typing import Any, Union, get_args, get_origin

import pytest

from treefx.cli.json_schema import REST
from treefx.cli.measurements import MEASUREMENTS
from treefx.cli.schemas import json_schema_of

__all__ = ["assert_measured", "assert_valid", "record_of"]


def assert_valid(text: str, schema: str) -> None:
    """Each record names its schema first, and is valid."""
    found = json.loads(text)
    records = found if isinstance(found, list) else [found]
    fastjsonschema = pytest.importorskip("fastjsonschema", reason="pip install -e '.[test]' brings it")
    valid = fastjsonschema.compile(json_schema_of(schema))
    assert records
    for record in records:
        assert next(iter(record)) == "schema" and record["schema"] == schema
        valid(record)
        with pytest.raises(fastjsonschema.JsonSchemaException):
            valid(record | {"schema": schema.replace("/1", "/0")})


def assert_measured(command: str, records: Sequence[Mapping[str, Any]] | Mapping[str, Any]) -> None:
    """What a measurement returned is valid once it is printed."""
    schema = f"treefx.bench.{command}/1"
    listed = [records] if isinstance(records, Mapping) else records
    assert_valid(json.dumps([{"schema": schema, **record} for record in listed]), schema)


def record_of(command: str) -> Any:
    """A record of the form of a measurement, every field filled."""
    return _example(MEASUREMENTS[command])


def _example(kind: Any) -> Any:
    if isinstance(kind, Mapping):
        return {name.rstrip("?"): _example(item) for name, item in kind.items() if name != REST}
    if isinstance(kind, list):
        return [_example(kind[0])]
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (types.UnionType, Union):
        return _example(arguments[0])
    if origin is not None:
        return origin()
    return {int: 3, float: 0.5, str: "words", bool: True}[kind]
