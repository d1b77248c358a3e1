"""Score expressions the way people write them."""

from collections.abc import Sequence

from treefx.kernels.score import Expr

__all__ = ["format_condition", "format_expression"]

_INFIX = {
    "or": (1, "or"), "and": (2, "and"), "eq": (4, "=="), "ne": (4, "!="), "lt": (4, "<"), "le": (4, "<="),
    "gt": (4, ">"), "ge": (4, ">="), "add": (5, "+"), "sub": (5, "-"), "mul": (6, "*"), "div": (6, "/"),
    "floordiv": (6, "//"), "mod": (6, "%"), "pow": (8, "**"),
}  # fmt: skip
"""Precedence and symbol."""
_CONDITIONAL, _NOT, _NEGATION, _ATOM = 0, 3, 7, 9
_LEAVES = {
    "dot": ("(q·k)", _ATOM),
    "q": ("q", _ATOM),
    "k": ("k", _ATOM),
    "head": ("head", _ATOM),
    "batch": ("row", _ATOM),
}


def format_expression(expression: Expr, buffers: Sequence[str]) -> str:
    """Write a score expression the usual way, with no more parentheses than it takes.

    Args:
        expression: In the language of ``treefx.kernels.score``.
        buffers: Names of the tensors that loads read.

    Returns:
        For example ``50 * tanh(0.0625 * (q·k) / 50)``; ``(q·k)`` is the product of query and key, ``q`` and
        ``k`` are their packed indices.
    """
    return _Writer(buffers).write(expression)[0]


def format_condition(expression: Expr, buffers: Sequence[str]) -> str:
    """Write a condition so that it can stand behind ``and``."""
    return _Writer(buffers).operand(expression, _INFIX["and"][0])


class _Writer:
    """Each method returns a text and how tightly its outermost operator binds."""

    def __init__(self, buffers: Sequence[str]) -> None:
        self.buffers = buffers

    def write(self, expression: Expr) -> tuple[str, int]:
        op, *arguments = expression
        if op in _LEAVES:
            return _LEAVES[op]
        if op == "const":
            return _number(arguments[0])
        if op == "load":
            return self.load(arguments[0], arguments[1:])
        if op == "float":  # a change of type, not of value
            return self.write(arguments[0])
        if op in _INFIX:
            return self.infix(*_INFIX[op], *arguments)
        if op == "neg":
            return "-" + self.operand(arguments[0], _NEGATION), _NEGATION
        if op == "not":
            return "not " + self.operand(arguments[0], _NOT), _NOT
        if op == "where":
            condition, first, second = (self.operand(item, _CONDITIONAL + 1) for item in arguments)
            return f"{first} if {condition} else {second}", _CONDITIONAL
        return f"{op}({', '.join(self.write(item)[0] for item in arguments)})", _ATOM

    def infix(self, precedence: int, symbol: str, left: Expr, right: Expr) -> tuple[str, int]:
        if symbol == "*" and right[0] == "const":
            left, right = right, left
        # Equal operators in a row group to the left, comparisons do not chain.
        first = self.operand(left, precedence + (precedence in (4, 8)))
        second = self.operand(right, precedence + (symbol not in ("and", "or")))
        return f"{first} {symbol} {second}", precedence

    def operand(self, expression: Expr, precedence: int) -> str:
        text, own = self.write(expression)
        return text if own >= precedence else f"({text})"

    def load(self, number: int, indices: Sequence[Expr]) -> tuple[str, int]:
        name = self.buffers[number]
        return (f"{name}[{', '.join(self.write(index)[0] for index in indices)}]" if indices else name), _ATOM


def _number(value: bool | float) -> tuple[str, int]:
    text = str(value) if isinstance(value, bool) else f"{value:.6g}"
    return text, _NEGATION if text.startswith("-") else _ATOM
