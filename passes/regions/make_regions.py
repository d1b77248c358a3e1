"""Write equal layers as calls of one subgraph, and such calls as the layers again."""

from __future__ import annotations

import heapq
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from treefx.passes.regions.find_regions import Region

__all__ = ["call_regions", "copy_without_regions", "has_regions"]

invoke_subgraph = torch.ops.higher_order.invoke_subgraph
_NAME = "region_{}"


def call_regions(gm: fx.GraphModule, kinds: Sequence[Sequence[Region]]) -> fx.GraphModule:
    """A graph that computes the same, every region a call of the subgraph of its kind.

    Before, with two layers::

        h1 = mm(h0, w1).relu();  h2 = mm(h1, w2).relu()

    After::

        h1 = invoke_subgraph(region_0, h0, w1)[0];  h2 = invoke_subgraph(region_0, h1, w2)[0]

    Args:
        gm: Left as it is.
        kinds: From ``find_regions``.

    Returns:
        The new graph; ``gm`` itself where regions wait for each other.
    """
    name_of = {region: _NAME.format(i) for i, kind in enumerate(kinds) for region in kind}
    order = _order(gm.graph, list(name_of))
    if order is None:
        return gm
    bodies = {_NAME.format(i): fx.GraphModule(gm, _body(kind[0])) for i, kind in enumerate(kinds)}
    graph, new = fx.Graph(), dict[fx.Node, fx.Node]()
    for item in order:
        if isinstance(item, Region):
            new.update(_call(graph, item, name_of[item], new))
        else:
            new[item] = graph.node_copy(item, new.__getitem__)
    return fx.GraphModule({**bodies, **_attributes(gm)}, graph)


def has_regions(gm: fx.GraphModule) -> bool:
    """Whether a graph calls subgraphs."""
    return bool(gm.graph.find_nodes(op="call_function", target=invoke_subgraph))


def copy_without_regions(gm: fx.GraphModule) -> fx.GraphModule:
    """A copy that computes the same without subgraphs, for those who read or count operators."""
    graph, new, attributes = fx.Graph(), dict[fx.Node, Any](), _attributes(gm)
    for node in gm.graph.nodes:
        if node.target is invoke_subgraph:
            body = getattr(gm, node.args[0].target)
            new[node] = _inline(graph, body, node, new, attributes)
        elif node.target is operator.getitem and node.args[0].target is invoke_subgraph:
            new[node] = new[node.args[0]][node.args[1]]
        elif not isinstance(attributes.get(node.target), fx.GraphModule):
            new[node] = graph.node_copy(node, new.__getitem__)
    return fx.GraphModule(attributes, graph)


def _inline(
    graph: fx.Graph, body: fx.GraphModule, call: fx.Node, new: Mapping[fx.Node, Any], attributes: dict[str, Any]
) -> Sequence[Any]:
    """Write the body of a subgraph for the operands of a call; its results."""
    inside = dict(zip(body.graph.find_nodes(op="placeholder"), (new[item] for item in call.args[2:]), strict=True))
    prefix = f"{call.args[0].target}."
    attributes.update({prefix + name: value for name, value in _attributes(body).items()})
    for node in body.graph.nodes:
        if node.op == "output":
            results: Sequence[Any] = fx.node.map_arg(node.args[0], inside.__getitem__)
            return results
        if node not in inside:
            inside[node] = graph.node_copy(node, inside.__getitem__)
            if node.op == "get_attr":
                inside[node].target = prefix + node.target
    raise AssertionError("a graph without an output")


def _attributes(gm: fx.GraphModule) -> dict[str, Any]:
    """What the graph reads of its module, by name."""
    names = dict.fromkeys(str(node.target) for node in gm.graph.find_nodes(op="get_attr"))
    return {name: operator.attrgetter(name)(gm) for name in names}


def _order(graph: fx.Graph, regions: Sequence[Region]) -> list[fx.Node | Region] | None:
    """Nodes and regions such that each comes after what it reads, otherwise as they stand; None if there is no such
    order."""
    region_of = {node: region for region in regions for node in region.nodes}
    place: dict[fx.Node | Region, int] = {}
    for i, node in enumerate(graph.nodes):
        place[region_of.get(node, node)] = i  # a region stands where its last operator does
    reads = {
        item: {region_of.get(source, source) for source in _operands(item)} - {item} for item in place
    }
    users: dict[fx.Node | Region, list[fx.Node | Region]] = {item: [] for item in place}
    for item, sources in reads.items():
        for source in sources:
            users[source].append(item)
    missing = {item: len(sources) for item, sources in reads.items()}
    by_place = {i: item for item, i in place.items()}
    ready = [place[item] for item, count in missing.items() if not count]
    heapq.heapify(ready)
    found: list[fx.Node | Region] = []
    while ready:
        item = by_place[heapq.heappop(ready)]
        found.append(item)
        for user in users[item]:
            missing[user] -= 1
            if not missing[user]:
                heapq.heappush(ready, place[user])
    return found if len(found) == len(place) else None


def _operands(item: fx.Node | Region) -> Sequence[fx.Node]:
    return item.operands if isinstance(item, Region) else item.all_input_nodes


def _body(region: Region) -> fx.Graph:
    graph = fx.Graph()
    new = {node: graph.placeholder(f"operand_{i}") for i, node in enumerate(region.operands)}
    for node, placeholder in new.items():
        placeholder.meta = {"val": node.meta["val"]} if "val" in node.meta else {}
    for node in region.nodes:
        new[node] = graph.node_copy(node, new.__getitem__)
    for node in region.results:
        # It was traced without gradients. Where AOTAutograd finds no value it runs the body to see who needs one.
        new[node].meta.pop("val", None)
    graph.output(tuple(new[node] for node in region.results))
    return graph


def _call(graph: fx.Graph, region: Region, name: str, new: Mapping[fx.Node, fx.Node]) -> dict[fx.Node, fx.Node]:
    """Write the call of a region; its results by what they replace."""
    body = graph.get_attr(name)
    call = graph.call_function(invoke_subgraph, (body, name, *(new[node] for node in region.operands)))
    call.meta["val"] = tuple(node.meta["val"] for node in region.results)
    results = {node: graph.call_function(operator.getitem, (call, i)) for i, node in enumerate(region.results)}
    for node, result in results.items():
        result.meta.update(node.meta)
    return results
