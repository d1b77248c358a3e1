"""One replaced symbol, and the question whether treefx compiles what Dynamo traces."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["Patch", "is_ours"]


@dataclass(frozen=True)
class Patch:
    """A symbol of a library that treefx replaces or sets.

    Attributes:
        symbol: its dotted name.
        versions: the versions of its library in which it is replaced.
        why: what goes wrong without it.
        test: a test that fails without it, as pytest names it.
        apply: replaces it; None if it is set only while treefx compiles.
    """

    symbol: str
    versions: str
    why: str
    test: str
    apply: Callable[[], None] | None


def is_ours(tx: Any) -> bool:
    """Whether treefx compiles what an instruction translator of Dynamo is tracing; it only observes some models."""
    compiler = tx.output.compiler_fn
    if getattr(compiler, "compiler_name", None) != "treefx":
        return False
    options = getattr(compiler, "kwargs", {}).get("options")
    return not (options.get("observe") if isinstance(options, Mapping) else getattr(options, "observe", False))
