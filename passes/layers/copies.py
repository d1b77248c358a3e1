"""Copy traced layers: the second of two equal layers is written without a trace.

While a graph is traced, the operators of one layer are remembered under its key (``find_layers``). For an equal
layer the same operators are written once more, on its own operands, which is much less than to run it on fakes.

A layer can be copied only if all that it read and left is known: it reads its operands and sizes, nothing that was
traced for another; its results have memory of their own; and it has changed none of its operands. ``remember`` checks
that of each layer that was traced, so others are simply traced again.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import SymBool, SymFloat, SymInt, Tensor, fx
from torch._subclasses.functional_tensor import disable_functional_mode
from torch.fx.experimental.proxy_tensor import (
    disable_proxy_modes_tracing,
    get_proxy_mode,
    get_proxy_slot,
    track_tensor_tree,
)
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.fx.node import map_arg

from treefx.passes.layers.find_layers import Layer, exact

__all__ = ["COPIED_FROM", "LayerCopies"]

COPIED_FROM = "treefx_copied_from"
"""Where a copied node keeps the name of the node of the other graph that it stands for; a traced one has
``from_node``."""

_OWN = ("nn_module_stack", "stack_trace", "source_fn_stack", "ac_graph_id")
"""Metadata that a traced node inherits from its source; the rest is its own."""


@dataclass(frozen=True)
class _Traced:
    """Hold the nodes written for a layer, and the place of each operator's source."""

    body: tuple[tuple[fx.Node, int], ...]
    operands: tuple[fx.Node, ...]
    memory: Any
    """Strides of the operands, which decide how a reshape is written."""
    results: tuple[Tensor, ...]


class LayerCopies:
    """The layers of the graph that is being traced; made inside of the trace."""

    def __init__(self) -> None:
        mode = get_proxy_mode()
        assert mode is not None
        self._tracer: Any = mode.tracer
        self._known: dict[Any, _Traced] = {}

    def __contains__(self, key: Any) -> bool:
        return key in self._known

    def mark(self) -> fx.Node:
        """Return the last node written before a layer."""
        return self._graph._root.prev

    @property
    def _graph(self) -> fx.Graph:
        graph: fx.Graph = self._tracer.graph
        return graph

    def remember(
        self,
        key: Any,
        layer: Layer,
        mark: fx.Node,
        operands: Sequence[Any],
        common: Sequence[Any],
        results: Sequence[Any],
    ) -> bool:
        """Keep the nodes behind a mark, if they can be copied.

        Args:
            key: Of the layer.
            layer: The traced layer.
            mark: From before.
            operands: The values that it read and that others have of their own.
            common: The values that it read and others like it will read too.
            results: The values that others may read of it.

        Returns:
            Whether it can be copied.
        """
        place = {node.name: i for i, node in enumerate(layer.nodes)}
        written = _behind(mark)
        given, shared = [_node_of(x, self._tracer) for x in operands], [_node_of(x, self._tracer) for x in common]
        body = {node: place[_source(node)] for node in written if _source(node) in place}
        beside = [x for x in written if x not in body]  # made of others' values, when they were first asked for
        apart = all(item not in body for node in beside for item in node.all_input_nodes)
        whole = None not in given and all(_reads(node, {*body, *given, *shared}) for node in body)
        can = apart and whole and not {*given} & {*shared} and self._are_own(results, [*operands, *common], body)
        if can:
            nodes = tuple(node for node in given if node)
            self._known[key] = _Traced(tuple(body.items()), nodes, _memory(operands), tuple(results))
        return can

    def _are_own(self, results: Sequence[Any], others: Sequence[Any], body: Container[Any]) -> bool:
        """Whether results are plain tensors that the layer made, with memory of their own."""
        if not all(isinstance(x, Tensor) and _node_of(x, self._tracer) in body and _is_plain(x) for x in results):
            return False
        storages = [x.untyped_storage()._cdata for x in (*results, *others) if isinstance(x, Tensor)]
        return all(storages.count(storage) == 1 for storage in storages[: len(results)])

    def copy(self, key: Any, layer: Layer, operands: Sequence[Any]) -> list[Tensor] | None:
        """Write a layer down as the one of the same key was; its results.

        Args:
            key: One of those remembered.
            layer: An equal layer.
            operands: Its own values, in the order of ``remember``.

        Returns:
            None, and nothing is written, where operands cannot stand for those of the other layer.
        """
        traced = self._known[key]
        given = [_node_of(x, self._tracer) for x in operands]
        pairs = {*zip(traced.operands, given, strict=True)}
        if None in given or _memory(operands) != traced.memory:
            return None
        if not len(pairs) == len({*traced.operands}) == len({*given}):
            return None
        new: dict[fx.Node, Any] = dict(pairs)
        for node, place in traced.body:
            new[node] = self._write(node, new)
            new[node].meta = _meta(node, layer.nodes[place])
        return [self._tracked(x, new) for x in traced.results]

    def _write(self, node: fx.Node, new: Mapping[fx.Node, fx.Node]) -> fx.Node:
        """Write a node down with others' values, named as a traced one is.

        ``Graph.node_copy`` requests the node's name; PyTorch 2.11 searches free names from the first on, which takes a
        time that grows with the square of the layers.
        """
        args, kwargs = map_arg((node.args, node.kwargs), lambda item: new.get(item, item))
        return self._graph.create_node(node.op, node.target, args, kwargs, type_expr=node.type)

    def _tracked(self, like: Tensor, new: Mapping[fx.Node, fx.Node]) -> Tensor:
        """Track a value for a copied node, with separate memory, in the trace."""
        source = _node_of(like, self._tracer)
        assert source is not None
        mode: Any = like.fake_mode  # type: ignore[attr-defined]
        with disable_functional_mode(), disable_proxy_modes_tracing(), mode:
            value = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device)
        proxy = self._tracer.proxy(new[source])
        return track_tensor_tree(value, proxy, constant=None, tracer=self._tracer)


def _node_of(x: Any, tracer: Any) -> fx.Node | None:
    """Return a tensor's node in the trace; None if the trace knows its numbers."""
    slot = get_proxy_slot(x, tracer, None) if isinstance(x, Tensor) else None
    return None if slot is None or slot.constant is not None else slot.proxy.node


def _memory(operands: Sequence[Any]) -> Any:
    """Return an exact key of the tensors' memory; one without strides equals only itself."""
    return exact([(x.stride(), x.storage_offset()) if x.layout is torch.strided else x for x in operands], {})


def _behind(mark: fx.Node) -> list[fx.Node]:
    found, node = [], mark.next
    while node.op != "root":
        found.append(node)
        node = node.next
    return found


def _source(node: fx.Node) -> str:
    """The name of the node of the other graph that was being traced."""
    sources = node.meta.get("from_node") or ()
    return sources[-1].name if sources else ""


def _reads(node: fx.Node, known: Container[Any]) -> bool:
    """Return whether a node reads known values and sizes alone, and makes no unknown size."""
    sizes = SymInt | SymFloat | SymBool
    told = all(item in known or isinstance(item.meta.get("val"), sizes) for item in node.all_input_nodes)
    return told and not free_unbacked_symbols(node.meta.get("val"))


def _is_plain(x: Tensor) -> bool:
    strided = x.layout is torch.strided and not x.requires_grad and not x.is_conj() and not x.is_neg()
    return strided and hasattr(x, "fake_mode") and isinstance(x.storage_offset(), int) and x.storage_offset() == 0


def _meta(traced: fx.Node, source: fx.Node) -> dict[str, Any]:
    own = {name: source.meta[name] for name in _OWN if name in source.meta} | {COPIED_FROM: source.name}
    return {**{name: value for name, value in traced.meta.items() if name != "from_node"}, **own}
