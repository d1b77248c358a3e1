"""Where the backward sums the gradients of all rows through a token."""

from __future__ import annotations

from collections import Counter

from treefx.inspection.graph_diff import operator_name, restorations
from treefx.inspection.images import partners, source_of
from treefx.inspection.report.lines import line_of, module_path
from treefx.inspection.report.material import Material
from treefx.inspection.report.records import Restoration

__all__ = ["account_restorations"]


def account_restorations(material: Material) -> tuple[Restoration, ...]:
    """Every restoring node of the backward graph, in order."""
    graphs = material.graphs
    if "backward" not in graphs or "forward" not in graphs:
        return ()
    forward = {node.name: node for node in graphs["forward"].graph.nodes}
    pairs, times = partners(graphs["forward"], graphs["backward"]), _multiplicities(material)
    found = []
    for node in restorations(graphs["backward"]):
        partner = forward.get(pairs.get(node.name, ""))
        of, place = ("", node) if partner is None else (source_of(partner), partner)
        text = material.sizes.text(node.meta.get("val"))
        found.append(Restoration(node.name, operator_name(node), of, module_path(place), line_of(place), text, times))
    return tuple(found)


def _multiplicities(material: Material) -> tuple[tuple[int, int], ...]:
    """How many tokens of the last forest have one row, two rows, and so on: (tokens, rows)."""
    if material.rows is None:
        return ()
    counts = Counter(int(x) for x in material.rows.multiplicity if x)
    return tuple((tokens, rows) for rows, tokens in sorted(counts.items()))
