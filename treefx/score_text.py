"""Score expressions of a rewritten graph as mathematics, for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from treefx.kernels.score import Expr, Score
from treefx.passes.label_tokens import user_line
from treefx.source_lines import module_of

__all__ = ["attention_nodes", "describe_attentions", "format_expression"]

aten = torch.ops.aten
_METADATA = ("row", "column", "subtree_end", "token_of")
"""What the rewritten graph gets beside the inputs of the captured one, as its last placeholders."""
_READS = {
    aten.view, aten.reshape, aten.permute, aten.transpose, aten.unsqueeze, aten.squeeze, aten.index,
    aten.index_select, aten.select, aten.slice, aten.expand, aten.clone, aten.alias, aten.detach,
}  # fmt: skip
"""Operators that move elements and leave their values alone."""
_INFIX = {
    "or": (1, "or"), "and": (2, "and"), "eq": (4, "=="), "ne": (4, "!="), "lt": (4, "<"), "le": (4, "<="),
    "gt": (4, ">"), "ge": (4, ">="), "add": (5, "+"), "sub": (5, "-"), "mul": (6, "*"), "div": (6, "/"),
    "floordiv": (6, "//"), "mod": (6, "%"), "pow": (8, "**"),
}  # fmt: skip
"""Precedence and symbol."""
_CONDITIONAL, _NOT, _NEGATION, _ATOM = 0, 3, 7, 9
_LEAVES = {
    "dot": ("(q·k)", _ATOM),
    "q": ("q", _ATOM),
    "k": ("k", _ATOM),
    "head": ("head", _ATOM),
    "batch": ("row", _ATOM),
}


def format_expression(expression: Expr, buffers: Sequence[str]) -> str:
    """Write a score expression the usual way, with no more parentheses than it takes.

    Args:
        expression: In the language of ``treefx.kernels.score``.
        buffers: Names of the tensors that loads read.

    Returns:
        For example ``50 * tanh(0.0625 * (q·k) / 50)``; ``(q·k)`` is the product of query and key, ``q`` and
        ``k`` are their packed indices.
    """
    return _Writer(buffers).write(expression)[0]


class _Writer:
    """Each method returns a text and how tightly its outermost operator binds."""

    def __init__(self, buffers: Sequence[str]) -> None:
        self.buffers = buffers

    def write(self, expression: Expr) -> tuple[str, int]:
        op, *arguments = expression
        if op in _LEAVES:
            return _LEAVES[op]
        if op == "const":
            return _number(arguments[0])
        if op == "load":
            return self.load(arguments[0], arguments[1:])
        if op == "float":  # a change of type, not of value
            return self.write(arguments[0])
        if op in _INFIX:
            return self.infix(*_INFIX[op], *arguments)
        if op == "neg":
            return "-" + self.operand(arguments[0], _NEGATION), _NEGATION
        if op == "not":
            return "not " + self.operand(arguments[0], _NOT), _NOT
        if op == "where":
            condition, first, second = (self.operand(item, _CONDITIONAL + 1) for item in arguments)
            return f"{first} if {condition} else {second}", _CONDITIONAL
        return f"{op}({', '.join(self.write(item)[0] for item in arguments)})", _ATOM

    def infix(self, precedence: int, symbol: str, left: Expr, right: Expr) -> tuple[str, int]:
        if symbol == "*" and right[0] == "const":
            left, right = right, left
        # Equal operators in a row group to the left, comparisons do not chain.
        first = self.operand(left, precedence + (precedence in (4, 8)))
        second = self.operand(right, precedence + (symbol not in ("and", "or")))
        return f"{first} {symbol} {second}", precedence

    def operand(self, expression: Expr, precedence: int) -> str:
        text, own = self.write(expression)
        return text if own >= precedence else f"({text})"

    def load(self, number: int, indices: Sequence[Expr]) -> tuple[str, int]:
        name = self.buffers[number]
        return (f"{name}[{', '.join(self.write(index)[0] for index in indices)}]" if indices else name), _ATOM


def _number(value: bool | float) -> tuple[str, int]:
    text = str(value) if isinstance(value, bool) else f"{value:.6g}"
    return text, _NEGATION if text.startswith("-") else _ATOM


def attention_nodes(rewritten: fx.GraphModule) -> list[fx.Node]:
    """The tree attentions of a graph, in order."""
    return rewritten.graph.find_nodes(op="call_function", target=torch.ops.treefx.tree_attention.default)


def describe_attentions(captured: fx.GraphModule, rewritten: fx.GraphModule) -> dict[str, str]:
    """What each attention of a rewritten graph computes, by node name.

    Args:
        captured: Dynamo's graph, whose inputs name those of the rewritten one.
        rewritten: The graph after ``pack_tokens``.
    """
    names = [_input_name(node) for node in captured.graph.find_nodes(op="placeholder")]
    inputs = dict(zip(rewritten.graph.find_nodes(op="placeholder"), [*names, *_METADATA], strict=True))
    return {node.name: _describe(node, inputs) for node in attention_nodes(rewritten)}


def _input_name(node: fx.Node) -> str:
    """``L_attention_mask_`` is how Dynamo calls the argument ``attention_mask``."""
    name = str(node.target)
    return name[2:].removesuffix("_") if name.startswith("L_") else name


def _describe(node: fx.Node, inputs: Mapping[fx.Node, str]) -> str:
    query, key, value, _, buffers, sinks, text = node.args[:7]
    assert isinstance(text, str) and isinstance(buffers, Sequence)
    score, sources = Score.from_json(text), [_read_from(buffer, inputs) for buffer in buffers]
    names = [inputs.get(source, source.name) for source in sources]
    visible = "k <= q < subtree_end[k]"
    if score.visible is not None:
        visible += f" and {_Writer(names).operand(score.visible, _INFIX['and'][0])}"
    computed = {source.name: user_line(source) for source in sources if source not in inputs}
    lines = {
        "softmax over k of": format_expression(score.value, names),
        "where": visible,
        **{f"with {name}": line for name, line in computed.items()},
        "sinks": "one more logit per query head" if sinks is not None else None,
        "query, key, value": " ".join(_shape(item) for item in (query, key, value)),
        "module": module_of(node),
        "line": user_line(node),
    }
    known = {label: line for label, line in lines.items() if line}
    width = max(map(len, known))
    return "\n".join(f"{label:<{width}}  {line}" for label, line in known.items())


def _read_from(node: Any, inputs: Mapping[fx.Node, str]) -> fx.Node:
    """The value that a buffer holds elements of: what it was gathered, sliced or reshaped from."""
    while node not in inputs and getattr(node.target, "overloadpacket", None) in _READS:
        node = node.args[0]
    return node  # type: ignore[no-any-return]


def _shape(node: Any) -> str:
    # The only symbol of a rewritten graph is the number of distinct tokens.
    return f"[{', '.join(str(size) if isinstance(size, int) else 'N' for size in node.meta['val'].shape)}]"
