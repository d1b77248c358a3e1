"""Write positions as one digit per factor, so that views regroup and never divide."""

from __future__ import annotations

from collections.abc import Sequence

from treefx.kernels.score import Expr, walk
from treefx.passes.scores.score_algebra import const

__all__ = ["Digit", "Index", "align", "combined", "from_the_front", "of_head", "offset_of_keys", "split_digit"]

Digit = tuple[Expr, int]
"""An index expression and the extent it counts over."""
Index = tuple[tuple[Digit, ...], ...]
"""Per dimension its digits, most significant first; a dimension of size one has none."""


def combined(digits: Sequence[Digit]) -> Expr:
    """The position along a dimension that its digits spell."""
    if not digits:
        return const(0)
    total: Expr = digits[0][0]
    for expr, size in digits[1:]:
        total = ("add", ("mul", total, const(size)), expr)
    return total


def align(shape: Sequence[int], index: Index) -> Index:
    """The index of a broadcast operand of a shape (right-aligned)."""
    return tuple(() if size == 1 else index[position - len(shape)] for position, size in enumerate(shape))


def split_digit(digit: Digit, lower: int) -> tuple[Digit, Digit]:
    """A digit as two, the second of extent ``lower``."""
    expr, size = digit
    return (("floordiv", expr, const(lower)), size // lower), (("mod", expr, const(lower)), lower)


def offset_of_keys(digits: Sequence[Digit]) -> int | None:
    """Return how far behind its key an index stands: 0 for the key; else None."""
    expr = combined(digits)
    if expr == ("ck",) or not digits:
        return 0
    return int(expr[2][1]) if expr[0] == "add" and expr[1] == ("ck",) and expr[2][0] == "const" else None


def of_head(digit: Digit) -> bool:
    """Return whether a digit depends on the head alone."""
    return not any(item[0] in ("b", "cq", "ck") for item in walk(digit[0]))


def from_the_front(place: Expr, size: int) -> Expr:
    """An index that counts from the end where it is below zero, as one that never is."""
    if _is_never_negative(place):
        return place
    return ("where", ("lt", place, const(0)), ("add", place, const(size)), place)


def _is_never_negative(expr: Expr) -> bool:
    op, operands = expr[0], expr[1:]
    if op == "const":
        return bool(operands[0] >= 0)
    if op in ("add", "mul", "min", "floordiv", "int", "float"):
        return all(map(_is_never_negative, operands))
    if op == "mod":
        return _is_never_negative(operands[1])
    return op in ("cq", "ck", "b", "head", "abs") or (op == "max" and any(map(_is_never_negative, operands)))
