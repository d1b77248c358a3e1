"""Give results of subgraphs separate memory, which inductor assumes.

Partitioned for a backward, a subgraph also returns its saved values: operands among them, or views of other results.
Inductor (of torch 2.11 and 2.13) reuses the memory of a result after its last use, even if other values alias it: a
layer then overwrites values that another has saved, and gradients are wrong although the loss is right.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

from torch import Tensor, fx
from torch.utils._pytree import tree_leaves

from treefx.passes.regions.make_regions import body_of, calls_of, output_of

__all__ = ["borrowed_results", "own_results"]


def own_results(gm: fx.GraphModule) -> None:
    """Read aliased results of subgraphs from their original memory.

    Before, where a region keeps its operand and a view of its result for the backward::

        region(x, w) -> (y, x, y.t())           out, kept, turned = region(h, w)

    After::

        region(x, w) -> (y, None, None)         out = region(h, w)[0];  kept = h;  turned = out.t()

    Args:
        gm: A functional graph of AOTAutograd, with ``meta["val"]`` on its nodes and on those of its subgraphs.
    """
    calls: dict[fx.GraphModule, list[fx.Node]] = {}
    for call in calls_of(gm):
        calls.setdefault(body_of(gm, call), []).append(call)
    for body, found in calls.items():
        borrowed = borrowed_results(body)
        owned = _own(body, borrowed)
        for call in found:
            _read_outside(call, borrowed, _Outside(call, body, owned))
    gm.recompile()


def borrowed_results(body: fx.GraphModule) -> dict[int, fx.Node]:
    """Results of a subgraph, by place, that are operands, views, or results before."""
    results = output_of(body.graph)
    return {
        place: node
        for place, node in enumerate(results)
        if isinstance(node, fx.Node)
        and (node.op == "placeholder" or _root(node) is not node or node in results[:place])
    }


def _own(body: fx.GraphModule, borrowed: Mapping[int, fx.Node]) -> dict[fx.Node, int]:
    """Return bases in place of views, each once; the results that are left, with their places."""
    results = [None if place in borrowed else node for place, node in enumerate(output_of(body.graph))]
    for place, node in borrowed.items():
        root = _root(node)
        if root.op != "placeholder" and root not in results:
            results[place] = root
    body.graph.output_node().args = (tuple(results),)
    body.recompile()
    return {node: place for place, node in enumerate(results) if node is not None}


def _read_outside(call: fx.Node, borrowed: Mapping[int, fx.Node], outside: _Outside) -> None:
    call.meta["val"] = tuple(None if node is None else node.meta["val"] for node in outside.results)
    for user in list(call.users):
        place: Any = user.args[1]
        if place in borrowed:
            with call.graph.inserting_before(user):
                user.replace_all_uses_with(outside.read(borrowed[place]))
            call.graph.erase_node(user)


class _Outside:
    """Write values of a subgraph behind one of its calls: operands, results, and views."""

    def __init__(self, call: fx.Node, body: fx.GraphModule, owned: Mapping[fx.Node, int]) -> None:
        self.graph, self.call, self.owned = call.graph, call, owned
        self.results = output_of(body.graph)
        operands: Any = call.args[2:]
        self._known: dict[fx.Node, fx.Node] = dict(zip(body.graph.find_nodes(op="placeholder"), operands, strict=True))

    def read(self, node: fx.Node) -> fx.Node:
        """A value of the subgraph, outside."""
        if node not in self._known:
            self._known[node] = self._written(node)
        return self._known[node]

    def _written(self, node: fx.Node) -> fx.Node:
        if node in self.owned:
            result = self.graph.call_function(operator.getitem, (self.call, self.owned[node]))
            result.meta["val"] = node.meta["val"]
            return result
        for source in node.all_input_nodes:
            self.read(source)
        view = self.graph.node_copy(node, self._known.__getitem__)
        args, kwargs = fx.node.map_arg((view.args, view.kwargs), lambda item: item.meta["val"])
        make: Any = node.target
        view.meta["val"] = make(*args, **kwargs)  # a view of the value here, not of the subgraph's
        return view


def _root(node: fx.Node) -> fx.Node:
    """Return the value that owns a value's memory: itself, unless it is a view."""
    for source in node.all_input_nodes:
        if _storages(node) & _storages(source):
            root = _root(source)
            return root if isinstance(root.meta["val"], Tensor) else node  # one result of several, made by an operator
    return node


def _storages(node: fx.Node) -> set[int]:
    values: list[Any] = tree_leaves(node.meta.get("val"))
    return {x.untyped_storage()._cdata for x in values if isinstance(x, Tensor)}
