"""Count bytes that the packed forward keeps for the backward, by module."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from torch import fx

from treefx.inspection.report.call_records import LayerMemory, Memory
from treefx.inspection.report.lines import module_path
from treefx.inspection.report.material import Material
from treefx.inspection.report.sizes import values_in

__all__ = ["account_memory"]

_NO_BACKWARD = "no graph of a backward was compiled"
_EAGER = "inner='eager' leaves the backward to autograd"


def account_memory(material: Material) -> Memory:
    """Sum the bytes of distinct storages that the forward graph saves besides its results."""
    graphs = material.graphs
    if "forward" not in graphs or "backward" not in graphs or material.rewritten is None:
        return Memory(note=_EAGER if material.stats["inner"] == "eager" else _NO_BACKWARD)
    results = len(_outputs(graphs["rewritten"]))
    kept = [node for node in _outputs(graphs["forward"])[results:] if isinstance(node, fx.Node)]
    seen = {key for node in graphs["forward"].graph.find_nodes(op="placeholder") for key in _storages(node)}
    layers: dict[str, list[Any]] = defaultdict(list)
    for node in kept:
        for key, size in _storages(node).items():
            if key not in seen:
                seen.add(key)
                layers[module_path(node)].append(size)
    number, unshared = material.sizes.number, material.sizes_unshared
    found = [LayerMemory(path, sum(map(number, sizes)), len(sizes)) for path, sizes in layers.items()]
    found.sort(key=lambda item: -item.bytes)
    on_rows = 0 if unshared is None else sum(unshared.number(size) for sizes in layers.values() for size in sizes)
    return Memory(sum(item.bytes for item in found), tuple(found), bytes_on_rows=on_rows)


def _outputs(gm: fx.GraphModule) -> list[Any]:
    outputs: Any = next(iter(gm.graph.find_nodes(op="output"))).args[0]
    return list(outputs)


def _storages(node: fx.Node) -> dict[int, Any]:
    storages = [x.untyped_storage() for x in values_in(node.meta.get("val"))]
    return {storage._cdata: storage.nbytes() for storage in storages}
