"""Describe a replaced symbol, and decide whether treefx compiles the traced frame."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["Patch", "is_ours", "is_treefx"]


@dataclass(frozen=True)
class Patch:
    """A symbol of a library that treefx replaces or sets.

    Attributes:
        symbol: its dotted name.
        versions: the versions of its library in which it is replaced.
        why: the failure without it.
        test: a test that fails without it, as pytest names it.
        apply: replaces it; None if it is set only while treefx compiles.
    """

    symbol: str
    versions: str
    why: str
    test: str
    apply: Callable[[], None] | None


def is_ours(tx: Any) -> bool:
    """Return whether treefx compiles the frame of an instruction translator.

    It only observes some models.
    """
    return is_treefx(tx.output.compiler_fn)


def is_treefx(compiler: Any) -> bool:
    """Return whether a compiler of Dynamo is treefx, and does not only observe."""
    if getattr(compiler, "compiler_name", None) != "treefx":
        return False
    options = getattr(compiler, "kwargs", {}).get("options")
    return not (options.get("observe") if isinstance(options, Mapping) else getattr(options, "observe", False))
