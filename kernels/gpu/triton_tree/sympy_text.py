"""Real expressions of sympy as Triton code."""

from typing import Any

import sympy
from sympy.printing.str import StrPrinter

__all__ = ["Sigmoid", "to_text"]


class Sigmoid(sympy.Function):  # type: ignore[misc]
    """Represent ``1 / (1 + exp(-x))`` with a derivative that never divides infinities."""

    nargs = 1

    def fdiff(self, argindex: int = 1) -> Any:
        """Return the derivative."""
        return self * (1 - self)


def to_text(expression: Any) -> str:
    """Write a real-valued or boolean expression as Triton code; numbers are exact."""
    text: str = _Printer().doprint(expression)
    return text


class _Printer(StrPrinter):  # type: ignore[misc]
    """Print nodes; methods are named after sympy's nodes."""

    def _print_Float(self, number: Any) -> str:
        return repr(float(number))

    _print_Rational = _print_Half = _print_Float

    def _print_Infinity(self, _: Any) -> str:
        return "float('inf')"

    def _print_NegativeInfinity(self, _: Any) -> str:
        return "float('-inf')"

    def _print_Pow(self, power: Any, rational: bool = False) -> str:
        base, exponent = power.args
        if exponent < 0:
            return f"(1.0 / {self._print(base**-exponent)})"
        factors = [f"({self._print(base)})"] * int(exponent)
        if exponent != int(exponent):
            factors.append(f"tl.sqrt({self._print(base)})")
        return f"({' * '.join(factors)})"

    def _print_exp(self, call: Any) -> str:
        return f"tl.exp({self._print(call.args[0])})"

    def _print_log(self, call: Any) -> str:
        return f"tl.log({self._print(call.args[0])})"

    def _print_tanh(self, call: Any) -> str:
        return f"tanh({self._print(call.args[0])})"

    def _print_Sigmoid(self, call: Any) -> str:
        return f"tl.sigmoid({self._print(call.args[0])})"

    def _print_Piecewise(self, pieces: Any) -> str:
        *cases, (last, _) = pieces.args
        text: str = self._print(last)
        for value, condition in reversed(cases):
            text = f"tl.where({self._print(condition)}, {self._print(value)}, {text})"
        return text

    def _print_ITE(self, choice: Any) -> str:
        condition, first, second = (f"({self._print(item)})" for item in choice.args)
        return f"(({condition} & {first}) | (({condition} == 0) & {second}))"

    def _print_Relational(self, relation: Any) -> str:
        first, second = (self._print(side) for side in relation.args)
        return f"(({first}) {relation.rel_op} ({second}))"

    def _print_And(self, junction: Any) -> str:
        return f"({' & '.join(f'({self._print(item)})' for item in junction.args)})"

    def _print_Or(self, junction: Any) -> str:
        return f"({' | '.join(f'({self._print(item)})' for item in junction.args)})"

    def _print_Not(self, negation: Any) -> str:
        return f"(({self._print(negation.args[0])}) == 0)"
