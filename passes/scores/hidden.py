"""Prove that a masked score hides: its weight is zero next to a visible score.

Tree attention never computes the masked pairs of a query and a key, such as those with its future. A model gives them a
low score, or adds a low number to theirs, and softmax rounds their weight to exactly zero iff

    masked score - best visible score <= -GAP

Both sides are bounded by interval arithmetic over the lifted score. Its unknowns, the products q.k and its loads, count
as finite numbers of their type with finite squares (``LARGEST``). That proves -inf, ``finfo.min`` and fills as low.
Weaker fills, such as -1e4 or -1e9, hide next to ordinary scores alone: the same inequality is then part of the graph,
with |q.k| <= max |q| max |k| of the call (``pack_tokens``); where it fails the call runs on rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, fx

from treefx.kernels.score import Expr, walk
from treefx.passes.labels.constants import MASKING, constants_of
from treefx.passes.labels.facts import Kind, fact_of
from treefx.passes.scores.lift_mask import element_operands
from treefx.passes.scores.score_algebra import Relation, Tables, decide, select

__all__ = ["LARGEST", "Range", "bounded", "interval", "is_hidden", "reads_keys", "residue", "unknown", "zero"]

GAP = 746.0
"""Scores this far below another have no weight next to it: exp(-746) is zero in float64, and in all narrower types."""
LARGEST = 2.0**60
"""Products q.k and biases count as smaller: the squares of larger ones, which gradients sum up, leave float32."""

Range = tuple[Tensor, Tensor]
"""Lowest and highest value, float64 scalars."""
Leaf = Callable[[Expr], Range]


def residue(expr: Expr, relation: Relation, tables: Tables) -> Expr:
    """Decide choices of a score under a relation of columns; the call's numbers are left.

    Open choices become ``("either", x, y)``, constants ``("range", low, high)``.
    """
    if expr[0] in ("const", "dot"):
        return expr
    if expr[0] == "where":
        choice = decide(expr[1], relation, tables)
        if choice is not None:
            return residue(expr[2 if choice else 3], relation, tables)
        return ("either", *[residue(item, relation, tables) for item in expr[2:]])
    table = tables(expr)
    values = None if table is None else select(table.to(torch.float64), relation)
    if values is not None and values.numel():
        return ("range", float(values.min()), float(values.max()))
    if expr[0] == "load":
        return expr
    return (expr[0], *[residue(item, relation, tables) if isinstance(item, tuple) else item for item in expr[1:]])


def is_hidden(masked: Expr, visible: Expr, leaf: Leaf) -> Tensor:
    """Whether a masked score has no weight next to a visible one: bool, a scalar."""
    highest, lowest = interval(masked, leaf)[1], interval(visible, leaf)[0]
    return torch.isneginf(highest) | (highest - lowest <= -GAP)


# Known bounds of a call's numbers
# ---------------------------------------------------------------------------------------


def zero(expr: Expr) -> Range:
    """Return zero for all numbers but the model's own: is this a mask at all?"""
    return _pair(0.0, 0.0)


def unknown(expr: Expr) -> Range:
    """Return the range of a type up to ``LARGEST``; all numbers for possible mask fills."""
    node: fx.Node | None = expr[1] if expr[0] in ("dot", "load") else None
    if node is None:
        return _pair(0.0, 2.0**31)  # a column, a row or a head
    if expr[0] == "load" and _holds_a_fill(node):
        return _pair(-math.inf, math.inf)
    dtype = node.meta["val"].dtype
    largest = min(LARGEST, torch.finfo(dtype).max) if dtype.is_floating_point else LARGEST
    return _pair(-largest, largest)


def bounded(low: Tensor, high: Tensor) -> Range:
    """A range of numbers of the call."""
    return low.detach().to(torch.float64), high.detach().to(torch.float64)


def _holds_a_fill(node: fx.Node) -> bool:
    """Return whether a value that is loaded unchanged may have been masked before."""
    if fact_of(node).kind is Kind.INVARIANT and node.op != "call_function":
        return False
    stack, visited = [node], {node}
    while stack:
        operands = element_operands(stack.pop())
        numbers = [constants_of(item).number(item) if isinstance(item, fx.Node) else item for item in operands]
        if any(isinstance(number, int | float) and number <= MASKING for number in numbers):
            return True
        sources = [item for item in operands if isinstance(item, fx.Node) and item not in visited]
        visited.update(sources)
        stack += sources
    return False


def _pair(low: float, high: float) -> Range:
    return torch.tensor(low, dtype=torch.float64), torch.tensor(high, dtype=torch.float64)


# Interval arithmetic --------------------------------------------------------------------------------------------------


def interval(expr: Expr, leaf: Leaf) -> Range:
    """Return bounds of a residue; ``leaf`` bounds products, loads and indices."""
    op = expr[0]
    if op in ("const", "range"):
        return _pair(float(expr[1]), float(expr[-1]))
    if op in ("dot", "load", "cq", "ck", "b", "head"):
        return leaf(expr)
    operands = [interval(item, leaf) for item in expr[1:] if isinstance(item, tuple)]
    if op in _MONOTONE:
        ((low, high),) = operands
        return _MONOTONE[op](low), _MONOTONE[op](high)
    if op in _ARITHMETIC:
        return _ARITHMETIC[op](*operands)
    return _pair(0.0, 1.0) if op in _TRUTHS else _pair(-math.inf, math.inf)


def _sum(x: Range, y: Range) -> Range:
    return _add(x[0], y[0]), _add(x[1], y[1])


def _add(x: Tensor, y: Tensor) -> Tensor:
    """Add, and keep -inf of a mask under any addition."""
    return torch.where(torch.isneginf(x) | torch.isneginf(y), -math.inf, x + y)


def _opposite(x: Range) -> Range:
    return -x[1], -x[0]


def _product(x: Range, y: Range) -> Range:
    products = torch.stack([a * b for a in x for b in y]).nan_to_num(0.0, posinf=math.inf, neginf=-math.inf)
    return products.amin(), products.amax()


def _quotient(x: Range, y: Range) -> Range:
    low, high = _product(x, (1 / y[1], 1 / y[0]))
    crosses = (y[0] <= 0) & (y[1] >= 0)
    return torch.where(crosses, -math.inf, low), torch.where(crosses, math.inf, high)


def _absolute(x: Range) -> Range:
    return torch.zeros_like(x[0]), torch.maximum(x[0].abs(), x[1].abs())


_MONOTONE: dict[str, Callable[[Tensor], Tensor]] = {
    "tanh": torch.tanh, "sigmoid": torch.sigmoid, "exp": torch.exp, "float": lambda x: x, "int": torch.trunc,
    "log": lambda x: torch.log(x.clamp(min=0)), "sqrt": lambda x: torch.sqrt(x.clamp(min=0)),
}  # fmt: skip
_ARITHMETIC: dict[str, Callable[..., Range]] = {
    "add": _sum, "sub": lambda x, y: _sum(x, _opposite(y)), "neg": _opposite, "mul": _product, "div": _quotient,
    "abs": _absolute, "max": lambda x, y: (torch.maximum(x[0], y[0]), torch.maximum(x[1], y[1])),
    "min": lambda x, y: (torch.minimum(x[0], y[0]), torch.minimum(x[1], y[1])),
    "either": lambda x, y: (torch.minimum(x[0], y[0]), torch.maximum(x[1], y[1])),
}  # fmt: skip
_TRUTHS = {"eq", "ne", "lt", "le", "gt", "ge", "and", "or", "not"}


def reads_keys(expr: Expr) -> bool:
    """Return whether a masked score still reads its key, which may not run."""
    return any(item[0] == "dot" or (item[0] == "load" and item[2:3] == (("ck",),)) for item in walk(expr))
