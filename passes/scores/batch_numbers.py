"""Handle numbers of the batch (columns T) in scores that hold for all batch sizes.

ALiBi is written both as ``slope * key`` and as ``slope * (key + 1 - T)``. A softmax ignores terms shared by all keys of
a query, so the number is left out; in any other use, sizes have to be known.
"""

from __future__ import annotations

from typing import Any

from treefx.kernels.score import Expr, walk
from treefx.passes.labels.constants import MASKING
from treefx.passes.scores.score_algebra import const

__all__ = ["number_of_batch", "reads_batch", "without_shifts"]


def number_of_batch(number: Any) -> Expr:
    """A symbol as a leaf that is never evaluated."""
    return ("size", str(number))


def reads_batch(expr: Expr) -> bool:
    """Whether an expression is made of numbers of the batch."""
    return any(item[0] == "size" for item in walk(expr))


def without_shifts(score: Expr) -> Expr:
    """Drop numbers of the batch that are added to all visible keys of a query alike."""
    op, operands = score[0], score[1:]
    if op == "size":
        return const(0)
    if op in ("add", "sub", "neg", "float"):
        return (op, *map(without_shifts, operands))
    if op == "mul":
        first, second = operands
        if _is_same_for_all_keys(first):
            return (op, first, without_shifts(second))
        return (op, without_shifts(first), second) if _is_same_for_all_keys(second) else score
    if op == "where" and not reads_batch(operands[0]):
        branches = [item if _hides(item) else without_shifts(item) for item in operands[1:]]
        return (op, operands[0], *branches) if any(map(_hides, operands[1:])) else score
    return score


def _is_same_for_all_keys(expr: Expr) -> bool:
    return not any(item[0] in ("ck", "dot", "size") for item in walk(expr))


def _hides(expr: Expr) -> bool:
    return expr[0] == "const" and float(expr[1]) <= MASKING
