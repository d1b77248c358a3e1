"""Translate lifted attentions to scores of the kernels, with planes and tables.

A lifted score speaks of columns and of values of the traced graph. On the packed row each value per token that it
reads becomes a *plane*: one number per distinct token, gathered at the token's row and column like its position.
Constants of the model become *tables*, read by number. A score that needs trained weights, or values of hidden states,
is refused.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from treefx.errors import UnsupportedError
from treefx.kernels.recurrence.tree_conv import find_depths
from treefx.kernels.score import Expr, Score, walk
from treefx.passes.labels.facts import Kind, fact_of
from treefx.passes.scores.attention_facts import Attention, reads_key_alone
from treefx.runtime.call_plan import Batch
from treefx.runtime.converted.seam import Read
from treefx.runtime.padding import Grid, Padding

__all__ = ["Layout", "Written", "named", "plane_of", "reads_of", "window_of", "write"]

_WINDOW = ("sub", ("cq",), ("ck",))
_WEIGHTS = "a bias or mask of an attention is made of trained weights"
_HIDDEN = "a bias or mask of an attention is made of hidden states"
_WIDE = "a bias or mask of an attention reads several numbers of each token"
_32_BITS = 1 << 31

Plane = tuple[str, Any]
"""``("place", None)``; ``("seen", conditions)``; ``("token", node)``, values [B, T]; ``("row", node)``, values [B]."""


@dataclass
class Layout:
    """The planes that the attentions of one model read, each once."""

    planes: list[Plane] = field(default_factory=list)

    def number(self, plane: Plane) -> int:
        """The number of a plane; a new one comes behind the others."""
        if plane not in self.planes:
            self.planes.append(plane)
        return self.planes.index(plane)


@dataclass(frozen=True)
class Written:
    """One attention.

    Attributes:
        score: In packed indices.
        reads: Sources of its buffers: ``("plane", number, is_float)`` or ``("table", node, False)``.
        scale, softcap: The numbers around the product q.k, which the model hands to its attention function.
        heads: The number of query heads.
        has_sinks: Whether one logit per head takes weight and has no value.
        conditions: Its conditions on pairs, in columns, on keys too.
        of_keys: Those of them on keys alone.
    """

    score: Score
    reads: tuple[tuple[str, Any, bool], ...]
    scale: float
    softcap: float | None
    heads: int
    has_sinks: bool
    conditions: tuple[Expr, ...]
    of_keys: tuple[Expr, ...]

    @property
    def of_pairs(self) -> tuple[Expr, ...]:
        """The conditions on pairs of a query and a key."""
        return tuple(item for item in self.conditions if item not in self.of_keys)


def write(attention: Attention, redundant: Collection[Expr], layout: Layout) -> Written:
    """Write the score of a lifted attention, without ``redundant`` conditions.

    All tokens of a call meet the latter.

    Raises:
        UnsupportedError: It reads a value outside of planes and tables, its mask may not hide all it should, or its
            tokens see later ones.
    """
    if attention.doubt is not None:
        raise UnsupportedError("the fill of a mask is finite and may not hide scores below it")
    if attention.blocks is not None:
        raise UnsupportedError("tokens of a block see each other, which a converted attention does not compute")
    scale, softcap = _around_product(attention.score)
    asked = [item for item in attention.conditions + attention.padding if item not in redundant]
    of_keys = tuple(sorted((item for item in asked if reads_key_alone(item)), key=repr))
    writer = _Writer(layout)
    visible = [writer.form(item) for item in asked if item not in of_keys]
    if of_keys:
        visible.append(("ne", writer.plane(("seen", of_keys), ("k",)), ("const", 0)))
    score = Score(writer.form(attention.score), _all(visible))
    return Written(
        score, tuple(writer.reads), scale, softcap, attention.heads, attention.sinks is not None, tuple(asked), of_keys
    )


def _all(conditions: Sequence[Expr]) -> Expr | None:
    result: Expr | None = None
    for condition in conditions:
        result = condition if result is None else ("and", result, condition)
    return result


class _Writer:
    """Writes the expressions of one attention, its loads numbered."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self.reads: list[tuple[str, Any, bool]] = []

    def form(self, expr: Expr) -> Expr:
        """A lifted expression in packed indices."""
        if expr[0] == "dot":
            return ("dot",)
        if expr[0] in ("cq", "ck"):
            return self.plane(("place", None), ("q",) if expr[0] == "cq" else ("k",))
        if expr[0] == "load":
            return self._load(expr)
        return (expr[0], *[self.form(item) if isinstance(item, tuple) else item for item in expr[1:]])

    def plane(self, plane: Plane, token: Expr, is_float: bool = False) -> Expr:
        """Read a plane at the query or at the key."""
        return ("load", self._number(("plane", self._layout.number(plane), is_float)), token)

    def _load(self, expr: Expr) -> Expr:
        node, *indices = expr[1:]
        fact = fact_of(node)
        if fact.learned or fact.kind is Kind.PACKED:
            raise UnsupportedError(_HIDDEN if fact.kind is Kind.PACKED else _WEIGHTS)
        if fact.kind is Kind.INVARIANT:
            return ("load", self._number(("table", node, False)), *[self.form(item) for item in indices])
        is_float = node.meta["val"].dtype.is_floating_point
        if fact.kind is Kind.ROW:
            return self.plane(("row", node), ("q",), is_float)
        token, *rest = indices
        if any(item[0] != "const" for item in rest):
            raise UnsupportedError(_WIDE)
        return self.plane(("token", node), ("q",) if token == ("cq",) else ("k",), is_float)

    def _number(self, read: tuple[str, Any, bool]) -> int:
        if read not in self.reads:
            self.reads.append(read)
        return self.reads.index(read)


def window_of(condition: Expr) -> int | None:
    """The width of a sliding window; None for any other condition."""
    if condition[0] == "lt" and condition[1] == _WINDOW and condition[2][0] == "const":
        return int(condition[2][1])
    return None


def _around_product(score: Expr) -> tuple[float, float | None]:
    """Return scale and softcap of a score: ``scale * q.k``, capped or not, plus any terms."""
    match score:
        case ("dot", *_):
            return 1.0, None
        case ("mul", ("tanh", ("div", inner, ("const", cap))), ("const", again)) if cap == again:
            scale, none = _around_product(inner)
            if none is None:
                return scale, float(cap)
        case ("mul", inner, ("const", by)) | ("mul", ("const", by), inner) if _has_product(inner):
            scale, cap = _around_product(inner)
            if cap is None:
                return scale * float(by), None
        case ("div", inner, ("const", by)) if _has_product(inner):
            scale, cap = _around_product(inner)
            if cap is None:
                return scale / float(by), None
        case ("float", inner):
            return _around_product(inner)
        case ("add" | "sub", left, right) if _has_product(left) and not _has_product(right):
            return _around_product(left)
        case ("add", left, right) if _has_product(right) and not _has_product(left):
            return _around_product(right)
    raise UnsupportedError(
        f"the logit of an attention is neither a scaled nor a capped product of query and key: {named(score)}"
    )


def _has_product(expr: Expr) -> bool:
    return any(item[0] == "dot" for item in walk(expr))


def named(expr: Expr) -> str:
    """An expression in words for messages."""
    items = [item for item in expr[1:] if item and isinstance(item, str | tuple)]
    inside = [item if isinstance(item, str) else named(item) for item in items]
    return f"{expr[0]}({', '.join(inside)})" if inside else str(expr[0])


# The numbers of one call ----------------------------------------------------------------------------------------------


def plane_of(plane: Plane, batch: Batch, grid: Grid, padding: Padding) -> Tensor | None:
    """One number per distinct token, int32 [N]; None where it does not fit into 32 bits.

    Floating-point numbers are there by their bits in float32.
    """
    kind, source = plane
    row, column, end, _ = batch.metadata
    if kind == "place":
        return find_depths(end).to(torch.int32) if batch.own_positions else column.to(torch.int32)
    if kind == "seen":
        return padding.met(grid, source)[row, column].to(torch.int32)
    if kind == "row":
        return _in_32_bits(grid.value(source).reshape(-1).expand(grid.rows)[row])
    values = grid.at_positions(source)
    if values.dim() > 1 and values[0].numel() > 1:
        raise UnsupportedError(_WIDE)
    return _in_32_bits(values.reshape(-1)[row * grid.columns + column])


def _in_32_bits(x: Tensor) -> Tensor | None:
    if x.dtype.is_floating_point:
        narrow = x.to(torch.float32)
        return narrow.view(torch.int32) if torch.equal(narrow.to(x.dtype).nan_to_num(), x.nan_to_num()) else None
    if x.dtype is not torch.bool and x.numel() and (int(x.max()) >= _32_BITS or int(x.min()) < -_32_BITS):
        return None
    return x.to(torch.int32)


def reads_of(written: Written, grid: Grid) -> tuple[Read, ...]:
    """Return the values that the score reads in a call: planes by number, and tables."""
    return tuple(
        Read(source + 1, is_float, None) if kind == "plane" else Read(0, False, _table(source, grid))
        for kind, source, is_float in written.reads
    )


def _table(node: fx.Node, grid: Grid) -> Tensor:
    value: Tensor = grid.value(node)
    return value.detach().clone()
