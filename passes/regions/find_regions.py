"""Find layers of a graph with equal computation: operators, reads and readers.

Two regions are equal if their operators are the same in the same order, with the same numbers and checkpoint tags, if
their operands have the same shapes, strides, types and need of gradients in the same places, and if the same places of
them are read by others. One of them then stands for all.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from treefx.passes.layers.find_layers import Layer, layer_of, make_layer

__all__ = ["LEAST", "LEAST_WEIGHTS", "find_regions", "is_pure", "pays_off"]

aten = torch.ops.aten
LEAST = 4
"""Fewer equal layers are not worth a subgraph: it is traced about three times, and a flat layer once."""
LEAST_WEIGHTS = 2**18
"""Layers with fewer weights are cheap compared to the call of a subgraph: a step of 4 layers of width 128
takes 1.05 of its time with calls, and one of 8 layers of width 256 no longer than without."""
_WITHOUT_GRADIENT = {
    aten.detach.default, aten.zeros_like.default, aten.ones_like.default, aten.full_like.default,
    aten.empty_like.default, aten.new_zeros.default, aten.new_ones.default, aten.new_full.default,
    aten.new_empty.default,
}  # fmt: skip


def find_regions(gm: fx.GraphModule) -> list[list[Layer]]:
    """The kinds of layers that occur at least ``LEAST`` times, each with all that are equal.

    Args:
        gm: A functional graph with ``meta["val"]`` on its nodes; its inputs have ``requires_grad``.
    """
    members: dict[str, list[fx.Node]] = {}
    for node in gm.graph.nodes:
        layer = layer_of(node)
        if layer is not None and node.op != "get_attr":
            members.setdefault(layer, []).append(node)
    learned = _learned(gm.graph)
    kinds: dict[Any, list[Layer]] = {}
    for nodes in members.values():
        if all(map(is_pure, nodes)):
            region = make_layer(nodes)
            kinds.setdefault(_structure(region, learned), []).append(region)
    return [regions for regions in kinds.values() if len(regions) >= LEAST and all(map(_stands_alone, regions))]


def pays_off(kind: Sequence[Layer]) -> bool:
    """Return whether calls of equal layers cost no time, by measurements: large ones on CPU."""
    inputs = [node.meta["val"] for node in kind[0].operands if node.op == "placeholder"]
    sized = [x for x in inputs if isinstance(x, Tensor) and all(isinstance(size, int) for size in x.shape)]
    on_cpu = all(x.device.type == "cpu" for x in inputs if isinstance(x, Tensor))
    return on_cpu and sum(x.numel() for x in sized) >= LEAST_WEIGHTS


def is_pure(node: fx.Node) -> bool:
    """Return whether a value is repeatable: no random numbers, changes or subgraphs."""
    if node.op != "call_function":
        return True
    if not isinstance(node.target, torch._ops.OpOverload):
        return getattr(node.target, "__module__", None) in ("_operator", "operator")
    return torch.Tag.nondeterministic_seeded not in node.target.tags and not node.target._schema.is_mutable


def _learned(graph: fx.Graph) -> set[fx.Node]:
    """The values that need gradients; the trace itself ran without any."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        value = node.meta.get("val")
        if node.op == "placeholder":
            needed = isinstance(value, Tensor) and value.requires_grad
        else:
            needed = node.target not in _WITHOUT_GRADIENT and any(item in found for item in node.all_input_nodes)
        if needed and _may_need(value):
            found.add(node)
    return found


def _may_need(value: Any) -> bool:
    """Whether a value (or one of several) is of a type that has gradients."""
    items: Iterable[Any] = value if isinstance(value, list | tuple) else [value]
    return any(isinstance(x, Tensor) and (x.is_floating_point() or x.is_complex()) for x in items)


def _structure(region: Layer, learned: set[fx.Node]) -> tuple[Any, ...]:
    """Equal for regions of which one can stand for the other."""
    number = {node: f"%{i}" for i, node in enumerate((*region.operands, *region.nodes))}
    groups: dict[Any, int] = {}
    lines = [_line(node, number, groups) for node in region.nodes]
    operands = [(_read_value(node), node in learned) for node in region.operands]
    return (*lines, *operands, *(number[node] for node in region.results))


def _line(node: fx.Node, number: Mapping[fx.Node, str], groups: dict[Any, int]) -> str:
    args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), number.__getitem__)
    tag = node.meta.get("recompute")
    group = None if tag is None else groups.setdefault(node.meta.get("ac_graph_id"), len(groups))
    return repr((str(node.target), args, kwargs, tag, group))


def _read_value(node: fx.Node) -> tuple[Any, ...]:
    """Return properties of an operand that compiled code depends on."""
    value = node.meta.get("val")
    if isinstance(value, Tensor):
        return (type(value), str(value.shape), str(value.stride()), value.dtype, value.device)
    return (type(value), str(value))


def _stands_alone(region: Layer) -> bool:
    """Return whether a region's operators may move to its last one.

    No result may be a view of an operand or of another result.

    They may not if they read functions of its results, or if an operator in between is not pure.
    """
    reached = set(region.results)
    for node in _between(region):
        if not is_pure(node):
            return False
        if any(item in reached for item in node.all_input_nodes):
            reached.add(node)
    storages = [_storage(node) for node in (*region.operands, *region.results)]
    made = storages[len(region.operands) :]
    return not reached & {*region.operands} and all(storages.count(item) == 1 for item in made)


def _between(region: Layer) -> Iterable[fx.Node]:
    """Yield other nodes between its operators."""
    inside, node = set(region.nodes), region.nodes[0]
    while node is not region.nodes[-1]:
        if node not in inside:
            yield node
        node = node.next


def _storage(node: fx.Node) -> Any:
    """Return the identity of a value's memory; views have that of their base."""
    value = node.meta.get("val")
    return value.untyped_storage()._cdata if isinstance(value, Tensor) else object()
