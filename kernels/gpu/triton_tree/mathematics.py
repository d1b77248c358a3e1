"""Express a score in sympy as a function of q.k, for differentiation."""

import math
from typing import Any, Protocol

import sympy

from treefx.errors import UnsupportedError
from treefx.kernels.gpu.triton_tree.sympy_text import Sigmoid
from treefx.kernels.score import Expr

__all__ = ["Mathematics", "Parts"]


class Parts(Protocol):
    """Provide facts on the parts of an expression that are free of the product."""

    def uses_dot(self, expr: Expr) -> bool:
        """Whether the product is in it."""

    def kind(self, expr: Expr) -> str:
        """One of "float", "int" and "bool"."""

    def name(self, expr: Expr) -> str:
        """The variable that holds it."""


class Mathematics:
    """Translate functions of the product into sympy."""

    def __init__(self, writer: Parts) -> None:
        self.writer = writer
        self._converted: dict[tuple[str, int], Expr] = {}

    def visit(self, expr: Expr) -> Any:
        """Return a real-valued expression."""
        op, *arguments = expr
        if op == "dot":
            return sympy.Symbol("dot", real=True)
        if not self.writer.uses_dot(expr):
            return self.opaque(expr)
        if op == "where":
            return sympy.Piecewise(
                (self.visit(arguments[1]), self.condition(arguments[0])), (self.visit(arguments[2]), True)
            )
        law = _LAWS.get(op)
        if law is None:
            raise UnsupportedError(
                f"a generated kernel must take q.k through differentiable operations, got {op!r}: use impl='flex' "
                "or impl='reference'"
            )
        return law(*[self.visit(argument) for argument in arguments])

    def opaque(self, expr: Expr) -> Any:
        if expr[0] == "const":
            value = expr[1]
            if isinstance(value, float) and math.isinf(value):
                return sympy.oo if value > 0 else -sympy.oo
            return sympy.Float(value) if isinstance(value, float) else sympy.Integer(value)
        known = expr if self.writer.kind(expr) == "float" else self.converted("float", expr)
        return sympy.Symbol(self.writer.name(known), extended_real=True)

    def converted(self, op: str, expr: Expr, *arguments: Expr) -> Expr:
        """Return one and the same new part for the same part: names go by identity."""
        return self._converted.setdefault((op, id(expr)), (op, expr, *arguments))

    def condition(self, expr: Expr) -> Any:
        op, *arguments = expr
        if not self.writer.uses_dot(expr):
            if expr[0] == "const":
                return sympy.true if expr[1] else sympy.false
            known = expr if self.writer.kind(expr) == "bool" else self.converted("ne", expr, ("const", 0))
            return sympy.Symbol(self.writer.name(known))
        if op in ("and", "or", "not"):
            law = {"and": sympy.And, "or": sympy.Or, "not": sympy.Not}[op]
            return law(*[self.condition(argument) for argument in arguments])
        relation = _RELATIONS.get(op)
        if relation is None:
            return sympy.Ne(self.visit(expr), 0)
        return relation(*[self.visit(argument) for argument in arguments])


def _power(base: Any, exponent: Any) -> Any:
    if not exponent.is_number:
        raise UnsupportedError("a power of q.k must have a constant exponent in a generated kernel: use impl='flex'")
    rounded = sympy.nsimplify(exponent)
    if not (2 * rounded).is_integer:
        raise UnsupportedError(
            f"a power of q.k must have an integer or half-integer exponent in a generated kernel, got {exponent}: "
            "use impl='flex'"
        )
    return base**rounded


def _smaller(a: Any, b: Any) -> Any:
    """Put functions of the product last: a NaN compares False with everything, and stays."""
    return sympy.Piecewise((b, b < a), (a, True)) if _reads_product(a) else sympy.Piecewise((a, a <= b), (b, True))


def _larger(a: Any, b: Any) -> Any:
    return sympy.Piecewise((b, b > a), (a, True)) if _reads_product(a) else sympy.Piecewise((a, a >= b), (b, True))


def _reads_product(value: Any) -> bool:
    return any(symbol.name == "dot" for symbol in value.free_symbols)


_LAWS: dict[str, Any] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a / b,
    "neg": lambda a: -a,
    "float": lambda a: a,
    "exp": sympy.exp,
    "log": sympy.log,
    "tanh": sympy.tanh,
    "sigmoid": Sigmoid,
    "sqrt": sympy.sqrt,
    "pow": _power,
    "abs": lambda a: sympy.Piecewise((-a, a < 0), (0, sympy.Eq(a, 0)), (a, True)),
    "min": _smaller,
    "max": _larger,
}
_RELATIONS: dict[str, Any] = {
    "eq": sympy.Eq,
    "ne": sympy.Ne,
    "lt": sympy.Lt,
    "le": sympy.Le,
    "gt": sympy.Gt,
    "ge": sympy.Ge,
}
