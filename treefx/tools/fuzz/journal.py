"""Keep a search's findings in a folder: settings, programs as JSON lines, scripts."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from treefx.documents import parse_document, read_document
from treefx.errors import InputError

__all__ = ["Finding", "Journal"]


@dataclass(frozen=True)
class Finding:
    """What became of one program of the search."""

    number: int
    family: str
    inner: str
    kind: str
    note: str = ""
    error: float = 0.0
    seconds: float = 0.0
    program: str = ""
    """The program in words: the smallest one that fails, where it fails."""
    script: str | None = None
    """Where its script lies, if it fails."""


class Journal:
    """The folder of a search. The same settings go on where it ended; others are refused.

    Args:
        folder: Is made if it is not there; None keeps everything in memory.
        settings: What the programs are drawn from.

    Raises:
        InputError: The folder belongs to a search with other settings.
    """

    def __init__(self, folder: Path | None, settings: dict[str, Any]) -> None:
        self._folder = folder
        self.findings: list[Finding] = []
        if folder is None:
            return
        folder.mkdir(parents=True, exist_ok=True)
        known = folder / "settings.json"
        if known.exists() and read_document(known, "the settings of a search").raw != settings:
            raise InputError(
                f"{folder} holds a search with the settings {known.read_text().strip()}, not {json.dumps(settings)}; "
                "give the same options to go on with it, or another folder with --out"
            )
        known.write_text(json.dumps(settings) + "\n")
        self.findings = _read(folder / "programs.jsonl")

    @property
    def done(self) -> set[int]:
        """Numbers of the programs that need not run again."""
        return {finding.number for finding in self.findings}

    def add(self, finding: Finding) -> None:
        """Remember a finding."""
        self.findings.append(finding)
        if self._folder is not None:
            with (self._folder / "programs.jsonl").open("a") as file:
                file.write(json.dumps(asdict(finding)) + "\n")

    def write_script(self, name: str, text: str) -> str | None:
        """Write the script of a failure; says where."""
        if self._folder is None:
            return None
        path = self._folder / "failures" / f"{name}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        return str(path)


def _read(path: Path) -> list[Finding]:
    """The findings of a file; a last line that an interruption cut short is left out."""
    found = []
    lines = path.read_bytes().splitlines() if path.exists() else []
    for number, line in enumerate(lines, start=1):
        try:
            read = parse_document(line, f"{path}, line {number}", "a finding", allow_nan=True)
        except InputError:
            if number == len(lines):
                break
            raise
        found.append(read.read(Finding))
    return found
