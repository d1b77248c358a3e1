"""Find values [B, T] that separate segments, and those that a lifted score reads."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import Tensor, fx

from treefx.kernels.score import Expr, walk
from treefx.passes.labels.facts import ALONG_ROWS, Axis, Fact, Factor, Kind
from treefx.passes.labels.label_tokens import Improve, Sources
from treefx.passes.labels.purity import impurity
from treefx.passes.labels.segments import Segments, is_of_tokens
from treefx.passes.labels.token_inputs import Tokens
from treefx.passes.scores.score_algebra import as_loaded

__all__ = ["along_segments", "note_segments"]


def along_segments(tokens: Tokens, sources: Sources, admits: Callable[[fx.Node, frozenset[fx.Node]], bool]) -> Improve:
    """Return the hook of ``label_tokens`` for packed rows.

    Any function of the inputs [B, T] has its number at each token, since tokens are keyed by these numbers
    (``own_positions``).
    """
    shape = [str(tokens.rows), str(tokens.columns)]
    dims = ((Factor(Axis.ROW, tokens.rows),), (Factor(Axis.TOKEN, tokens.columns),))

    def improve(node: fx.Node, fact: Fact) -> Fact:
        value = node.meta.get("val")
        if fact.kind is not Kind.ROW or fact.learned or fact.law is not None or not isinstance(value, Tensor):
            return fact
        of_tokens = [str(size) for size in value.shape] == shape and impurity(node) is None
        return Fact(Kind.PREFIX, dims, law=ALONG_ROWS) if of_tokens else fact

    return improve


def note_segments(score: Expr, segments: Segments) -> None:
    """Note values [B, T] by which a score separates segments, or counts inside them."""
    compared = [item for item in map(_compared, walk(score)) if item is not None]
    at_queries, at_keys = ({*_loads(score, column)} for column in ("cq", "ck"))
    segments.compared.update(dict.fromkeys(compared))
    for node in dict.fromkeys(_loads(score, "cq")):
        if node in at_queries & at_keys and node not in segments.compared:
            segments.counting[node] = None


def _compared(expr: Expr) -> fx.Node | None:
    """The x of a condition ``x[query] == x[key]``, or that they differ."""
    sides = [as_loaded(item) for item in expr[1:]] if expr[0] in ("eq", "ne") else []
    if not sides or any(side[0] != "load" for side in sides):
        return None
    (_, left, *at_left), (_, right, *at_right) = sides
    found: fx.Node = left
    return found if left is right and {*at_left, *at_right} == {("cq",), ("ck",)} and is_of_tokens(left) else None


def _loads(score: Expr, column: str) -> Iterator[fx.Node]:
    found = (item for item in walk(score) if item[0] == "load" and item[2:] == ((column,),))
    return (item[1] for item in found if is_of_tokens(item[1]))
