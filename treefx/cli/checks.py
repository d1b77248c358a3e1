"""Options that are checked before a command loads PyTorch or does any work."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path

from treefx.errors import InputError

__all__ = ["check_choice", "check_input", "check_output", "check_positive", "parse_bytes"]

_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}


def check_choice(option: str, value: str, choices: Iterable[str]) -> str:
    """Return a value that is one of the choices.

    Raises:
        InputError: It is none of them.
    """
    known = list(choices)
    if value not in known:
        raise InputError(f"expected {option} to be one of {', '.join(known)}; got {value!r}")
    return value


def check_positive(option: str, value: float) -> float:
    """Return a finite value above zero.

    Raises:
        InputError: It is not.
    """
    if not 0.0 < value < float("inf"):
        raise InputError(f"expected {option} above 0; got {value:g}")
    return value


def check_input(path: Path | None) -> None:
    """Check that a file or folder to read is there.

    Raises:
        InputError: It is not.
    """
    if path is not None and not path.exists():
        raise InputError(f"no file or folder {path}")


def check_output(option: str, path: Path | None) -> None:
    """Make the folder of a file that a command will write.

    Raises:
        InputError: The path is a folder, or nothing can be written there.
    """
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{option} {path}: its folder cannot be made: {error.strerror}") from error
    if path.is_dir():
        raise InputError(f"expected {option} to be a file to write; {path} is a folder")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise InputError(f"{option} {path}: permission to write is missing")


def parse_bytes(text: str) -> int:
    """Bytes from text such as ``24GiB``, ``800 MB`` or ``1e9``.

    Raises:
        InputError: it is no positive number with a unit.
    """
    match = re.fullmatch(r"\s*([0-9.]+(?:e[0-9]+)?)\s*([a-z]*)\s*", text.lower())
    try:
        value = float(match[1]) * _UNITS[match[2]] if match else 0.0
    except (KeyError, ValueError):
        value = 0.0
    if not 1 <= value < float("inf"):
        raise InputError(f"memory must be a number of bytes with a unit, such as 24GiB or 800MB, got {text!r}")
    return int(value)
