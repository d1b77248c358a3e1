"""Score expressions of a rewritten graph as mathematics, for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from treefx.inspection.source_lines import module_of
from treefx.kernels.expression_text import format_condition, format_expression
from treefx.kernels.score import Expr, Score
from treefx.kernels.sparse import ops as _sparse  # noqa: F401  (registers the operator)
from treefx.passes.labels.label_tokens import user_line
from treefx.passes.packing.kernel_sources import kernel_source_of
from treefx.passes.trace.pattern import is_number_input

__all__ = ["SPARSE", "Formula", "attention_formulas", "attention_nodes", "describe_attentions", "format_expression"]

aten = torch.ops.aten
_METADATA = ("row", "column", "subtree_end", "token_of", "tokens")
"""Inputs of the rewritten graph next to those of the captured one; sizes that are symbols follow them."""
_READS = {
    aten.view, aten.reshape, aten.permute, aten.transpose, aten.unsqueeze, aten.squeeze, aten.index,
    aten.index_select, aten.select, aten.slice, aten.expand, aten.clone, aten.alias, aten.detach,
}  # fmt: skip
"""Operators that move elements and leave their values alone."""
_TREE = torch.ops.treefx.tree_attention.default
SPARSE = torch.ops.treefx.sparse_tree_attention.default
"""Attention to a list of chosen keys per query."""


def attention_nodes(rewritten: fx.GraphModule) -> list[fx.Node]:
    """The tree attentions of a graph, in order."""
    return [node for node in rewritten.graph.nodes if node.target in (_TREE, SPARSE)]


@dataclass(frozen=True)
class Formula:
    """Hold the formula of one tree attention.

    Attributes:
        score: The logit as text.
        visible: Which keys a query sees, as text.
        expression: The logit, in the language of ``treefx.kernels.score``.
        condition: A condition besides that of the tree; None for none.
        names: Of the buffers that both load.
        computed: By name of a buffer that is no input, the user's line.
        sinks: Whether each query head has one more logit.
        shapes: Of query, key and value; N is the number of distinct tokens.
    """

    score: str
    visible: str
    expression: Expr
    condition: Expr | None
    names: Sequence[str]
    computed: Mapping[str, str | None]
    sinks: bool
    shapes: str


def attention_formulas(captured: fx.GraphModule, rewritten: fx.GraphModule) -> dict[fx.Node, Formula]:
    """The formula of each attention of a rewritten graph.

    Args:
        captured: Dynamo's graph, which names the inputs of the rewritten one.
        rewritten: The graph after ``pack_tokens``.
    """
    placeholders = captured.graph.find_nodes(op="placeholder")
    names = [_input_name(node) for node in placeholders if not _is_constant(node)]
    given = rewritten.graph.find_nodes(op="placeholder")
    sizes = [node for node in given if isinstance(node.meta["val"], torch.SymInt)][1:]  # the first one counts tokens
    masks = [f"mask {i}" for i in range(len(given) - len(names) - len(_METADATA) - len(sizes))]
    inputs = dict(zip(given, [*names, *masks, *_METADATA, *map(str, sizes)], strict=True))
    return {node: _formula(node, inputs) for node in attention_nodes(rewritten)}


def describe_attentions(captured: fx.GraphModule, rewritten: fx.GraphModule) -> dict[str, str]:
    """Describe each attention of a rewritten graph, with its GPU source, by node name."""
    formulas = attention_formulas(captured, rewritten)
    return {node.name: f"{_describe(node, formula)}\n\n{kernel_source_of(node)}" for node, formula in formulas.items()}


def _is_constant(node: fx.Node) -> bool:
    """Return whether an input of Dynamo's graph is a size or a number.

    The rewritten graph has those as constants.
    """
    return isinstance(node.meta.get("example_value"), torch.SymInt | int) or is_number_input(node)


def _input_name(node: fx.Node) -> str:
    """``L_attention_mask_`` is how Dynamo calls the argument ``attention_mask``."""
    name = str(node.target)
    return name[2:].removesuffix("_") if name.startswith("L_") else name


def _formula_of_list(node: fx.Node) -> Formula:
    """Return the formula of an attention to listed keys, which the tree and all conditions have passed."""
    query, key, value, keys, sinks, scale = node.args[:6]
    expression: Expr = ("mul", ("dot",), ("const", scale))
    visible = f"k is among the {_number_of_keys(keys)} keys that q has chosen, and q sees it"
    shapes = " ".join(_shape(item) for item in (query, key, value))
    return Formula(format_expression(expression, []), visible, expression, None, [], {}, sinks is not None, shapes)


def _number_of_keys(keys: Any) -> str:
    return str(keys.meta["val"].shape[-1])


def _formula(node: fx.Node, inputs: Mapping[fx.Node, str]) -> Formula:
    if node.target is SPARSE:
        return _formula_of_list(node)
    query, key, value, _, buffers, sinks, text = node.args[:7]
    assert isinstance(text, str) and isinstance(buffers, Sequence)
    score, sources = Score.from_json(text), [_read_from(buffer, inputs) for buffer in buffers]
    names = [inputs.get(source, source.name) for source in sources]
    visible = "k <= q < subtree_end[k]"
    if score.visible is not None:
        visible += f" and {format_condition(score.visible, names)}"
    computed = {source.name: user_line(source) for source in sources if source not in inputs}
    shapes = " ".join(_shape(item) for item in (query, key, value))
    written = format_expression(score.value, names)
    return Formula(written, visible, score.value, score.visible, names, computed, sinks is not None, shapes)


def _describe(node: fx.Node, formula: Formula) -> str:
    lines = {
        "softmax over k of": formula.score,
        "where": formula.visible,
        **{f"with {name}": line for name, line in formula.computed.items()},
        "sinks": "one more logit per query head" if formula.sinks else None,
        "query, key, value": formula.shapes,
        "module": module_of(node),
        "line": user_line(node),
    }
    known = {label: line for label, line in lines.items() if line}
    width = max(map(len, known))
    return "\n".join(f"{label:<{width}}  {line}" for label, line in known.items())


def _read_from(node: Any, inputs: Mapping[fx.Node, str]) -> fx.Node:
    """Return the value from which a buffer was gathered, sliced or reshaped."""
    while node not in inputs and getattr(node.target, "overloadpacket", None) in _READS:
        node = node.args[0]
    return node  # type: ignore[no-any-return]


def _shape(node: Any) -> str:
    # The only symbol of a rewritten graph is the number of distinct tokens.
    return f"[{', '.join(str(size) if isinstance(size, int) else 'N' for size in node.meta['val'].shape)}]"
