"""Read attention sinks that are factors of the result as logits of the softmax.

A sink takes weight and has no value. The score laws read it where it is a logit (gpt_oss); Granite writes it behind the
attention. Before, with scores S [B, H, T, K]::

    out = softmax(S) @ v * sigmoid(logsumexp(S, -1) - sinks)[..., None]

After, the same numbers::

    out = softmax(cat([S, sinks], -1))[..., :-1] @ v
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, fx

__all__ = ["FACTOR", "join_sink_factors"]

aten = torch.ops.aten
FACTOR = "treefx_sink_factor"
"""Marks a softmax with a factor sink: without it, a query without keys had no number."""
_SAME = {aten._to_copy.default, aten.clone.default}
_LAYOUT = {aten.view.default, aten._unsafe_view.default, aten.expand.default, aten.reshape.default}
_UNSQUEEZED = {aten.unsqueeze.default}


def join_sink_factors(gm: fx.GraphModule) -> None:
    """Let sinks that are factors on the results of attentions be logits of them."""
    for node in list(gm.graph.nodes):
        if node.target is aten.mul.Tensor and all(isinstance(item, fx.Node) for item in node.args):
            one, two = node.args
            _ = _join(gm, node, one, two) or _join(gm, node, two, one)
    gm.graph.eliminate_dead_code()


def _join(gm: fx.GraphModule, product: fx.Node, out: fx.Node, factor: fx.Node) -> bool:
    found = _lse_and_sinks(factor)
    if found is None:
        return False
    lse, sinks = found
    scores, shape = lse.args[0], _shape(out)
    if _shape(factor) != [*shape[:-1], 1] or _shape(lse) != shape[:-1]:
        return False
    softmax = _softmax_of(out, scores)
    if softmax is None or _shape(softmax)[:-1] != shape[:-1]:
        return False
    with gm.graph.inserting_before(softmax):
        source: Any = softmax.args[0]
        logits = _add(gm, aten.expand.default, sinks, shape[:-1])
        logits = _add(gm, aten._to_copy.default, logits, dtype=source.meta["val"].dtype)
        joined = _add(gm, aten.cat.default, [source, _add(gm, aten.unsqueeze.default, logits, -1)], -1)
        wide = _add(gm, softmax.target, joined, *softmax.args[1:])
        kept = _add(gm, aten.slice.Tensor, wide, -1, 0, _shape(softmax)[-1])
    for made in (joined, wide, kept):
        made.meta["stack_trace"] = product.stack_trace
    wide.meta[FACTOR] = True
    softmax.replace_all_uses_with(kept)
    if out.meta["val"].dtype != product.meta["val"].dtype:
        with gm.graph.inserting_before(product):
            out = _add(gm, aten._to_copy.default, out, dtype=product.meta["val"].dtype)
    product.replace_all_uses_with(out)
    return True


def _lse_and_sinks(factor: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """The two terms of sigmoid(logsumexp(scores, -1) - sinks)[..., None]."""
    sigmoid = _behind(factor, _SAME | _UNSQUEEZED)
    if sigmoid.target is not aten.sigmoid.default:
        return None
    difference = _behind(sigmoid.args[0], _SAME)
    if difference.target is not aten.sub.Tensor or difference.kwargs:
        return None
    lse, sinks = difference.args
    if not (isinstance(lse, fx.Node) and isinstance(sinks, fx.Node)) or _shape(difference) != _shape(lse):
        return None
    is_lse = lse.target is aten.logsumexp.default and len(lse.args) == 2
    along: Any = lse.args[1] if is_lse else []
    rank = _rank(lse.args[0])
    return (lse, sinks) if [d % rank for d in along] == [rank - 1] else None


def _softmax_of(out: fx.Node, scores: Any) -> fx.Node | None:
    """Return the softmax of these scores if a result is its product with values alone."""
    product = _behind(out, _SAME | _LAYOUT, alone=True)
    if product.target is not aten.bmm.default:
        return None
    softmax = _behind(product.args[0], _SAME | _LAYOUT, alone=True)
    if softmax.target is not aten._softmax.default or len(softmax.users) > 1:
        return None
    dim: Any = softmax.args[1]
    if dim % _rank(softmax) != _rank(softmax) - 1:
        return None
    same = _behind(softmax.args[0], {aten._to_copy.default}) is _behind(scores, {aten._to_copy.default})
    keeps = _shape(product.args[0])[-2:] == _shape(softmax)[-2:] and _shape(out)[-2:] == _shape(product)[-2:]
    return softmax if same and keeps else None


def _behind(node: Any, through: Collection[Any], *, alone: bool = False) -> fx.Node:
    """Skip operators that only move or convert a node; ``alone``: with one reader each."""
    while node.target in through and (not alone or len(node.users) == 1) and node.meta["val"].is_floating_point():
        node = node.args[0]
    found: fx.Node = node
    return found


def _add(gm: fx.GraphModule, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    node = gm.graph.call_function(target)
    node.args, node.kwargs = args, kwargs  # create_node warns of symbols
    values = fx.node.map_arg((args, kwargs), lambda item: item.meta["val"])
    node.meta["val"] = target(*values[0], **values[1])
    return node


def _rank(node: Any) -> int:
    return len(_shape(node))


def _shape(node: Any) -> list[Any]:
    value: Tensor = node.meta["val"]
    return list(value.shape)
