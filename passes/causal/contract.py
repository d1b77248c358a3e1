"""Contract results of causal mixers: from rows back to one value per distinct token.

A convolution, scan or recurrence has no token-wise law, so the graph expands before it. Where the causal domain proves
that its result at (row, column) reads that row up to that column, the same way in every row, two rows that share a
prefix have equal results there. The value is then read once per token, at the token's representative row and column,
and everything after it runs packed again. The full value is kept for the next operator without a law; the unused form
is dead code and is not emitted.

Before (4 rows of 12 tokens, everything after the convolution on rows)::

    conv: "f32[4, 64, 14]" = convolution(x, w, padding=2);  y: "f32[4, 64, 12]" = slice(conv, 2, 0, 12)

After::

    y: "f32[1, 64, s0]" = slice(conv, 2, 0, 12)[row, :, column]
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, fx

from treefx.passes.causal.domain import CausalDomain, token_dims
from treefx.passes.causal.laws import find_causal_law
from treefx.passes.causal.state import State
from treefx.passes.causal.tree_mixers import (
    LibraryTree,
    TreeConvolution,
    TreeScan,
    Vanishing,
    find_tree_convolution,
    has_channels_by_tokens,
)
from treefx.passes.labels.facts import ALONG_ROWS, Dims, Fact, Kind, fact_of, set_fact
from treefx.passes.labels.label_tokens import DTYPE_ONLY, SHAPE_ONLY, Improve
from treefx.passes.labels.token_inputs import Tokens

__all__ = ["Contracted", "Contractor", "contracting", "leaks", "mixes"]

aten = torch.ops.aten
_LARGEST_UNLEARNED = 4
"""Functions of the inputs alone with more entries per position are masks, which are lifted instead."""


@dataclass(frozen=True)
class Contracted:
    """The value is computed on rows and read once per distinct token."""


_MIXERS = Contracted | LibraryTree | TreeConvolution | TreeScan | Vanishing


class Contractor:
    """Turns facts of values computed per row into packed ones where the domain proves it.

    Args:
        domain: The causal domain of the graph.
        admits: Whether inputs may join the keys of tokens, for a value at the given node.
    """

    def __init__(self, domain: CausalDomain, admits: Callable[[fx.Node, frozenset[fx.Node]], bool]) -> None:
        self._domain, self._admits = domain, admits

    def improve(self, node: fx.Node, fact: Fact) -> Fact:
        """The fact of a node, contracted where that is proved."""
        improved = self._improved(node, fact)
        if improved.kind in (Kind.PACKED, Kind.PREFIX):
            self._domain.refine(node)
        self._domain.release(node)
        return improved

    def _improved(self, node: fx.Node, fact: Fact) -> Fact:
        value = node.meta.get("val")
        if fact.kind is not Kind.ROW or fact.law is not None or fact.parts is not None or not isinstance(value, Tensor):
            return fact
        found = self._prove(node)
        if found is None:
            return fact
        state, dims = found
        small = value.numel() <= _LARGEST_UNLEARNED * self._domain.rows * self._domain.columns
        if not small and _is_mask(node):
            return fact  # of chosen keys
        if not (state.packed or fact.learned):
            return Fact(Kind.PREFIX, dims, law=ALONG_ROWS) if small else fact
        if not self._admits(node, state.sources):
            return fact
        set_fact(node, fact)
        tree = find_tree_convolution(node)
        if tree is not None and has_channels_by_tokens(dims):
            return replace(fact, kind=Kind.PACKED, dims=dims, law=tree, reason=None)
        return replace(fact, kind=Kind.PACKED, dims=dims, law=Contracted())

    def _prove(self, node: fx.Node) -> tuple[State, Dims] | None:
        state = self._domain.state(node)
        if not isinstance(state, State):
            return None
        dims = token_dims(state, self._domain.rows, self._domain.columns)
        return None if dims is None else (state, dims)


def _is_mask(node: fx.Node) -> bool:
    """Return whether a value is a condition, or numbers that conditions choose: no gradient passes through it."""
    stack, seen = [node], {node}
    while stack:
        top = stack.pop()
        value = top.meta.get("val")
        if isinstance(value, Tensor) and not value.dtype.is_floating_point:
            if top is node and value.dtype is not torch.bool:
                return False
            continue
        if top.op != "call_function":
            if fact_of(top).learned:
                return False
            continue
        if top.target in DTYPE_ONLY or top.target in SHAPE_ONLY or top.target is aten.detach.default:
            continue
        sources = [item for item in top.all_input_nodes if item not in seen]
        seen.update(sources)
        stack += sources
    return True


def contracting(
    tokens: Tokens,
    sources: dict[fx.Node, frozenset[fx.Node]],
    admits: Callable[[fx.Node, frozenset[fx.Node]], bool],
) -> Improve:
    """Return the hook of ``label_tokens`` that contracts values by the causal domain."""
    return Contractor(CausalDomain(tokens.rows, tokens.columns, sources, find_causal_law), admits).improve


def mixes(gm: fx.GraphModule) -> bool:
    """Return whether values are contracted or computed along the tree, reading a row's past."""
    calls = [fact_of(node).law for node in gm.graph.nodes if node.op == "call_function"]
    return any(isinstance(law, _MIXERS) for law in calls)


def leaks(node: fx.Node, live: set[fx.Node]) -> bool:
    """Return whether a value per row reaches anything but contracted values.

    That is an output, or an input that the graph changes in place (a buffer that counts tokens, say).
    """
    stack, seen = [node], {node}
    while stack:
        top = stack.pop()
        if top.op == "output" or top.target is aten.copy_.default:
            return True
        fact = fact_of(top)
        if isinstance(fact.law, _MIXERS) or fact.kind is Kind.INVARIANT:  # the latter borrows a shape
            continue
        if fact.kind is not Kind.ROW:
            return True
        following = [user for user in top.users if user in live and user not in seen]
        seen.update(following)
        stack += following
    return False
