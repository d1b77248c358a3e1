"""Graphs and overlays in the JSON that Google's Model Explorer reads.

A collection is ``{"label", "graphs": [{"id", "nodes": [{"id", "label", "namespace", "attrs", "incomingEdges",
"outputsMetadata"}]}]}``; a node's namespace nests it in its modules. An overlay ("node data") is ``{graph id: {"name",
"results": {node id: {"value", "bgColor"}}, "gradient"}}``; a file holds one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from treefx.inspection.report.records import GraphNode, ModuleAccount, OperatorAccount

__all__ = ["collection_of", "overlays_of", "write_model_explorer"]

_RAN = {
    "token": ("once per distinct token", "#cfe0fb"),
    "batch": ("once for the batch", "#e3e6ec"),
    "row": ("once per row", "#f7c6b5"),
    "none": ("not at all", "#ffffff"),
}
"""Names and colours of how an operator runs."""
_GRADIENT = [{"stop": 0, "bgColor": "#ffffff"}, {"stop": 1, "bgColor": "#e8743b"}]

Nodes = Mapping[str, Sequence[GraphNode]]
"""By stage."""


def write_model_explorer(
    path: str | Path, label: str, nodes: Nodes, operators: Sequence[OperatorAccount], modules: Sequence[ModuleAccount]
) -> Path:
    """Write a collection to ``path``, and each overlay to a file next to it.

    One is ``report.flops_before.json``.
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps(collection_of(label, nodes, operators, modules)), encoding="utf-8")
    for name, overlay in overlays_of(nodes, operators).items():
        target.with_suffix(f".{name}.json").write_text(json.dumps(overlay), encoding="utf-8")
    return target


def collection_of(
    label: str, nodes: Nodes, operators: Sequence[OperatorAccount], modules: Sequence[ModuleAccount]
) -> dict[str, Any]:
    """One graph per stage, the captured one with the figures of its modules."""
    accounts = {item.name: item for item in operators}
    graphs = []
    for stage, items in nodes.items():
        known = {item.name for item in items}
        made = [_node(item, known, accounts.get(item.name) if stage == "captured" else None) for item in items]
        figures = {"groupNodeAttributes": dict(map(_group, modules))} if stage == "captured" else {}
        graphs.append({"id": stage, "nodes": made, **figures})
    return {"label": label, "graphs": graphs}


def overlays_of(nodes: Nodes, operators: Sequence[OperatorAccount]) -> dict[str, dict[str, Any]]:
    """Make overlays: FLOPs before and after, of the captured graph; how often operators run."""
    found = {}
    for name, words in (("flops_before", "FLOPs on rows"), ("flops_after", "FLOPs as it runs")):
        results = {item.name: {"value": getattr(item, name)} for item in operators}
        found[name] = {"captured": {"name": words, "results": results, "gradient": _GRADIENT}}
    return {**found, "verdict": {stage: _verdict(stage, nodes[stage], operators) for stage in nodes}}


def _verdict(stage: str, nodes: Sequence[GraphNode], operators: Sequence[OperatorAccount]) -> dict[str, Any]:
    known = {node.name for node in nodes}
    results = {}
    for item in operators:
        words, color = _RAN.get(item.ran, (item.ran, "#ffffff"))
        value = f"{words} [{item.code}]" if item.code else words
        for name in (item.name,) if stage == "captured" else item.images.get(stage, ()):
            if name in known:
                results[name] = {"value": value, "bgColor": color}
    return {"name": "how often it runs", "results": results}


def _node(node: GraphNode, known: set[str], account: OperatorAccount | None) -> dict[str, Any]:
    attributes = {
        "module": node.module,
        "line": node.line or "",
        "made from": ", ".join(node.sources),
        "put in by treefx": node.mark,
        **dict(_figures(account)),
    }
    inputs = enumerate(name for name in node.inputs if name in known)
    return {
        "id": node.name,
        "label": node.op,
        "namespace": node.module.replace(".", "/"),
        "attrs": [{"key": key, "value": value} for key, value in attributes.items() if value],
        "incomingEdges": [
            {"sourceNodeId": name, "sourceNodeOutputId": "0", "targetNodeInputId": str(i)} for i, name in inputs
        ],
        "outputsMetadata": [{"id": "0", "attrs": [{"key": "shape", "value": node.type}]}] if node.type else [],
    }


def _figures(account: OperatorAccount | None) -> Iterator[tuple[str, str]]:
    if account is None:
        return
    yield "runs", _RAN.get(account.ran, (account.ran, ""))[0]
    yield "reason", f"[{account.code}] {account.reason}" if account.code else ""
    yield "FLOPs", f"{account.flops_before:,} -> {account.flops_after:,}"
    yield "bytes written", f"{account.bytes_before:,} -> {account.bytes_after:,}"
    for stage, names in account.images.items():
        yield f"in {stage}", ", ".join(names)


def _group(module: ModuleAccount) -> tuple[str, dict[str, str]]:
    """Figures of a module, by namespace; "" is the whole graph."""
    figures = {
        "class": module.kind,
        "operators": f"{module.operators}, {module.row} of them once per row",
        "FLOPs": f"{module.flops_before:,} -> {module.flops_after:,}",
        "bytes written": f"{module.bytes_before:,} -> {module.bytes_after:,}",
        "codes": ", ".join(module.codes),
        "equal layers": str(len(module.folded) or 1),
    }
    return module.path.replace(".", "/"), figures
