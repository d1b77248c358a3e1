"""Write equal layers as calls of one subgraph, and such calls as the layers again."""

from __future__ import annotations

import heapq
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from treefx.passes.layers.find_layers import Layer
from treefx.passes.regions.find_regions import is_pure

__all__ = ["body_of", "call_regions", "calls_of", "copy_without_regions", "output_of", "subgraphs"]

_NAME = "region_{}"
_Item = fx.Node | Layer


def call_regions(gm: fx.GraphModule, kinds: Sequence[Sequence[Layer]]) -> fx.GraphModule:
    """A graph that computes the same, every region a call of the subgraph of its kind.

    Before, with two layers::

        h1 = mm(h0, w1).relu();  h2 = mm(h1, w2).relu()

    After::

        h1 = invoke_subgraph(region_0, h0, w1)[0];  h2 = invoke_subgraph(region_0, h1, w2)[0]

    Args:
        gm: The graph, unchanged.
        kinds: From ``find_regions``.

    Returns:
        The new graph; ``gm`` itself where there are no regions, or they wait for each other.
    """
    name_of = {region: _NAME.format(i) for i, kind in enumerate(kinds) for region in kind}
    order = _order(gm.graph, list(name_of)) if kinds else None
    if order is None:
        return gm
    graph, new = fx.Graph(), dict[fx.Node, fx.Node]()
    for item in order:
        if isinstance(item, Layer):
            new.update(_call(graph, item, name_of[item], new))
        else:
            new[item] = graph.node_copy(item, new.__getitem__)
    bodies = {_NAME.format(i): fx.GraphModule(gm, _body(kind[0])) for i, kind in enumerate(kinds)}
    return fx.GraphModule({**bodies, **_attributes(gm)}, graph)


def _order(graph: fx.Graph, regions: Sequence[Layer]) -> list[_Item] | None:
    """Order nodes and regions so that each follows its operands, else as before; or None."""
    region_of: dict[fx.Node, Layer] = {node: region for region in regions for node in region.nodes}

    def item_of(node: fx.Node) -> _Item:
        return region_of.get(node, node)

    place = {item_of(node): i for i, node in enumerate(graph.nodes)}  # a region stands where its last operator does
    found = _sorted(place, {item: {item_of(node) for node in _operands(item)} for item in place})
    return found if found is not None and _keeps_changes(found, place) else None


def _keeps_changes(order: Sequence[_Item], place: Mapping[_Item, int]) -> bool:
    """Return whether all nodes stay on the same side of impure nodes as before.

    These are random numbers and changes of inputs.
    """
    places = [place[item] for item in order]
    return all(
        max(places[:i], default=-1) < places[i] < min(places[i + 1 :], default=len(place) + places[i])
        for i, item in enumerate(order)
        if isinstance(item, fx.Node) and not is_pure(item)
    )


def _sorted(place: Mapping[_Item, int], reads: Mapping[_Item, set[_Item]]) -> list[_Item] | None:
    items = {i: item for item, i in place.items()}
    users: dict[_Item, list[_Item]] = {item: [] for item in place}
    for item, sources in reads.items():
        for source in sources:
            users[source].append(item)
    missing = {item: len(sources) for item, sources in reads.items()}
    ready = [place[item] for item, count in missing.items() if not count]
    heapq.heapify(ready)
    found: list[_Item] = []
    while ready:
        found.append(items[heapq.heappop(ready)])
        for user in users[found[-1]]:
            missing[user] -= 1
            if not missing[user]:
                heapq.heappush(ready, place[user])
    return found if len(found) == len(place) else None


def _operands(item: _Item) -> Sequence[fx.Node]:
    return item.operands if isinstance(item, Layer) else item.all_input_nodes


def _body(region: Layer) -> fx.Graph:
    graph = fx.Graph()
    new = {node: graph.placeholder(f"operand_{i}") for i, node in enumerate(region.operands)}
    for node in region.nodes:
        new[node] = graph.node_copy(node, new.__getitem__)
    for node in region.results:
        # It was traced without gradients. Where AOTAutograd finds no value it runs the body to see which need one.
        new[node].meta.pop("val", None)
    graph.output(tuple(new[node] for node in region.results))
    return graph


def _call(graph: fx.Graph, region: Layer, name: str, new: Mapping[fx.Node, fx.Node]) -> dict[fx.Node, fx.Node]:
    """Write the call of a region; return its results by the replaced nodes."""
    operands = [new[node] for node in region.operands]
    call = graph.call_function(torch.ops.higher_order.invoke_subgraph, (graph.get_attr(name), name, *operands))
    call.meta["val"] = tuple(node.meta["val"] for node in region.results)
    results = {node: graph.call_function(operator.getitem, (call, i)) for i, node in enumerate(region.results)}
    for node, result in results.items():
        result.meta.update(node.meta)
    return results


def calls_of(gm: fx.GraphModule) -> list[fx.Node]:
    """The calls of subgraphs in a graph."""
    return list(gm.graph.find_nodes(op="call_function", target=torch.ops.higher_order.invoke_subgraph))


def body_of(gm: fx.GraphModule, call: fx.Node) -> fx.GraphModule:
    """The subgraph that is called."""
    attribute: Any = call.args[0]
    body = getattr(gm, attribute.target)
    assert isinstance(body, fx.GraphModule)
    return body


def subgraphs(gm: fx.GraphModule) -> list[fx.GraphModule]:
    """Return the subgraphs that a graph calls, each once."""
    return list(dict.fromkeys(body_of(gm, call) for call in calls_of(gm)))


def output_of(graph: fx.Graph) -> Sequence[Any]:
    """Return the results of a graph."""
    results: Any = graph.output_node().args[0]
    return results  # type: ignore[no-any-return]


def copy_without_regions(gm: fx.GraphModule) -> fx.GraphModule:
    """Copy a graph with the same computation but no subgraphs, for readers of operators.

    Layers have the fake values of their subgraph: equal ones share them, so bytes cannot be told from their storages.
    """
    graph, new, attributes = fx.Graph(), dict[fx.Node, Any](), _attributes(gm)
    for node in gm.graph.nodes:
        source: Any = node.args[0] if node.args else None
        if node.target is torch.ops.higher_order.invoke_subgraph:
            operands: Any = node.args[2:]
            body = body_of(gm, node)
            new[node] = _inline(graph, body, [new[item] for item in operands], f"{source.target}.")
            attributes.update({f"{source.target}.{name}": value for name, value in _attributes(body).items()})
        elif node.target is operator.getitem and isinstance(new[source], list | tuple):
            new[node] = new[source][node.args[1]]
        elif not isinstance(attributes.get(str(node.target)), fx.GraphModule):
            new[node] = graph.node_copy(node, new.__getitem__)
    kept = {name: value for name, value in attributes.items() if not isinstance(value, fx.GraphModule)}
    return fx.GraphModule(kept, graph)


def _inline(graph: fx.Graph, body: fx.GraphModule, operands: Sequence[fx.Node], prefix: str) -> Sequence[Any]:
    """Write the operators of a subgraph; its results. Its attributes get a prefix."""
    new: dict[fx.Node, fx.Node] = dict(zip(body.graph.find_nodes(op="placeholder"), operands, strict=True))
    inside: Callable[[fx.Node], fx.Node] = new.__getitem__
    for node in body.graph.nodes:
        if node.op not in ("placeholder", "output"):
            new[node] = graph.node_copy(node, inside)
        if node.op == "get_attr":
            new[node].target = prefix + str(node.target)
    results: Sequence[Any] = fx.node.map_arg(output_of(body.graph), inside)
    return results


def _attributes(gm: fx.GraphModule) -> dict[str, Any]:
    """Return the attributes of the module that the graph reads, by name."""
    names = dict.fromkeys(str(node.target) for node in gm.graph.find_nodes(op="get_attr"))
    return {name: operator.attrgetter(name)(gm) for name in names}
