"""Score expressions as MathML, by way of sympy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from treefx.kernels.score import Expr

__all__ = ["mathml_of", "visible_of"]


def mathml_of(score: Expr, visible: Expr | None, names: Sequence[str]) -> str:
    """Format ``softmax`` of a score, with its visibility condition, as a MathML element.

    Args:
        score: In the language of ``treefx.kernels.score``.
        visible: A condition besides that of the tree; None for none.
        names: Of the buffers that the expressions load.

    Returns:
        "" where sympy has no form for an operator.
    """
    from sympy.printing.mathml import mathml

    writer = _Writer(names)
    try:
        value = writer.of(score)
        parts = [mathml(item, printer="presentation") for item in (value, visible_of(visible, names))]
    except (KeyError, TypeError, ValueError, AttributeError, NotImplementedError):
        return ""
    parts = [part.replace("<mo><</mo>", "<mo>&lt;</mo>").replace("<mo>></mo>", "<mo>&gt;</mo>") for part in parts]
    return f"<math display='block'><mrow>{parts[0]}<mtext>&#160;&#160;if&#160;&#160;</mtext>{parts[1]}</mrow></math>"


def visible_of(condition: Expr | None, names: Sequence[str]) -> Any:
    """Express the condition under which a query q sees a key k in sympy: tree and mask.

    ``end(k)`` is ``subtree_end``; a buffer is a function of its indices, by its name.

    Args:
        condition: In the language of ``treefx.kernels.score``; None for that of the tree alone.
        names: Of the buffers that it loads.

    Raises:
        KeyError: sympy has no form for an operator.
    """
    import sympy

    writer = _Writer(names)
    k, q, end = writer.symbol("k"), writer.symbol("q"), sympy.Function("end")
    tree = sympy.And(sympy.Le(k, q, evaluate=False), sympy.Lt(q, end(k), evaluate=False), evaluate=False)
    return tree if condition is None else sympy.And(tree, writer.of(condition), evaluate=False)


class _Writer:
    def __init__(self, names: Sequence[str]) -> None:
        self.names = names

    def symbol(self, name: str) -> Any:
        import sympy

        return sympy.Symbol(name, real=True)

    def of(self, expression: Expr) -> Any:
        """The same in sympy.

        Raises:
            KeyError: There is no such operator.
        """
        import sympy

        op, *arguments = expression
        if op in _LEAVES:
            return self.symbol(_LEAVES[op])
        if op == "const":
            return self._constant(arguments[0])
        if op == "load":
            name = "".join(c if c.isalnum() else "_" for c in self.names[arguments[0]])
            found = [self.of(item) for item in arguments[1:]]
            return sympy.Function(name)(*found) if found else self.symbol(name)
        items = [self.of(item) for item in arguments]
        if op in ("float", "int"):
            return items[0]
        if op == "where":
            return sympy.Piecewise((items[1], items[0]), (items[2], True), evaluate=False)
        return _OPERATORS[op](sympy)(*items)

    def _constant(self, value: Any) -> Any:
        import sympy

        if isinstance(value, bool):
            return sympy.true if value else sympy.false
        if isinstance(value, float):
            return -sympy.oo if value < -1e30 else sympy.oo if value > 1e30 else sympy.Float(f"{value:.6g}")
        return sympy.Integer(value)


_LEAVES = {"dot": "s_qk", "q": "q", "k": "k", "head": "h", "batch": "b"}
_OPERATORS: dict[str, Callable[[Any], Callable[..., Any]]] = {
    "neg": lambda s: lambda x: -x,
    "not": lambda s: s.Not,
    "exp": lambda s: s.exp,
    "log": lambda s: s.log,
    "tanh": lambda s: s.tanh,
    "sigmoid": lambda s: lambda x: 1 / (1 + s.exp(-x)),
    "sqrt": lambda s: s.sqrt,
    "abs": lambda s: s.Abs,
    "add": lambda s: lambda x, y: s.Add(x, y, evaluate=False),
    "sub": lambda s: lambda x, y: x - y,
    "mul": lambda s: lambda x, y: s.Mul(x, y, evaluate=False),
    "div": lambda s: lambda x, y: x / y,
    "pow": lambda s: s.Pow,
    "min": lambda s: s.Min,
    "max": lambda s: s.Max,
    "floordiv": lambda s: lambda x, y: s.floor(x / y),
    "mod": lambda s: s.Mod,
    "eq": lambda s: s.Eq,
    "ne": lambda s: s.Ne,
    "lt": lambda s: s.Lt,
    "le": lambda s: s.Le,
    "gt": lambda s: s.Gt,
    "ge": lambda s: s.Ge,
    "and": lambda s: s.And,
    "or": lambda s: s.Or,
}
