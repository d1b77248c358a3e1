"""Record finished models of ``treefx doctor --zoo --out``, so that a run can resume."""

from __future__ import annotations

import importlib.metadata
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

from treefx.documents import read_document
from treefx.errors import InputError
from treefx.tools.bench.zoo.batches import describe_batches
from treefx.tools.bench.zoo.run import ZooRow

__all__ = ["ZooRecord", "conditions"]

_FINAL = ("packed", "partly", "rows", "refused", "fails in PyTorch", "rounds")
"""Verdicts that a resumed run keeps; what was wrong, crashed or not installed is checked again."""


def conditions(inner: str, batches: int = 2) -> dict[str, str]:
    """What a table was made with: the inner compiler, the libraries, the batches."""
    return {
        "inner": inner,
        **{library: _version(library) for library in ("torch", "transformers")},
        "batches": describe_batches(batches),
    }


def _version(library: str) -> str:
    try:
        return importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


class ZooRecord:
    """Rows by model, kept in a file after every model.

    Args:
        path: The file; ``None`` keeps nothing.
        inner: Inner compiler of the run.
        batches: Number of batches of each model.
        resume: Go on with what the file holds.

    Raises:
        InputError: There is a file already, or it was made with another inner compiler or other batches.
    """

    def __init__(self, path: Path | None, inner: str, batches: int = 2, *, resume: bool = False) -> None:
        self.path, self.conditions = path, conditions(inner, batches)
        self.rows: dict[str, ZooRow] = {}
        if resume and path is None:
            raise InputError("--resume needs the file of the run that it goes on with: give --out")
        if path is None or not path.exists():
            return
        if not resume:
            raise InputError(f"{path} holds a run already; go on with it by --resume, or give another file")
        try:
            kept = read_document(path, "what `treefx doctor --zoo --out` writes", allow_nan=True)
        except OSError as error:
            raise InputError(f"{path} cannot be read: {error.strerror}") from error
        made_with = {name: kept[name].read(str) for name in ("inner", "batches")}
        if made_with["inner"] != inner:
            raise InputError(f"{path} was made with the inner compiler {made_with['inner']}, got --inner {inner}")
        if made_with["batches"] != self.conditions["batches"]:
            raise InputError(
                f"{path} was made with batches of {made_with['batches']}, got {self.conditions['batches']}"
            )
        self.rows = {row.model: row for row in kept["rows"].read(list[ZooRow])}

    def remaining(self, names: Iterable[str]) -> list[str]:
        """The models that have no verdict to keep."""
        return [name for name in names if name not in self.rows or self.rows[name].verdict not in _FINAL]

    def add(self, row: ZooRow) -> None:
        """Keep a row; the file is replaced atomically."""
        self.rows[row.model] = row
        if self.path is None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps({**self.conditions, "rows": [asdict(row) for row in self.rows.values()]}, indent=1)
        beside = self.path.with_name(self.path.name + ".part")
        beside.write_text(text, encoding="utf-8")
        os.replace(beside, self.path)

    def of(self, names: Sequence[str]) -> list[ZooRow]:
        """Rows of these models, in their order."""
        return [self.rows[name] for name in names if name in self.rows]
