"""Proofs and simplifications on lifted score expressions.

A lifted expression speaks of one score of the original model, in *columns*: ``("cq",)`` and ``("ck",)`` are the columns
of query and key, ``("b",)`` the row, ``("head",)`` the query head, ``("dot",)`` the product q.k, and
``("load", source, *indices)`` reads a value of the graph. Everything else is the expression language of
``treefx.kernels.score``.

Relations are assumed in turn. In the *future* (``ck > cq``) a causal model must give every score a masking value;
in the *past* (``ck <= cq``), the only place where tree attention looks, causal conditions are true and vanish. Where
rows are packed (``treefx.passes.labels.segments``), these two speak of pairs of one segment, and the score of a key in
any *other* segment, before or after, must be masked too.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from treefx.kernels.score import Expr
from treefx.passes.labels.constants import MASKING

__all__ = ["Relation", "Tables", "as_loaded", "conjuncts", "decide", "fold", "select", "simplify", "split_mask"]

Relation = str  # "future" | "past" | "other"


@dataclass(frozen=True)
class Tables:
    """Hold facts on the values that an expression loads."""

    evaluate: Callable[[Expr], torch.Tensor | None]
    """Evaluates an expression of constants on the grid [head, query column, key column], or returns None."""
    consecutive: frozenset[Any] = frozenset()
    """Loaded sources that count up by one from column to column of a row, or of a segment."""
    segments: frozenset[Any] = frozenset()
    """Loaded sources that are equal exactly where query and key are of one segment."""

    def __call__(self, expr: Expr) -> torch.Tensor | None:
        return self.evaluate(expr)


_COMPARISONS: dict[str, Callable[[float, float], bool]] = {
    "lt": lambda low, high: high < 0,
    "le": lambda low, high: high <= 0,
    "gt": lambda low, high: low > 0,
    "ge": lambda low, high: low >= 0,
}
_NEGATED = {"lt": "ge", "le": "gt", "gt": "le", "ge": "lt", "eq": "ne", "ne": "eq"}


def const(value: Any) -> Expr:
    """A constant."""
    return ("const", value)


def as_loaded(expr: Expr) -> Expr:
    """Write a choice of one and zero by a 0/1 input (``loads``) as that input."""
    if expr[0] != "where" or expr[1][0] != "ne" or expr[2:] != (const(1), const(0)):
        return expr
    loaded: Expr = expr[1][1]
    return loaded if loaded[0] == "load" and expr[1][2] == const(0) else expr


def affine(expr: Expr, consecutive: frozenset[Any] = frozenset()) -> dict[str, float] | None:
    """Return ``expr`` as coefficients of index symbols and unknown starts; or None."""
    expr = as_loaded(expr)
    op = expr[0]
    if op == "const":
        return {"1": float(expr[1])}
    if op in ("cq", "ck", "b", "head"):
        return {op: 1.0}
    if op == "load" and expr[1] in consecutive:
        column = affine(expr[-1])
        return None if column is None else {**column, f"start of {expr[1]}": 1.0}
    if op in ("int", "float"):
        return affine(expr[1], consecutive)
    if op == "neg":
        return _combine(affine(expr[1], consecutive), None, -1.0)
    if op in ("add", "sub"):
        right = affine(expr[2], consecutive)
        return None if right is None else _combine(affine(expr[1], consecutive), right, 1.0 if op == "add" else -1.0)
    if op == "mul":
        left, right = affine(expr[1], consecutive), affine(expr[2], consecutive)
        for number, other in ((left, right), (right, left)):
            if number is not None and other is not None and set(number) <= {"1"}:
                return {name: value * number.get("1", 0.0) for name, value in other.items()}
    return None


def _combine(left: dict[str, float] | None, right: dict[str, float] | None, factor: float) -> dict[str, float] | None:
    if left is None:
        return None
    if right is None:
        return {name: value * factor for name, value in left.items()}
    names = {**left, **right}
    return {name: left.get(name, 0.0) + factor * right.get(name, 0.0) for name in names}


def _difference(expr: Expr, relation: Relation, tables: Tables) -> tuple[float, float] | None:
    """Range of left minus right of a comparison, where it depends on ``ck - cq`` alone."""
    consecutive = tables.consecutive if relation != "other" else frozenset()
    form = affine(("sub", expr[1], expr[2]), consecutive)
    if form is None or any(value for name, value in form.items() if name not in ("cq", "ck", "1")):
        return None
    slope, constant = form.get("ck", 0.0), form.get("1", 0.0)
    if slope != -form.get("cq", 0.0):
        return None
    if slope == 0:
        return constant, constant
    if relation == "other":  # before or after
        return None
    near = slope * (1 if relation == "future" else 0) + constant
    rises = (slope > 0) == (relation == "future")
    return (near, math.inf) if rises else (-math.inf, near)


def decide(expr: Expr, relation: Relation, tables: Tables) -> bool | None:
    """The truth of a condition under the relation, or None where it depends on more."""
    op = expr[0]
    if op == "const":
        return bool(expr[1])
    if op in ("int", "float"):
        return decide(expr[1], relation, tables)
    if op == "not":
        inner = decide(expr[1], relation, tables)
        return None if inner is None else not inner
    if op in ("and", "or"):
        return _decide_logic(op, [decide(item, relation, tables) for item in expr[1:]])
    if op in _NEGATED:
        return _decide_comparison(expr, relation, tables)
    if op == "where":
        choice = decide(expr[1], relation, tables)
        branches = {decide(item, relation, tables) for item in expr[2:]}
        if choice is not None:
            return decide(expr[2] if choice else expr[3], relation, tables)
        return branches.pop() if len(branches) == 1 else None
    return _decide_table(expr, relation, tables)


def _decide_logic(op: str, values: list[bool | None]) -> bool | None:
    absorbing = op == "or"
    if absorbing in values:
        return absorbing
    return None if None in values else not absorbing


def _decide_comparison(expr: Expr, relation: Relation, tables: Tables) -> bool | None:
    folded = fold((expr[0], *[_chosen(item, relation, tables) for item in expr[1:]]))
    if folded != expr:  # a comparison of a choice between constants is that choice
        return decide(folded, relation, tables)
    op: str = expr[0]
    if _compares_segments(expr, tables):
        return (relation == "other") == (op == "ne")
    difference = _difference(expr, relation, tables)
    if difference is None:
        return _decide_table(expr, relation, tables)
    low, high = difference
    if op in ("eq", "ne"):
        if low == high:
            return (low == 0) == (op == "eq")
        return None if low <= 0 <= high else op == "ne"
    if _COMPARISONS[op](low, high):
        return True
    return False if _COMPARISONS[_NEGATED[op]](low, high) else None


def _chosen(expr: Expr, relation: Relation, tables: Tables) -> Expr:
    """The branch of a choice that is decided; others as they are."""
    choice = decide(expr[1], relation, tables) if expr[0] == "where" else None
    return expr if choice is None else _chosen(expr[2 if choice else 3], relation, tables)


def _compares_segments(expr: Expr, tables: Tables) -> bool:
    """Return whether a condition compares the segments of query and key."""
    sides = [as_loaded(item) for item in expr[1:]]
    if expr[0] not in ("eq", "ne") or any(side[0] != "load" or side[1] not in tables.segments for side in sides):
        return False
    return {side[2:] for side in sides} == {(("cq",),), (("ck",),)}


def _decide_table(expr: Expr, relation: Relation, tables: Tables) -> bool | None:
    table = tables(expr)
    if table is None:
        return None
    values = select(table.to(torch.bool), relation)
    if values.numel() == 0 or bool(values.all()):
        return True
    return None if bool(values.any()) else False


def select(table: torch.Tensor, relation: Relation) -> torch.Tensor:
    """The entries of a grid [.., query, key] that the relation speaks of."""
    queries, keys = table.shape[-2:]
    if relation == "other":
        return table
    future = torch.arange(keys) > torch.arange(queries)[:, None]
    return table[..., future if relation == "future" else ~future]


def simplify(expr: Expr, tables: Tables, relation: Relation = "past") -> Expr:
    """Rewrite an expression for one relation: decided conditions vanish, constants fold."""
    op, arguments = expr[0], expr[1:]
    if op in ("const", "load", "dot", "cq", "ck", "b", "head"):
        if op == "load" and (choice := _decide_bool_load(expr, tables, relation)) is not None:
            return const(choice)
        return expr
    arguments = tuple(simplify(item, tables, relation) for item in arguments)
    expr = (op, *arguments)
    if op in ("and", "or", "not", *_NEGATED):
        return _simplify_condition(expr, tables, relation)
    if op == "where":
        return _simplify_where(expr, tables, relation)
    return fold(expr)


def _decide_bool_load(expr: Expr, tables: Tables, relation: Relation) -> bool | None:
    table = tables(expr)
    return None if table is None or table.dtype is not torch.bool else _decide_table(expr, relation, tables)


def _simplify_condition(expr: Expr, tables: Tables, relation: Relation) -> Expr:
    choice = decide(expr, relation, tables)
    if choice is not None:
        return const(choice)
    op = expr[0]
    if op in ("and", "or"):
        neutral = op == "and"
        rest = [item for item in expr[1:] if decide(item, relation, tables) is not neutral]
        return rest[0] if len(rest) == 1 else expr
    if op == "not" and expr[1][0] in _NEGATED:
        return (_NEGATED[expr[1][0]], *expr[1][1:])
    folded = fold(expr)
    return expr if folded is expr else simplify(folded, tables, relation)


def _simplify_where(expr: Expr, tables: Tables, relation: Relation) -> Expr:
    condition: Expr
    first: Expr
    second: Expr
    _, condition, first, second = expr
    choice = decide(condition, relation, tables)
    if choice is not None:
        return first if choice else second
    branches = [item[1] if item[0] == "const" else None for item in (first, second)]
    if branches[0] is True and branches[1] is False:  # not the numbers 1 and 0, which are equal to them
        return condition
    if branches[0] is False and branches[1] is True:
        return _simplify_condition(("not", condition), tables, relation)
    return expr


_FOLDS: dict[str, Callable[..., Any]] = {
    "add": lambda x, y: x + y, "sub": lambda x, y: x - y, "mul": lambda x, y: x * y, "div": lambda x, y: x / y,
    "neg": lambda x: -x, "float": float, "int": int, "eq": operator.eq, "ne": operator.ne, "lt": operator.lt,
    "le": operator.le, "gt": operator.gt, "ge": operator.ge, "max": max, "min": min,
    "log": lambda x: math.log(x) if x else -math.inf,
}  # fmt: skip


def fold(expr: Expr) -> Expr:
    """Fold constants, also in branches of a choice; drop zero summands and unit factors."""
    op, arguments = expr[0], expr[1:]
    if op not in _FOLDS:
        return expr
    if all(item[0] == "const" for item in arguments):
        return _evaluate_constant(expr)
    for i, item in enumerate(arguments):
        others = arguments[:i] + arguments[i + 1 :]
        if _is_choice_of_constants(item) and all(other[0] == "const" for other in others):
            branches = [fold((op, *arguments[:i], branch, *arguments[i + 1 :])) for branch in item[2:]]
            return ("where", item[1], *branches)
    if len(arguments) == 2:
        left: Expr
        right: Expr
        left, right = arguments
        neutral = const(0.0) if op in ("add", "sub") else const(1.0)
        if op in ("add", "sub", "mul", "div") and right[0] == "const" and float(right[1]) == neutral[1]:
            return left
        if op in ("add", "mul") and left[0] == "const" and float(left[1]) == neutral[1]:
            return right
    return expr


def _evaluate_constant(expr: Expr) -> Expr:
    values = [item[1] for item in expr[1:]]
    try:
        return const(_FOLDS[expr[0]](*values))
    except (ZeroDivisionError, OverflowError, ValueError):
        return expr


def _is_choice_of_constants(expr: Expr) -> bool:
    return expr[0] == "where" and all(item[0] == "const" for item in expr[2:])


def split_mask(expr: Expr, tables: Tables) -> tuple[Expr, list[tuple[Expr, Expr]]]:
    """Split a simplified score into its value and the conditions under which it is not masked.

    Returns:
        The value where all conditions hold; each condition, and the score where it does not.
    """
    op = expr[0]
    if op == "where":
        _, condition, first, second = expr
        for kept, other, wanted in ((first, second, condition), (second, first, _negate(condition))):
            if _is_fill(other):
                value, masks = split_mask(kept, tables)
                return value, [*((item, other) for item in conjuncts(wanted)), *masks]
    if op == "load" and (lowest := _fill_of_table(expr, tables)) is not None:
        return ("max", expr, const(MASKING)), [(("gt", expr, const(MASKING)), const(lowest))]
    if op == "sub":
        return split_mask(("add", expr[1], fold(("neg", expr[2]))), tables)
    if op == "add":
        (left, above), (right, below) = split_mask(expr[1], tables), split_mask(expr[2], tables)
        if not above and not below:
            return expr, []
        masks = [(item, fold((op, score, expr[2]))) for item, score in above]
        return fold((op, left, right)), masks + [(item, fold((op, expr[1], score))) for item, score in below]
    for position, other in ((1, 2), (2, 1)):
        if op in _CARRYING and expr[other:] and _carries(op, expr[other], position):
            value, masks = split_mask(expr[position], tables)
            wrapped = [(item, _replaced(expr, position, score)) for item, score in masks]
            if op == "max" and masks:
                return value, [*wrapped, (const(True), expr[other])]  # no visible score is as low as the clamp
            return (_replaced(expr, position, value), wrapped) if masks else (expr, [])
    return split_mask(expr[1], tables) if op == "float" else (expr, [])


_CARRYING = ("mul", "div", "max")


def _carries(op: str, other: Expr, position: int) -> bool:
    """Return whether a mask survives an operand: a positive factor, or a clamp at a fill."""
    if other[0] != "const" or (op == "div" and position == 2):
        return False
    return _is_fill(other) if op == "max" else float(other[1]) > 0


def _replaced(expr: Expr, position: int, item: Expr) -> Expr:
    return fold((*expr[:position], item, *expr[position + 1 :]))


def _is_fill(expr: Expr) -> bool:
    return expr[0] == "const" and float(expr[1]) <= MASKING


def _fill_of_table(expr: Expr, tables: Tables) -> float | None:
    """The weakest fill among the constants that a pair of past tokens reads, if there is one."""
    table = tables(expr)
    if table is None or not table.is_floating_point():
        return None
    fills = select(table, "past")
    fills = fills[fills <= MASKING]
    return float(fills.max()) if fills.numel() else None


def _negate(condition: Expr) -> Expr:
    if condition[0] == "not":
        inner: Expr = condition[1]
        return inner
    if condition[0] in _NEGATED:
        return (_NEGATED[condition[0]], *condition[1:])
    return ("not", condition)


def conjuncts(condition: Expr) -> list[Expr]:
    """The conditions that are all required."""
    if condition[0] == "and":
        return [*conjuncts(condition[1]), *conjuncts(condition[2])]
    if condition[0] == "not" and condition[1][0] == "or":
        return [*conjuncts(_negate(condition[1][1])), *conjuncts(_negate(condition[1][2]))]
    return [condition]


def canonical_window(condition: Expr, tables: Tables) -> Expr:
    """Write a condition on ``cq - ck`` alone as ``cq - ck < W``, the kernels' form."""
    if condition[0] not in _COMPARISONS:
        return condition
    form = affine(("sub", condition[1], condition[2]), tables.consecutive)
    if form is None or any(value for name, value in form.items() if name not in ("cq", "ck", "1")):
        return condition
    slope, constant = form.get("ck", 0.0), form.get("1", 0.0)
    if slope == 0 or slope != -form.get("cq", 0.0):
        return condition
    # slope * (ck - cq) + constant <op> 0; with d = cq - ck: constant <op> slope * d
    op = condition[0] if slope > 0 else {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le"}[condition[0]]
    limit = constant / slope  # d < limit, d <= limit, d > limit or d >= limit
    if op not in ("gt", "ge"):
        return condition
    window = math.ceil(limit) if op == "gt" else math.floor(limit) + 1
    return ("lt", ("sub", ("cq",), ("ck",)), const(window))
