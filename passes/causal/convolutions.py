"""Causal convolutions where the sizes of the batch are symbols.

The causal domain (``treefx.passes.causal.domain``) proves by tables over columns that are numbers. A convolution that
starts behind padding and ends where its row ends needs none: its taps determine how far back each reads, for any number
of columns; only padding, the slice behind it and its own parameters decide this.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor, fx

from treefx.passes.causal.tree_mixers import find_tree_convolution
from treefx.passes.labels.facts import Axis, Fact, Factor, Kind, plain_dims
from treefx.passes.labels.label_tokens import Improve
from treefx.passes.labels.token_inputs import Tokens

__all__ = ["convolving"]


def convolving(
    tokens: Tokens,
    sources: dict[fx.Node, frozenset[fx.Node]],
    admits: Callable[[fx.Node, frozenset[fx.Node]], bool],
) -> Improve:
    """Return the hook of ``label_tokens`` that runs causal convolutions along the tree."""

    def improve(node: fx.Node, fact: Fact) -> Fact:
        value: Any = node.meta.get("val")
        if fact.kind is not Kind.ROW or fact.law is not None or not _has_a_place_per_token(value, tokens):
            return fact
        law = find_tree_convolution(node)
        if law is None:
            return fact
        dims = ((Factor(Axis.ROW, tokens.rows),), *plain_dims([value.shape[1]]), (Factor(Axis.TOKEN, tokens.columns),))
        return replace(fact, kind=Kind.PACKED, dims=dims, law=law, reason=None)

    return improve


def _has_a_place_per_token(value: Any, tokens: Tokens) -> bool:
    """Return whether a value is [B, C, T]; sizes equal to the hint by chance do not count."""
    if not isinstance(value, Tensor) or value.dim() != 3:
        return False
    return str(value.shape[0]) == str(tokens.rows) and str(value.shape[2]) == str(tokens.columns)
