"""The passes in order, with their seconds and what they changed."""

from __future__ import annotations

import re
from collections import Counter

from treefx.inspection.report.material import Material
from treefx.inspection.report.records import PassRun
from treefx.passes.runner import GraphChange

__all__ = ["account_passes"]

_NOTHING = GraphChange(0, 0, Counter(), Counter())
_MOST_CHANGES = 40
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
    return PassRun(number, name, seconds, change.nodes_before, change.nodes_after, before.total(), after.total(), lines)


def _short(name: str) -> str:
    plain = _ADDRESS.sub(r"\1", name)
    return plain.removeprefix("aten.").removesuffix(".default")
