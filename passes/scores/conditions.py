"""Conditions of masks as expressions: which of them a call's inputs decide, and which always hold."""

from __future__ import annotations

from collections.abc import Sequence

from treefx.kernels.score import Expr, walk
from treefx.passes.labels.facts import fact_of

__all__ = ["compares_one_value", "is_learned", "is_met_by_itself", "may_blind"]


def is_learned(condition: Expr) -> bool:
    """Return whether a parameter takes part in a condition."""
    return any(item[0] == "load" and fact_of(item[1]).learned for item in walk(condition))


def is_met_by_itself(expr: Expr) -> bool:
    """Return whether a condition always holds where query and key are one token."""
    if expr[0] in ("and", "or"):
        return (all if expr[0] == "and" else any)(is_met_by_itself(item) for item in expr[1:])
    if expr[0] == "lt":  # a window
        return expr[1] == ("sub", ("cq",), ("ck",)) and expr[2][0] == "const" and bool(expr[2][1] > 0)
    return expr[0] in ("eq", "le", "ge") and _of_itself(expr[1]) == _of_itself(expr[2])


def may_blind(conditions: Sequence[Expr]) -> bool:
    """Return whether a query may fail one of its conditions at its own key."""
    return not all(map(is_met_by_itself, conditions))


def _of_itself(expr: Expr) -> Expr:
    """An expression where the key is the query."""
    if expr == ("ck",):
        return ("cq",)
    return (expr[0], *[_of_itself(item) if isinstance(item, tuple) else item for item in expr[1:]])


def compares_one_value(condition: Expr) -> bool:
    """Return whether a condition is ``x[query] == x[key]``, x [B, T] or [1, T]."""
    if condition[0] != "eq" or is_learned(condition) or any(side[0] != "load" for side in condition[1:]):
        return False
    (_, left, *before, at_left), (_, right, *also_before, at_right) = condition[1:]
    leading = all(item == ("const", 0) for item in before) and before == also_before
    return left is right and leading and {at_left, at_right} == {("cq",), ("ck",)} and left.meta["val"].dim() == 2
