"""Which part of a graph is the model, and which the loss behind it.

The model ends with its last operator that mixes tokens, multiplies functions of the ids by weights, or puts vectors of
a tower between tokens: a layer, the LM head. Later operators read values that differ from row to row (labels,
advantages, logits of a teacher), and these must not distinguish tokens. Weights may multiply the hidden states of a
teacher there, but these meet no product of the model.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import fx

from treefx.passes.labels.facts import ancestors
from treefx.passes.labels.token_inputs import Tokens
from treefx.passes.trace import flash as _flash  # noqa: F401  (registers operators)
from treefx.passes.trace import library_calls as _library_calls  # noqa: F401  (registers operators)
from treefx.passes.trace import opaque_ops as _opaque_ops  # noqa: F401  (registers operators)

__all__ = ["find_body", "is_grouped"]

aten = torch.ops.aten
_ops = torch.ops.treefx
_MIXERS = [
    _ops.attention.default, _ops.flash.default, _ops.row_scan.default, _ops.library.default, aten.bmm.default,
    aten.convolution.default,
]  # fmt: skip
_PRODUCTS = [aten.mm.default, aten.addmm.default, aten.baddbmm.default]
_GROUPED = {"aten::_grouped_mm", "transformers::grouped_mm_fallback"}


def find_body(gm: fx.GraphModule, roles: Sequence[str], tokens: Tokens) -> set[fx.Node]:
    """Find the last layers' operators that mix tokens or use weights, and their ancestors.

    Args:
        gm: The traced graph.
        roles: Role of each placeholder.
        tokens: Its token axes.
    """
    of_ids = _made_of(gm, [tokens.ids])
    inputs = zip(gm.graph.find_nodes(op="placeholder"), roles, strict=True)
    learned = _made_of(gm, [node for node, role in inputs if role == "parameter"])
    ends = [node for target in _MIXERS for node in _calls(gm, target)]
    ends += [node for node in _products(gm) if _meet(node, of_ids, learned)]
    of_images = _made_of(gm, tokens.vectors)
    ends += [node for node in _calls(gm, aten.masked_scatter.default) if node.args[2] in of_images]
    return {*ends, *ancestors(*ends)}


def _calls(gm: fx.GraphModule, target: Any) -> list[fx.Node]:
    return gm.graph.find_nodes(op="call_function", target=target)


def _products(gm: fx.GraphModule) -> list[fx.Node]:
    found = [node for target in _PRODUCTS for node in _calls(gm, target)]
    return found + [node for node in gm.graph.nodes if is_grouped(node.target)]


def is_grouped(target: Any) -> bool:
    """Return whether an operator is a grouped matrix product.

    ATen's, or the fallback that transformers registers.
    """
    return isinstance(target, torch._ops.OpOverload) and target.name() in _GROUPED  # type: ignore[no-untyped-call]


def _meet(product: fx.Node, of_ids: set[fx.Node], learned: set[fx.Node]) -> bool:
    """Return whether weights multiply functions of ids."""
    operands = product.all_input_nodes
    weights = [node for node in operands if node in learned and node not in of_ids]
    return bool(weights) and any(node in of_ids for node in operands)


def _made_of(gm: fx.GraphModule, sources: Collection[fx.Node]) -> set[fx.Node]:
    """All nodes that depend on one of them, and these."""
    found = set(sources)
    for node in gm.graph.nodes:
        if any(item in found for item in node.all_input_nodes):
            found.add(node)
    return found
