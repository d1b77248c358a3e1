"""Lift leaves: values of the graph read at the query's or the key's own token."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

from torch import fx

from treefx.inputs.values import GivenMask
from treefx.kernels.score import Expr, walk
from treefx.passes.labels.constants import constants_of
from treefx.passes.labels.dims import NoLaw
from treefx.passes.labels.facts import Axis, Dims, Kind, fact_of, shape_of
from treefx.passes.labels.segments import Segments
from treefx.passes.labels.uniformity import is_uniform
from treefx.passes.scores.digits import Digit, Index, combined
from treefx.passes.scores.score_algebra import const

__all__ = ["load", "load_maybe"]


def _invariant_position(node: fx.Node, dim: int, digits: Sequence[Digit]) -> Expr:
    """Return the position along a dimension of an invariant, if rows are all alike there."""
    if not any(item == ("b",) for digit in digits for item in walk(digit[0])):
        return combined(digits)
    if not is_uniform(node, dim):
        raise NoLaw("the mask differs from row to row by more than its inputs")
    return const(0)


def load_maybe(node: fx.Node, index: Index) -> Expr | None:
    """A learned function of the query's or of the key's token, or None where it is none."""
    tokens = {item for dim in index for digit in dim for item in walk(digit[0])} & {("cq",), ("ck",)}
    if len(tokens) > 1:
        return None
    try:
        return load(node, index)
    except NoLaw:
        return None


def _of_rows(node: fx.Node) -> str:
    if not constants_of(node).changes(node):
        return f"the mask depends on whole rows through {node.target}"
    return (
        f"reads a mask {list(shape_of(node))} given by the caller, which in this call is not causal up to hidden keys, "
        "a window or documents; give attention_mask [B, T], or build the mask inside the model"
    )


def _load_of_row(node: fx.Node, index: Index) -> Expr:
    """One number per row (or one for all) made from inputs alone, such as a count of padding.

    It becomes part of the identity of the row's tokens. One of each token, which may be made of all its row, is read at
    ``("b",)`` and the token's column; it says where blocks are (``treefx.passes.scores.blocks``) and nothing else.
    """
    places = [[digit[0] for digit in dim] for dim in index]
    if places in ([[("b",)], [("cq",)]], [[("b",)], [("ck",)]]):
        return ("load", node, ("b",), places[1][0])
    size = math.prod(shape_of(node))
    if [digit for dim in index for digit in dim] != ([(("b",), size)] if size > 1 else []):
        raise NoLaw(_of_rows(node))
    return ("load", node, ("cq",))


def _given_mask(known: GivenMask, parts: Sequence[fx.Node], index: Index, segments: Segments) -> Expr:
    """A mask of the caller's, as its values in this and all calls of the analysis are known.

    A key is not before the query's start iff both have the same start, where starts are those of segments.
    """
    rows = index[:1] if len(index) > 2 else ((),)
    seen: Expr = ("and", ("le", ("ck",), ("cq",)), load(parts[0], (*rows, index[-1])))
    if known.window is not None:
        seen = ("and", seen, ("lt", ("sub", ("cq",), ("ck",)), const(known.window)))
    if known.has_starts:
        segments.begins[parts[1]] = None
        start = load(parts[1], (*rows, index[-2]))
        same: Expr = ("eq", start, load(parts[1], (*rows, index[-1])))
        seen = ("and", seen, same if segments.assumed else ("ge", ("ck",), start))
    return ("where", seen, const(known.shown), const(known.hidden))


def load(node: fx.Node, index: Index) -> Expr:
    """Read a value at the index; a per-row value only at the query's or key's token."""
    if node.target is operator.getitem:
        raise NoLaw(f"the mask is built by {node.args[0]}")
    fact = fact_of(node)
    known = constants_of(node).masks.get(node)
    if known is not None and [[digit[0] for digit in dim] for dim in index[-2:]] == [[("cq",)], [("ck",)]]:
        return _given_mask(*known, index, constants_of(node).segments)
    if fact.kind is Kind.INVARIANT:
        fill = constants_of(node).number(node)
        if fill is not None:
            return const(fill)
        return ("load", node, *[_invariant_position(node, d, digits) for d, digits in enumerate(index)])
    if fact.kind is Kind.ROW and not fact.learned:
        return _load_of_row(node, index)
    if fact.kind is Kind.SCORE:
        raise NoLaw(f"a score passes through {node.target}")
    if fact.kind not in (Kind.PREFIX, Kind.PACKED) or fact.dims is None:
        raise NoLaw(_of_rows(node))
    token, rest = _at_token(fact.dims, index)
    loaded: Expr = ("load", node, token, *rest)
    if node not in constants_of(node).binary:
        return loaded
    number: Any = float if node.meta["val"].is_floating_point() else int
    return ("where", ("ne", loaded, const(0)), const(number(1)), const(number(0)))  # arithmetic with it folds


def _at_token(dims: Dims, index: Index) -> tuple[Expr, list[Expr]]:
    """Return the column of the token at which a value is read, and its plain indices."""
    token: Expr | None = None
    rest: list[Expr] = []
    for dim, digits in zip(dims, index, strict=True):
        axes = [factor.axis for factor in dim if factor.axis is not Axis.PLAIN]
        if not axes:
            rest.append(combined(digits))
        elif axes == [Axis.ROW] and [d[0] for d in digits] in ([("b",)], []):
            continue
        elif axes == [Axis.TOKEN] and [d[0] for d in digits] in ([("cq",)], [("ck",)], []):
            token = digits[0][0] if digits else ("ck",)  # with one column, query and key are one token
        elif axes == [Axis.ROW, Axis.TOKEN] and [d[0] for d in digits] in (
            [("b",), ("cq",)],
            [("b",), ("ck",)],
        ):
            token = digits[1][0]
        else:
            raise NoLaw("the mask reads a token other than its query or key")
    if token is None:
        raise NoLaw("the mask reads a per-row value at neither query nor key")
    return token, rest
