"""Map nodes between stages: captured -> rewritten -> forward -> backward."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

from torch import fx

from treefx.passes.layers.copies import COPIED_FROM

__all__ = ["images_of", "partners", "source_of", "sources_in"]

Images = dict[str, dict[str, tuple[str, ...]]]
"""By node of the captured graph, its images by stage."""


def source_of(node: fx.Node) -> str:
    """Return the name of the source node of a traced node; "" without one."""
    copied = node.meta.get(COPIED_FROM)
    if copied is not None:
        return str(copied)
    sources = node.meta.get("from_node") or ()
    return str(sources[-1].name) if sources else ""


def sources_in(gm: fx.GraphModule, known: Iterable[str]) -> dict[str, str]:
    """By name of a call in ``gm``, its source, if that is among the known names."""
    names = set(known)
    calls = (node for node in gm.graph.nodes if node.op.startswith("call_"))
    return {node.name: source for node in calls if (source := source_of(node)) in names}


def partners(forward: fx.GraphModule, backward: fx.GraphModule) -> dict[str, str]:
    """Map calls of the backward to calls of the forward that they differentiate or repeat.

    AOTAutograd numbers the operators of a forward, and gives the same number to the operators of its backward. Where
    several operators of the forward have one number (only the last of them has a gradient), the last one is meant. Sums
    of gradients have the number of the last operator of all, which is left out.
    """
    calls = [node for node in forward.graph.nodes if node.op == "call_function" and source_of(node)]
    by_number = {node.meta["seq_nr"]: node.name for node in calls if "seq_nr" in node.meta}
    by_number.pop(max(by_number, default=None), None)  # sums of gradients have the number of the last operator
    names = {node.name for node in forward.graph.nodes}
    found = {}
    for node in backward.graph.nodes:
        if node.op != "call_function":
            continue
        again = node.name if node.name in names and source_of(node) else None
        partner = again or by_number.get(node.meta.get("seq_nr"))
        if partner is not None:
            found[node.name] = partner
    return found


def images_of(captured: fx.GraphModule, graphs: Mapping[str, fx.GraphModule]) -> Images:
    """Map every node of the captured graph to its images in later stages, if these exist."""
    names = [node.name for node in captured.graph.nodes]
    found: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    if "rewritten" not in graphs:
        return {}
    rewritten = sources_in(graphs["rewritten"], names)
    stages: dict[str, dict[str, str]] = {"rewritten": rewritten}
    if "forward" in graphs:
        forward = sources_in(graphs["forward"], rewritten)
        stages["forward"] = {name: rewritten[source] for name, source in forward.items()}
        if "backward" in graphs:
            pairs = partners(graphs["forward"], graphs["backward"])
            known = stages["forward"]
            stages["backward"] = {name: known[other] for name, other in pairs.items() if other in known}
    for stage, sources in stages.items():
        for name, source in sources.items():
            found[source][stage].append(name)
    return {name: {stage: tuple(items) for stage, items in by.items()} for name, by in found.items()}
