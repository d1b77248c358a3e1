"""Attentions on the tree: score and mask as mathematics, form and source of the kernel."""

from __future__ import annotations

from torch import fx

from treefx.inspection.report.forest import count_tokens, visible_pairs, visited_tiles
from treefx.inspection.report.formulas import mathml_of, visible_of
from treefx.inspection.report.lines import line_of, module_path
from treefx.inspection.report.masks import draw_mask
from treefx.inspection.report.material import Material
from treefx.inspection.report.records import AttentionAccount, Mask
from treefx.inspection.report.sizes import Sizes
from treefx.inspection.score_text import SPARSE, Formula, attention_formulas
from treefx.passes.packing.kernel_sources import kernel_source_of

__all__ = ["account_attentions"]


def account_attentions(
    material: Material,
) -> tuple[tuple[AttentionAccount, ...], tuple[str, ...], tuple[Mask, ...]]:
    """Describe every tree attention of the rewritten graph, with GPU sources and masks.

    Sources are distinct.
    """
    gm = material.graphs.get("rewritten")
    if gm is None:
        return (), (), ()
    pairs, on_rows = visible_pairs(material.rows) if material.rows is not None and material.packed else (0, 0)
    tiles = visited_tiles(material.rows) if material.rows is not None and material.packed else (0, 0)
    sources: dict[str, int] = {}
    mathml: dict[tuple[str, ...], str] = {}
    masks: list[Mask] = []
    pictures: dict[str, int] = {}
    found = []
    for node, formula in attention_formulas(material.captured, gm).items():
        listed = _listed(node)
        source = sources.setdefault(kernel_source_of(node), len(sources))
        key = (formula.score, formula.visible)
        if key not in mathml:
            mathml[key] = mathml_of(formula.expression, formula.condition, formula.names)
        if formula.visible not in pictures:
            drawn = _masks(material, formula) if listed is None else []
            pictures[formula.visible] = len(masks) if drawn else -1
            masks += drawn
        found.append(
            AttentionAccount(
                node.name, formula.score, formula.visible, mathml[key], module_path(node), line_of(node),
                formula.shapes, _kernel(node), source, pairs if listed is None else _pairs(material, listed), on_rows,
                pictures[formula.visible], *tiles,
            )
        )  # fmt: skip
    return tuple(found), tuple(sources), tuple(masks)


def _listed(node: fx.Node) -> int | None:
    """Return how many keys each query lists; None where it sees all that the mask shows."""
    keys = node.args[3]
    assert isinstance(keys, fx.Node)
    return Sizes().number(keys.meta["val"].shape[-1]) if node.target is SPARSE else None


def _pairs(material: Material, listed: int) -> int:
    """Count the pairs that are read: as many as a list holds, or as a query has ancestors and itself."""
    rows = material.rows
    if rows is None or not material.packed:
        return 0
    return int((rows.depth[: count_tokens(rows)] + 1).clip(max=listed).sum())


def _masks(material: Material, formula: Formula) -> list[Mask]:
    """Draw a mask over the last forest; none without the forest or a sympy form of it."""
    if material.rows is None or not material.packed:
        return []
    try:
        return [draw_mask(visible_of(formula.condition, formula.names), material.rows)]
    except (KeyError, TypeError, ValueError, AttributeError, NotImplementedError):
        return []


def _kernel(node: fx.Node) -> str:
    """The form that runs on the device of the graph."""
    query = node.args[0]
    assert isinstance(query, fx.Node)
    device, wanted = query.meta["val"].device.type, node.args[7] if len(node.args) > 7 else "auto"
    if node.target is SPARSE:
        return "chosen keys on the CPU" if device == "cpu" else "chosen keys by Triton"
    if wanted != "auto":
        return str(wanted)
    return "tiles on the CPU" if device == "cpu" else "Triton"
