"""FLOPs and bytes of nodes, forward, as ``torch.utils.flop_counter`` counts them.

An attention counts every key of its row's columns, visible or not, as the counter of PyTorch does for a causal one: on
rows that is B T queries times T keys, on the tree N queries times T keys. So the ratio of the two is that of the tokens
that ran, and nothing is gained by the way of counting. Only an attention that reads a list of K chosen keys per query
counts N K of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils.flop_counter import flop_registry

from treefx.inspection.report.sizes import Sizes
from treefx.kernels import ops as _ops  # noqa: F401  (registers tree_attention)
from treefx.kernels import own_products as _own_products  # noqa: F401  (registers own_products)
from treefx.kernels.sparse import ops as _sparse  # noqa: F401  (registers sparse_tree_attention)
from treefx.passes.labels.facts import FACT, Axis, fact_of
from treefx.passes.scores.attention_facts import Attention
from treefx.passes.trace import changed_inputs as _changed_inputs  # noqa: F401  (registers as_read)
from treefx.passes.trace import opaque_ops as _opaque_ops  # noqa: F401  (registers attention)

__all__ = ["is_view", "node_flops", "result_bytes"]

aten = torch.ops.aten
_VIEWS = {
    aten.view, aten._unsafe_view, aten.reshape, aten.permute, aten.transpose, aten.t, aten.unsqueeze, aten.squeeze,
    aten.expand, aten.select, aten.slice, aten.detach, aten.alias, aten.split, aten.split_with_sizes, aten.unbind,
    aten.chunk, aten.as_strided, aten.sym_size, torch.ops.treefx.as_read,
}  # fmt: skip
_WHOLE = {torch.ops.treefx.attention.default}
_TREE = torch.ops.treefx.tree_attention.default
_SPARSE = torch.ops.treefx.sparse_tree_attention.default
_OWN = torch.ops.treefx.own_products.default
_GROUPED = ("_grouped_mm", "grouped_mm_fallback")


def is_view(node: fx.Node) -> bool:
    """Whether a node makes no memory."""
    return node.op != "call_function" or getattr(node.target, "overloadpacket", node.target) in _VIEWS


def result_bytes(node: fx.Node, sizes: Sizes) -> int:
    """Bytes that a node writes."""
    if is_view(node) or not isinstance(node.target, torch._ops.OpOverload):
        return 0
    return sizes.bytes(node.meta.get("val"))


def node_flops(node: fx.Node, sizes: Sizes, columns: int) -> int:
    """FLOPs of one node of a captured or rewritten graph.

    Args:
        node: Of any graph with fake values.
        sizes: Numbers for its symbols.
        columns: Of the rows, for the keys that a query on the tree counts.
    """
    if node.op != "call_function":
        return 0
    law = node.meta[FACT].law if FACT in node.meta else None
    if isinstance(law, Attention) and node.target not in _WHOLE:
        return _lifted(node, law, sizes)
    if node.target in _WHOLE:
        query, key, value = (sizes.shape(item) for item in node.args[:3])
        return 2 * math.prod(query[:-1]) * key[-2] * (query[-1] + value[-1])
    if node.target is _TREE:
        query, value = (sizes.shape(node.args[i]) for i in (0, 2))
        return 2 * math.prod(query[:-1]) * columns * (query[-1] + value[-1])
    if node.target is _SPARSE:
        query, _, value, keys = (sizes.shape(item) for item in node.args[:4])
        return 2 * math.prod(query[:-1]) * keys[-1] * (query[-1] + value[-1])
    if node.target is _OWN:
        return 2 * math.prod(sizes.shape(node.args[0])) * sizes.shape(node.args[2])[-1]
    return _registered(node, sizes)


def _lifted(node: fx.Node, law: Attention, sizes: Sizes) -> int:
    """Count the product of probabilities and values.

    The product of scores counts at its own node.
    """
    if any(getattr(node.target, "__name__", "").startswith(name) for name in ("bmm", "baddbmm")):
        return _registered(node, sizes)
    *batch, queries, features = sizes.shape(node)
    keys = next(sizes.number(f.size) for dim in fact_of(law.value).dims or () for f in dim if f.axis is Axis.TOKEN)
    return 2 * math.prod(batch) * queries * keys * (sizes.shape(law.query)[-1] + features)


def _registered(node: fx.Node, sizes: Sizes) -> int:
    """Count an operator's FLOPs by torch's formula."""
    packet = getattr(node.target, "overloadpacket", None)
    if any(name in str(packet) for name in _GROUPED) and isinstance(node.meta.get("val"), Tensor):
        return 2 * math.prod(sizes.shape(node)) * sizes.shape(node.args[0])[-1]
    formula: Callable[..., Any] | None = flop_registry.get(packet)
    if formula is None:
        return 0

    def example(item: Any) -> Any:
        return sizes.example(item.meta["val"]) if isinstance(item, fx.Node) else sizes.example(item)

    args = [example(item) for item in map(_plain, node.args)]
    kwargs = {name: example(_plain(item)) for name, item in node.kwargs.items()}
    return int(formula(*args, **kwargs, out_val=sizes.example(node.meta["val"])))


def _plain(item: Any) -> Any:
    """Lists that fx keeps as its own kind, as lists."""
    return [x.meta["val"] if isinstance(x, fx.Node) else x for x in item] if isinstance(item, list | tuple) else item
