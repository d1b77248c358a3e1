"""Results of subgraphs with memory of their own, which is what inductor takes all of them for.

Partitioned for a backward, a subgraph also returns what it keeps: its operands among it, or views of what it returns
anyway. Inductor (of torch 2.13) gives the memory of a result away after its last use, whatever else lies in it: a layer
then overwrites what another has kept, and gradients are wrong although the loss is right.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves

__all__ = ["borrowed_results", "own_results"]

invoke_subgraph = torch.ops.higher_order.invoke_subgraph


def own_results(gm: fx.GraphModule) -> None:
    """Let a graph read what its subgraphs return of others' memory where it lies.

    Before, where a region keeps its operand and a view of its result for the backward::

        region(x, w) -> (y, x, y.t())           out, kept, turned = region(h, w)

    After::

        region(x, w) -> (y, None, None)         out = region(h, w)[0];  kept = h;  turned = out.t()

    Args:
        gm: A functional graph of AOTAutograd, with ``meta["val"]`` on its nodes and on those of its subgraphs.
    """
    calls: dict[str, list[fx.Node]] = {}
    for call in gm.graph.find_nodes(op="call_function", target=invoke_subgraph):
        calls.setdefault(call.args[0].target, []).append(call)
    for name, found in calls.items():
        body = getattr(gm, name)
        borrowed = borrowed_results(body)
        owned = _own(body, borrowed)
        for call in found:
            _read_outside(call, borrowed, _Outside(call, body, owned))
    gm.recompile()


def borrowed_results(body: fx.GraphModule) -> dict[int, fx.Node]:
    """Results of a subgraph, by place, that are operands, views, or results before."""
    results = _output(body).args[0]
    return {
        place: node
        for place, node in enumerate(results)
        if isinstance(node, fx.Node) and (_root(node) is not node or node.op == "placeholder" or node in results[:place])
    }


def _own(body: fx.GraphModule, borrowed: dict[int, fx.Node]) -> dict[fx.Node, int]:
    """Return bases in place of views, each once; the results that are left, with their places."""
    results = [None if i in borrowed else node for i, node in enumerate(_output(body).args[0])]
    for place, node in borrowed.items():
        root = _root(node)
        if root.op != "placeholder" and root not in results:
            results[place] = root
    _output(body).args = (tuple(results),)
    body.recompile()
    return {node: place for place, node in enumerate(results) if node is not None}


def _read_outside(call: fx.Node, borrowed: dict[int, fx.Node], outside: _Outside) -> None:
    call.meta["val"] = tuple(None if node is None else node.meta["val"] for node in outside.results)
    for user in list(call.users):
        if user.args[1] in borrowed:
            with call.graph.inserting_before(user):
                user.replace_all_uses_with(outside.read(borrowed[user.args[1]]))
            call.graph.erase_node(user)


class _Outside:
    """Writes values of a subgraph behind one of its calls: operands, results, and views of them."""

    def __init__(self, call: fx.Node, body: fx.GraphModule, owned: dict[fx.Node, int]) -> None:
        self.graph, self.call, self.owned = call.graph, call, owned
        self.results = _output(body).args[0]
        self._known = dict(zip(body.graph.find_nodes(op="placeholder"), call.args[2:], strict=True))

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
        view.meta["val"] = node.target(*args, **kwargs)  # a view of what is read here, not of what the subgraph reads
        return view


def _output(body: fx.GraphModule) -> fx.Node:
    return next(iter(body.graph.find_nodes(op="output")))


def _root(node: fx.Node) -> fx.Node:
    """The value whose memory a value lies in: itself, unless it is a view."""
    mine = _storages(node)
    for source in node.all_input_nodes:
        if mine & _storages(source):
            root = _root(source)
            return node if isinstance(root.meta["val"], list | tuple) and isinstance(node.meta["val"], Tensor) else root
    return node


def _storages(node: fx.Node) -> set[int]:
    values: list[Any] = tree_leaves(node.meta.get("val"))
    return {x.untyped_storage()._cdata for x in values if isinstance(x, Tensor)}
