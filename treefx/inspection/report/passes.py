"""List the passes in order, with their seconds and changes."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator

from treefx.inspection.report.material import Material
from treefx.inspection.report.records import PassRun
from treefx.inspection.source_lines import path_of_module
from treefx.passes.runner import GraphChange, NodeLine

__all__ = ["account_passes"]

_NOTHING = GraphChange()
_MOST_CHANGES = 40
_MOST_LINES = 400
"""Of a difference between two graphs."""
_ADDRESS = re.compile(r"^<(?:built-in )?(?:function|method) (\S+).*>$")


def account_passes(material: Material) -> tuple[PassRun, ...]:
    """Every pass that took time, in the order in which they first ran."""
    known = {} if material.analysis is None else material.analysis.changes
    return tuple(
        _run(i, name, seconds, known.get(name, _NOTHING))
        for i, (name, seconds) in enumerate(material.stats["seconds"].items())
    )


def _run(number: int, name: str, seconds: float, change: GraphChange) -> PassRun:
    before, after = change.operators_before, change.operators_after
    names = sorted(item for item in before | after if before[item] != after[item])
    lines = tuple(f"{_short(item)}: {before[item]} -> {after[item]}" for item in names[:_MOST_CHANGES])
    sizes = (len(change.before), len(change.after), before.total(), after.total())
    return PassRun(number, name, seconds, *sizes, lines, tuple(_difference(change)))


def _difference(change: GraphChange) -> Iterator[str]:
    """Diff the nodes that a pass removed and added.

    Names are left out, which passes choose freely.
    """
    before, after = ([_text(node) for node in nodes] for nodes in (change.before, change.after))
    lines = list(difflib.unified_diff(before, after, lineterm="", n=1))[2:]
    yield from lines[:_MOST_LINES]
    if len(lines) > _MOST_LINES:
        yield f"@@ {len(lines) - _MOST_LINES} more lines @@"


def _text(node: NodeLine) -> str:
    module = path_of_module(node.module)
    operator = _short(node.target) if node.kind == "call_function" else f"{node.kind} {node.target}"
    return f"{module}: {operator}" if module else operator


def _short(name: str) -> str:
    plain = _ADDRESS.sub(r"\1", name)
    return plain.removeprefix("aten.").removesuffix(".default")
