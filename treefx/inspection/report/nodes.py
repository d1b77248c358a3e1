"""The nodes of all stages, for drawing."""

from __future__ import annotations

from collections.abc import Mapping

from torch import fx

from treefx.inspection.graph_diff import operator_name
from treefx.inspection.images import partners, source_of
from treefx.inspection.report.lines import line_of, module_path
from treefx.inspection.report.material import Material
from treefx.inspection.report.records import GraphNode, OperatorAccount

__all__ = ["MARKS", "account_nodes"]

MARKS = {
    "treefx.restore": "restore",
    "treefx.restore_pick": "restore",
    "treefx.tree_attention": "attention",
    "treefx.tree_attention_backward": "attention",
    "treefx.sparse_tree_attention": "attention",
    "treefx.sparse_tree_attention_backward": "attention",
    "treefx.expand": "expand",
    "treefx.pick": "expand",
}
"""Operator that treefx inserts -> its purpose."""


def account_nodes(material: Material, operators: tuple[OperatorAccount, ...]) -> dict[str, tuple[GraphNode, ...]]:
    """List nodes by stage; the captured stage is in ATen.

    ``sources`` of the backward are nodes of the forward.
    """
    codes = {item.name: item.code for item in operators}
    stages = {"captured": material.traced} | {k: gm for k, gm in material.graphs.items() if k != "captured"}
    back = partners(stages["forward"], stages["backward"]) if {"forward", "backward"} <= set(stages) else {}
    return {
        stage: tuple(_node(node, material, codes if stage == "captured" else {}, back if stage == "backward" else None)
                     for node in gm.graph.nodes)
        for stage, gm in stages.items()
    }  # fmt: skip


def _node(node: fx.Node, material: Material, codes: Mapping[str, str], back: Mapping[str, str] | None) -> GraphNode:
    name = operator_name(node) if node.op.startswith("call_") else node.op
    source = source_of(node) if back is None else back.get(node.name, "")
    return GraphNode(
        node.name,
        name,
        tuple(item.name for item in node.all_input_nodes),
        material.sizes.text(node.meta.get("val", node.meta.get("example_value"))),
        module_path(node),
        line_of(node),
        (source,) if source and node.op.startswith("call_") else (),
        MARKS.get(name, ""),
        codes.get(node.name, ""),
    )
