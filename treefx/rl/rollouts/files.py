"""Tensors by name with a JSON record, in one safetensors file."""

import json
import os
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from treefx.documents import outline
from treefx.errors import InputError, shorten
from treefx.extras import needs

__all__ = ["read_columns", "write_columns"]

_KEY = "treefx.rollouts"
"""Of the metadata: its value is the record, as JSON."""
_VERSION = 1


@needs("rl", "a file of rollouts")
def write_columns(path: "str | PathLike[str]", columns: Mapping[str, Tensor], info: Mapping[str, Any]) -> None:
    """Write a file atomically: an older file of that name stays until the new one is complete.

    Raises:
        InputError: `info` is not JSON.
        OSError: the file cannot be written.
    """
    from safetensors.torch import save_file

    try:
        record = json.dumps({"version": _VERSION, "info": dict(info)}, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise InputError(
            f"info must be JSON to be saved, but {error}; keep names of tasks instead of objects"
        ) from error
    partial = Path(f"{os.fspath(path)}.partial")
    save_file({name: column.contiguous() for name, column in columns.items()}, partial, {_KEY: record})
    os.replace(partial, path)


@needs("rl", "a file of rollouts")
def read_columns(path: "str | PathLike[str]", dtypes: Mapping[str, torch.dtype]) -> tuple[dict[str, Tensor], Any]:
    """Read the columns of the given names and dtypes, and the JSON record.

    Raises:
        InputError: the file is no rollouts of this version, is damaged, or lacks a column.
        OSError: the file cannot be read.
    """
    from safetensors import SafetensorError, safe_open

    name = os.fspath(path)
    try:
        with safe_open(path, framework="pt") as file:
            record = (file.metadata() or {}).get(_KEY)
            if record is None:
                raise InputError(
                    f"{name} is no file of rollouts: its metadata lacks {_KEY!r}; Rollouts.save writes them"
                )
            info = _read_record(record, name)
            missing = sorted(set(dtypes) - set(file.keys()))
            if missing:
                raise InputError(f"{name} lacks the column {missing[0]!r}; it is damaged, sample again")
            columns = {column: file.get_tensor(column) for column in dtypes}
    except SafetensorError as error:
        raise InputError(f"{name} is not a safetensors file, or was cut off: {error}") from error
    for column, dtype in dtypes.items():
        if columns[column].dtype != dtype:
            raise InputError(f"{name}: column {column!r} must be {dtype}, got {columns[column].dtype}")
    return columns, info


def _read_record(text: str, name: str) -> Any:
    try:
        record = json.loads(text)
        version, info = record["version"], record["info"]
        if not isinstance(info, dict):
            raise TypeError(f"info must be an object, got {outline(info)}")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        reason = shorten(repr(error), 200)
        raise InputError(f"{name}: the metadata {_KEY!r} must be JSON with 'version' and 'info': {reason}") from error
    if version != _VERSION:
        raise InputError(
            f"{name} is of version {version!r:.40}, this treefx reads version {_VERSION}; use the one that wrote it"
        )
    return info
