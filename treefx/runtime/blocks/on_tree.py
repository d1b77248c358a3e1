"""Graphs in the middle of a model, such as one block: their hidden states come packed, and attention becomes that of a
tree.

``treefx.distribute`` marks what comes packed with ``treefx::on_tree``, which carries the tree as real inputs, so that
backward and recomputation read the tree of their own forward.

Before::

    x: "f32[1, s0, 64]" = treefx.on_tree(hidden, subtree_end, seen);  ...
    out: "f32[1, 4, s0, 16]" = scaled_dot_product_attention(q, k, v, is_causal=True)

After::

    out: "f32[1, 4, s0, 16]" = treefx.tree_attention(q, k, v, subtree_end, ...)

Correct because the labels of ``label_tokens``, run on the same graph with the marked values looked up by token, prove
every other operator token-wise, and every attention causal and nothing else.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from treefx.errors import UnsupportedError
from treefx.kernels.score import Score, walk
from treefx.passes.labels.constants import Constants, InputValues
from treefx.passes.labels.facts import Kind, fact_of
from treefx.passes.labels.label_tokens import find_tokens, label_tokens, user_line
from treefx.passes.scores import attention_laws as _attention_laws  # noqa: F401  (registers laws)
from treefx.passes.scores.attention_facts import attentions
from treefx.passes.trace.fakes import fake_inputs, strided_fake
from treefx.passes.trace.token_count import TokenCount
from treefx.passes.trace.trace import trace_forward

__all__ = ["OnTree", "is_on_tree", "on_tree", "rewrite_on_tree"]

aten = torch.ops.aten


@torch.library.custom_op("treefx::on_tree", mutates_args=())
def on_tree(x: Tensor, subtree_end: Tensor, seen: Tensor | None) -> Tensor:
    """Mark ``x`` [1, N, ...] as packed in the order of a forest; the rewrite takes the mark out.

    Args:
        x: one entry per distinct token.
        subtree_end: int32 [N].
        seen: int64 [N], 0 at padding, which no other token sees; None where there is none.
    """
    raise UnsupportedError(
        "a block of a model under treefx.distribute must run as a graph of treefx, but it ran in eager mode or with "
        "another backend; compile every block with backend='treefx', and raise torch._dynamo.config.recompile_limit "
        "if Dynamo gave up on one"
    )


@on_tree.register_fake
def _(x: Tensor, subtree_end: Tensor, seen: Tensor | None) -> Tensor:
    return torch.empty_like(x)


def _pass_on(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    return grad, None, None


on_tree.register_autograd(_pass_on)

_MARK = torch.ops.treefx.on_tree.default
_MARKS = {_MARK, torch.ops.treefx.on_tree, on_tree}
_ATTENTION = torch.ops.treefx.attention.default


def is_on_tree(gm: fx.GraphModule) -> bool:
    """Whether a graph of Dynamo, or a body inside of it, reads packed values."""
    bodies = [module for module in gm.modules() if isinstance(module, fx.GraphModule)]
    return any(node.target in _MARKS for body in bodies for node in body.graph.nodes)


@dataclass
class OnTree:
    """A rewritten graph with fake inputs, one per placeholder; ``count`` says which numbers of tokens it admits.

    ``read`` are the positions of the inputs whose values the proof of its attentions has read.
    """

    gm: fx.GraphModule
    inputs: list[Any]
    mode: FakeTensorMode
    count: TokenCount
    attentions: int
    read: set[int]


def rewrite_on_tree(gm: fx.GraphModule, inputs: Sequence[Any], roles: Sequence[str]) -> OnTree:
    """Prove a graph token-wise but for its attention, and write the attention of a tree into it.

    Args:
        gm: Dynamo's graph; bodies of checkpoints are inlined and keep their tags.
        inputs: Run-time inputs; where Dynamo left the number of tokens symbolic, it is among them.
        roles: "parameter", "buffer", "input" or "variable" per placeholder.

    Raises:
        UnsupportedError: No attention, or another attention than causal, or an operator without a token-wise law.
    """
    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    found, read = _prove(trace_forward(gm, fake_inputs(inputs, mode), mode), inputs, roles)
    count = TokenCount(max(x.shape[0] for x in inputs if isinstance(x, Tensor) and x.dtype is torch.int32))
    mode = FakeTensorMode(shape_env=count, allow_non_fake_inputs=True)
    fakes = _fakes(gm, inputs, count, mode)
    traced = trace_forward(gm, fakes, mode)
    _write_attention(traced)
    return OnTree(traced, fakes, mode, count, found, read)


def _fakes(gm: fx.GraphModule, inputs: Sequence[Any], count: TokenCount, mode: FakeTensorMode) -> list[Any]:
    """Fake inputs, as long as the symbol N where Dynamo's graph is symbolic in the number of tokens."""
    examples = [node.meta.get("example_value") for node in gm.graph.find_nodes(op="placeholder")]
    symbols = _symbols_of_count(gm)
    if not symbols:
        return fake_inputs(inputs, mode)
    count.vectors([torch.int32], torch.device("cpu"), mode)

    def is_count(size: Any) -> bool:
        return isinstance(size, torch.SymInt) and size.node.expr in symbols

    result: list[Any] = []
    for value, example in zip(inputs, examples, strict=True):
        if isinstance(value, Tensor):
            pairs = zip(example.shape, value.shape, strict=True)
            sizes = [count.count if is_count(size) else n for size, n in pairs]
            result.append(_fake(value, sizes, mode))
        elif is_count(example):
            result.append(count.count)
        else:
            raise UnsupportedError(
                f"a block under treefx.distribute may take no number but that of tokens, got {value!r}; mark other "
                "dimensions static (torch._dynamo.mark_static), or compile the whole model with backend='treefx'"
            )
    return result


def _fake(value: Tensor, sizes: Sequence[Any], mode: FakeTensorMode) -> Tensor:
    if all(isinstance(size, int) for size in sizes):
        return fake_inputs([value], mode)[0]  # type: ignore[no-any-return]
    return strided_fake(value, sizes, None, 0, mode)


def _symbols_of_count(gm: fx.GraphModule) -> set[Any]:
    """The symbols that Dynamo has for the number of tokens: it may have one for every marked value and for the tree."""
    sizes: list[Any] = []
    for node in gm.graph.nodes:
        if node.target in _MARKS:
            x, *trees = (item.meta["example_value"] for item in node.args if item is not None)
            sizes += [x.shape[1], *(tree.shape[0] for tree in trees)]
    return {size.node.expr for size in sizes if isinstance(size, torch.SymInt)}


def _write_attention(gm: fx.GraphModule) -> None:
    """Replace every attention and take the marks out."""
    marks = gm.graph.find_nodes(op="call_function", target=_MARK)
    subtree_end, seen = marks[0].args[1:]
    visible = None if seen is None else ("ne", ("load", 0, ("k",)), ("const", 0))
    for node in gm.graph.find_nodes(op="call_function", target=_ATTENTION):
        query, key, value, _, _, _, scale, _ = node.args
        factor = 1 / math.sqrt(query.meta["val"].shape[-1]) if scale is None else float(scale)
        score = Score(("mul", ("dot",), ("const", factor)), visible)
        buffers = [] if seen is None else [seen]
        with gm.graph.inserting_before(node):
            arguments = (query, key, value, subtree_end, buffers, None, score.to_json(), "auto")
            attention = gm.graph.call_function(torch.ops.treefx.tree_attention.default, arguments)
            out = gm.graph.call_function(_first, (attention,))
        attention.meta, out.meta = copy.copy(node.meta), copy.copy(node.meta)
        attention.meta.pop("val", None)
        node.replace_all_uses_with(out)
        gm.graph.erase_node(node)
    for mark in marks:
        mark.replace_all_uses_with(mark.args[0])
        gm.graph.erase_node(mark)
    gm.recompile()


def _first(results: Sequence[Tensor]) -> Tensor:
    return results[0]


# The proof ------------------------------------------------------------------------------------------------------------


def _prove(gm: fx.GraphModule, inputs: Sequence[Any], roles: Sequence[str]) -> tuple[int, set[int]]:
    """Label a static trace; the number of its attentions, and the inputs whose values were read.

    The marked values become rows of tables that token ids look up: to the laws that is what packed values are.
    """
    values, kinds = list(inputs), list(roles)
    proof = copy.deepcopy(gm)
    marks = proof.graph.find_nodes(op="call_function", target=_MARK)
    first = proof.graph.find_nodes(op="placeholder")[-1]
    tokens = marks[0].meta["val"].shape[1]
    with proof.graph.inserting_after(first):
        ids = proof.graph.placeholder("treefx_ids")
    ids.meta["val"] = marks[0].meta["val"].new_empty(1, tokens, dtype=torch.int64)
    values.append(torch.zeros(1, tokens, dtype=torch.int64))
    kinds.append("input")
    last = ids
    for number, mark in enumerate(marks):
        value = mark.meta["val"]
        if value.dim() == 2:  # a number per token, such as its position
            mark.replace_all_uses_with(ids)
        else:
            with proof.graph.inserting_after(last):
                last = proof.graph.placeholder(f"treefx_table_{number}")
            last.meta["val"] = value[0]
            values.append(value[0])
            kinds.append("parameter")
            with proof.graph.inserting_before(mark):
                looked_up = proof.graph.call_function(aten.embedding.default, (last, ids))
            looked_up.meta = {"val": value}
            mark.replace_all_uses_with(looked_up)
        proof.graph.erase_node(mark)
    proof.recompile()
    found = find_tokens(proof, kinds)
    if found is None:
        raise UnsupportedError("a block under treefx.distribute must read hidden states [1, N, features], got none")
    constants = Constants(proof, values, kinds, InputValues(frozenset(), frozenset()))
    label_tokens(proof, kinds, found)
    _check(proof)
    return len(attentions(proof)), constants.read


def _check(gm: fx.GraphModule) -> None:
    """Raise unless every operator is token-wise or a plain causal attention."""
    whole = gm.graph.find_nodes(op="call_function", target=_ATTENTION)
    if not whole:
        raise UnsupportedError(
            "a block under treefx.distribute must compute its attention by scaled_dot_product_attention, got no call "
            "of it; use attn_implementation='sdpa', and compile only the blocks, each as a whole"
        )
    for node in gm.graph.nodes:
        reason = fact_of(node).reason if node.op == "call_function" else None
        if reason is not None:
            raise UnsupportedError(
                f"under treefx.distribute every operator of a block must have a token-wise law, but {node.target} "
                f"{reason} ({user_line(node)}); compile the whole model with backend='treefx' instead"
            )
    lifted = attentions(gm)
    if len(lifted) != len(whole):
        raise UnsupportedError(
            f"under treefx.distribute every attention of a block must be one scaled_dot_product_attention, got "
            f"{len(lifted)} of which {len(whole)} are; use attn_implementation='sdpa'"
        )
    for attention in lifted:
        more = any(part[0] in ("load", "cq", "ck") for part in walk(attention.score))
        if more or attention.conditions or attention.padding or attention.sinks is not None:
            raise UnsupportedError(
                "attention under treefx.distribute must be causal and nothing else, got one with a mask, window, bias "
                "or sinks of its own; compile the whole model with backend='treefx' instead"
            )
    outputs: Any = next(iter(gm.graph.find_nodes(op="output"))).args[0]
    facts = [fact_of(item) for item in outputs if isinstance(item, fx.Node)]
    if any(fact.kind not in (Kind.PACKED, Kind.PREFIX, Kind.INVARIANT) for fact in facts):
        raise UnsupportedError("a block under treefx.distribute must return values per token, got others")
