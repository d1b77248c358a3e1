"""Measure the share of a model's arithmetic that runs once per distinct token.

Counted on the padded shapes, forward only, so that the share speaks of the model and not of the sharing in a batch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_map_only
from torch.utils.flop_counter import flop_registry

from treefx.passes.causal.tree_mixers import TreeScan
from treefx.passes.labels.body import is_grouped
from treefx.passes.labels.facts import Axis, Fact, Kind, fact_of
from treefx.passes.labels.liveness import live_nodes
from treefx.passes.scores.attention_facts import Attention
from treefx.passes.scores.choices import choices, scores_behind

__all__ = ["FlopShare", "flop_share"]

aten = torch.ops.aten
_CONVOLUTIONS = {aten.convolution.default, aten._convolution.default}
_SOFTMAX = {aten._softmax.default, aten._safe_softmax.default, aten.exp.default}


@dataclass(frozen=True)
class FlopShare:
    """Floating-point operations of one forward pass.

    ``packed`` run once per distinct token. ``rows`` do not, although they are attention or products with a parameter
    (projections, MLPs, experts, the head). ``mixing`` do not and are neither: convolutions, and products between
    values of tokens, as in linear attention.
    """

    packed: int = 0
    rows: int = 0
    mixing: int = 0

    def __add__(self, other: FlopShare) -> FlopShare:
        return FlopShare(self.packed + other.packed, self.rows + other.rows, self.mixing + other.mixing)

    @property
    def of_attention_and_mlps(self) -> float:
        """The packed share of everything but ``mixing``; 0 where there is nothing."""
        return self.packed / max(1, self.packed + self.rows)

    @property
    def of_all(self) -> float:
        """The packed share of everything."""
        return self.packed / max(1, self.packed + self.rows + self.mixing)


def flop_share(gm: fx.GraphModule) -> FlopShare:
    """Sum over the products of a labelled graph that parameters take part in."""
    live = live_nodes(gm)
    chosen = {node for item in choices(gm) for node in scores_behind(item.scores)}
    total = FlopShare()
    for node in gm.graph.nodes:
        if node in live and node.op == "call_function" and fact_of(node).learned:
            of_choice = FlopShare(packed=_flops(node, fact_of(node))) if node in chosen else None
            total += of_choice or _share(node, fact_of(node))
    return total


def _share(node: fx.Node, fact: Fact) -> FlopShare:
    flops = _flops(node, fact)
    first = fact.parts[0] if fact.parts else fact
    if first.kind is Kind.PACKED:
        return FlopShare(packed=flops)
    factors = [source for source in node.all_input_nodes if isinstance(source.meta.get("val"), Tensor)]
    with_parameter = any(fact_of(source).kind is Kind.INVARIANT and fact_of(source).learned for source in factors)
    if _attends(node) or (with_parameter and node.target not in _CONVOLUTIONS):
        return FlopShare(rows=flops)
    return FlopShare(mixing=flops)


def _attends(node: fx.Node) -> bool:
    """Return whether a product on rows belongs to a softmax attention."""
    if node.target is torch.ops.treefx.attention.default:
        return True
    stack = [item for item in (node, *node.all_input_nodes) if fact_of(item).kind is Kind.SCORE]
    seen = set(stack)
    while stack:
        top = stack.pop()
        if top.target in _SOFTMAX:
            return True
        near = [item for item in (*top.users, *top.all_input_nodes) if item.op == "call_function" and item not in seen]
        near = [item for item in near if fact_of(item).kind is Kind.SCORE]
        seen.update(near)
        stack += near
    return False


def _example(node: fx.Node) -> Any:
    """Return a node's value with numbers for sizes, without guards on symbols."""
    value = tree_map_only(torch.SymInt, _number, node.meta["val"])
    return tree_map_only(Tensor, _with_numbers, value)


def _with_numbers(x: Tensor) -> Tensor:
    return torch.empty(_shape(x), dtype=x.dtype, device="meta")


def _shape(x: Tensor) -> list[int]:
    return [_number(size) for size in x.shape]


def _number(size: Any) -> int:
    """A size; of a symbol the one that the graph was traced with."""
    return int(size.node.hint if isinstance(size, torch.SymInt) else size)


def _shape_of(node: Any) -> list[int]:
    return _shape(node.meta["val"])


def _flops(node: fx.Node, fact: Fact) -> int:
    if isinstance(fact.law, TreeScan):
        return sum(_registered(item) for item in fact.law.region)
    if isinstance(fact.law, Attention):
        *batch, queries, features = _shape_of(node)
        width = _shape_of(fact.law.query)[-1]
        keys = next(_number(f.size) for dim in fact_of(fact.law.value).dims or () for f in dim if f.axis is Axis.TOKEN)
        return 2 * math.prod(batch) * queries * keys * (width + features)
    if node.target is torch.ops.treefx.attention.default:
        query, key, value = (_shape_of(item) for item in node.args[:3])
        return 2 * math.prod(query[:-1]) * key[-2] * (query[-1] + value[-1])
    if is_grouped(node.target):
        return 2 * math.prod(_shape_of(node)) * _shape_of(node.args[0])[-1]
    return _registered(node)


def _registered(node: fx.Node) -> int:
    """What torch counts for an operator."""
    packet = getattr(node.target, "overloadpacket", None)
    if packet not in flop_registry:
        return 0
    args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), _example)
    args, kwargs = tree_map_only(torch.SymInt, _number, (args, kwargs))
    return int(flop_registry[packet](*args, **kwargs, out_val=_example(node)))
