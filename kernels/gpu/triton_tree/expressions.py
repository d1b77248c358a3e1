"""Write a score as Triton code, by dependence on query, key, pair and q.k.

The parts free of the product keep their integer arithmetic and are hoisted to where they change: before the loop over
tiles for one side of the tile, inside it for the other. The rest is mathematics in one variable: sympy folds its
constants, differentiates it and finds common subexpressions.
"""

import ast
import math
import operator
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import sympy
import torch

from treefx.errors import UnsupportedError
from treefx.kernels.gpu.triton_tree.mathematics import Mathematics
from treefx.kernels.gpu.triton_tree.sympy_text import to_text
from treefx.kernels.score import Expr, Score, evaluate, walk

__all__ = ["BufferKind", "HoistedValue", "ScoreCode", "kinds_of", "score_code"]

_LEAVES = {
    "q": ("q_index", "row"),
    "k": ("k_index", "column"),
    "head": ("head", "row"),
    "batch": ("batch", "uniform"),
}
_FLOATING = ("exp", "log", "tanh", "sigmoid", "sqrt")
_COMPARISONS = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_ARITHMETIC = {"add": "+", "sub": "-", "mul": "*"}
_TOKENS = 2**24
"""More than there are in a forest."""
_SOFT = 1e30
"""A finite constant below minus this masks softly: a row that sees nothing else weighs all its keys alike."""


@dataclass(frozen=True)
class BufferKind:
    """Describe a buffer: ``"bool"``, ``"int"`` or ``"float"``, and its rank."""

    kind: str
    ndim: int


def kinds_of(buffers: Sequence[torch.Tensor]) -> tuple[BufferKind, ...]:
    """Return the kind of each buffer."""
    kinds = []
    for buffer in buffers:
        kind = "float" if buffer.is_floating_point() else "bool" if buffer.dtype == torch.bool else "int"
        kinds.append(BufferKind(kind, buffer.ndim))
    return tuple(kinds)


@dataclass(frozen=True)
class ScoreCode:
    """Hold a score's Triton code; statements read ``q_index, k_index, head, batch, dot``.

    Attributes:
        uniform: statements that depend on the batch at most.
        row: statements of one query and head.
        column: statements of one key.
        pair: statements of query and key, without the product.
        visible: the extra condition, or ``None``.
        value: statements that only the logit needs.
        logit: the logit times log2(e); if ``soft``, the logit itself.
        scale: the number that ``logit`` is the product q.k times, if it is that alone and positive.
        derivative: statements that only the slope needs.
        slope: d value / d dot; ``None`` if it is the number ``factor``.
        factor: the constant slope, or 1.
        singular: whether the slope is infinite at a product of 0, which rows that do not exist have.
        used: numbers of the buffers that are read.
        soft: whether finite constants mask, so that their sum must not become an infinity.
        loads_pairs: whether ``pair`` loads.
        leaves_32_bits: whether whole numbers may need more bits although positions do not: products, large constants.
        row_values: variables of ``uniform`` and ``row`` that later statements read, with their meaning.
        column_values: those of ``column``.
    """

    uniform: tuple[str, ...]
    row: tuple[str, ...]
    column: tuple[str, ...]
    pair: tuple[str, ...]
    visible: str | None
    value: tuple[str, ...]
    logit: str
    scale: float | None
    derivative: tuple[str, ...]
    slope: str | None
    factor: float
    singular: bool
    used: tuple[int, ...]
    soft: bool
    loads_pairs: bool
    leaves_32_bits: bool
    row_values: tuple["HoistedValue", ...]
    column_values: tuple["HoistedValue", ...]


@dataclass(frozen=True)
class HoistedValue:
    """Name a variable of one query or one key alone, with its expression and kind."""

    name: str
    expr: Expr
    kind: str


@lru_cache(maxsize=256)
def score_code(score: str, buffers: tuple[BufferKind, ...]) -> ScoreCode:
    """Translate a score.

    Args:
        score: the text of ``Score.to_json()``.
        buffers: kinds of the loaded buffers.

    Raises:
        UnsupportedError: the score takes q.k through an operation without a derivative.
        InputError: it does not fit the buffers.
    """
    parsed = Score.from_json(score)
    writer = _Writer(buffers)
    writer.count(parsed.value)
    if parsed.visible is not None:
        writer.count(parsed.visible)
    value = Mathematics(writer).visit(parsed.value)
    visible = None if parsed.visible is None else _tidy(writer.truth(parsed.visible, "pair"))
    dot = sympy.Symbol("dot", real=True)
    slope = sympy.diff(value, dot)
    logit = value if writer.soft else value * sympy.Float(math.log2(math.e))
    constant = not slope.free_symbols and slope.is_finite is not False
    singular = slope.subs(dot, 0).has(sympy.zoo, sympy.oo, -sympy.oo, sympy.nan)
    shared, (logit, *rest) = sympy.cse(
        [logit] if constant else [logit, slope], symbols=sympy.numbered_symbols("term_"), order="canonical"
    )
    first, second = _split(shared, logit)
    text = to_text(logit)
    if dot not in value.free_symbols:  # the tile's shape comes from the product
        text = f"dot * 0.0 + ({text})"
    later = " ".join([*writer.statements["pair"], visible or "", *first, text, *second, *map(to_text, rest)])
    read = set(re.findall(r"\w+", later))
    return ScoreCode(
        **{level: tuple(lines) for level, lines in writer.statements.items()},
        visible=visible,
        value=first,
        logit=_tidy(text),
        scale=_scale_of(logit, dot),
        derivative=second,
        slope=None if constant else _tidy(to_text(rest[0])),
        factor=float(slope) if constant else 1.0,
        singular=singular,
        used=tuple(sorted(writer.used)),
        soft=writer.soft,
        loads_pairs="tl.load" in " ".join(writer.statements["pair"]),
        leaves_32_bits=any(map(writer.leaves_32_bits, _parts(parsed))),
        row_values=writer.values_read(read, ("row", "uniform")),
        column_values=writer.values_read(read, ("column",)),
    )


def _parts(score: Score) -> list[Expr]:
    return walk(score.value) + ([] if score.visible is None else walk(score.visible))


def _scale_of(logit: Any, dot: Any) -> float | None:
    """Return the positive factor of an expression ``factor * dot``, else ``None``."""
    scale = logit.coeff(dot) if logit.free_symbols == {dot} else sympy.Integer(0)
    return float(scale) if scale.is_number and scale.is_positive and logit == scale * dot else None


def _split(shared: list[tuple[Any, Any]], logit: Any) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Divide common subexpressions into those the logit needs and the others."""
    needed = set(logit.free_symbols)
    for name, expression in reversed(shared):
        if name in needed:
            needed |= expression.free_symbols
    lines: dict[bool, list[str]] = {True: [], False: []}
    for name, expression in shared:
        lines[name in needed].append(f"{name} = {_tidy(to_text(expression))}")
    return tuple(lines[True]), tuple(lines[False])


def _tidy(text: str) -> str:
    """Drop superfluous parentheses."""
    return ast.unparse(ast.parse(text, mode="eval"))


def _inner(expr: Expr) -> Iterable[Expr]:
    return (item for item in expr[1:] if isinstance(item, tuple))


class _Writer:
    """Write the parts free of the product, each shared part once."""

    def __init__(self, buffers: tuple[BufferKind, ...]) -> None:
        self.buffers = buffers
        self.statements: dict[str, list[str]] = {"uniform": [], "row": [], "column": [], "pair": []}
        self.used: set[int] = set()
        self.soft = False
        self.hoisted: dict[str, Expr] = {}
        self._uses: dict[int, int] = {}
        self._names: dict[int, str] = {}

    def count(self, expr: Expr) -> None:
        """Count how often each part is read; equal parts are one object."""
        self._uses[id(expr)] = self._uses.get(id(expr), 0) + 1
        if expr[0] == "const" and isinstance(expr[1], float) and -math.inf < expr[1] <= -_SOFT:
            self.soft = True
        if self._uses[id(expr)] == 1:
            for item in _inner(expr):
                self.count(item)

    def values_read(self, names: set[str], levels: tuple[str, ...]) -> tuple[HoistedValue, ...]:
        """Return the hoisted variables of some levels among ``names``."""
        found = [(name, expr) for name, expr in self.hoisted.items() if name in names and name.startswith(levels)]
        return tuple(HoistedValue(name, expr, self.kind(expr)) for name, expr in found)

    def uses_dot(self, expr: Expr) -> bool:
        return expr[0] == "dot" or any(self.uses_dot(item) for item in _inner(expr))

    def level(self, expr: Expr) -> str:
        """Return which index the value depends on."""
        if expr[0] in _LEAVES:
            return _LEAVES[expr[0]][1]
        levels = {self.level(item) for item in _inner(expr)} - {"uniform"}
        return "pair" if len(levels) > 1 or "pair" in levels else next(iter(levels), "uniform")

    def kind(self, expr: Expr) -> str:
        """Return ``"bool"``, ``"int"`` or ``"float"``, by the promotion rules of torch."""
        op, *arguments = expr
        if op == "const":
            return type(arguments[0]).__name__
        if op in _LEAVES or op == "int":
            return "int"
        if op == "load":
            self.check_load(expr)
            return self.buffers[arguments[0]].kind
        if op in _FLOATING or op in ("float", "div", "dot"):
            return "float"
        if op in _COMPARISONS or op in ("and", "or", "not"):
            return "bool"
        kinds = {self.kind(item) for item in (arguments[1:] if op == "where" else arguments)}
        return "float" if "float" in kinds else "int" if "int" in kinds else "bool"

    def leaves_32_bits(self, expr: Expr) -> bool:
        """Whether a whole number may need more bits although those that are loaded count tokens."""
        return self.kind(expr) == "int" and not self._largest(expr) < 2**31

    def _largest(self, expr: Expr) -> float:
        """Return the largest size of an expression; infinity if unknown, as of a loaded float."""
        op, *operands = expr
        kind = self.kind(expr)
        if kind == "bool" or op == "const":
            return 1 if kind == "bool" else abs(operands[0])
        if op in _LEAVES or (op == "load" and kind == "int"):
            return _TOKENS
        if op in ("load", "dot", *_FLOATING) or (op in ("floordiv", "pow") and kind == "float"):
            return math.inf
        sizes = [self._largest(item) for item in operands[op == "where" :]]
        if op == "div":
            divisor = operands[1][1] if operands[1][0] == "const" else 0
            return sizes[0] / abs(divisor) if divisor else math.inf
        if op in ("add", "sub", "mul", "pow"):
            size = {"mul": operator.mul, "pow": operator.pow}.get(op, operator.add)(sizes[0], sizes[1])
            return float(size) if size < 2**64 else math.inf
        return sizes[-1] if op == "mod" else sizes[0] if op == "floordiv" else max(sizes)

    def check_load(self, expr: Expr) -> None:
        """Raise unless every dimension of an existing buffer is indexed."""
        number, indices = expr[1], expr[2:]
        if not 0 <= number < len(self.buffers) or self.buffers[number].ndim != len(indices):
            empty = [torch.empty((0,) * buffer.ndim) for buffer in self.buffers]
            zero = torch.zeros(())
            evaluate(expr, dot=zero, q=zero, k=zero, head=zero, batch=zero, buffers=empty)

    def name(self, expr: Expr) -> str:
        """Return a variable that holds the value."""
        if id(expr) not in self._names:
            if expr[0] in _LEAVES:
                return _LEAVES[expr[0]][0]
            level = self.level(expr)
            text = self.compute(expr, level)
            lines = self.statements[level]
            self._names[id(expr)] = f"{level}_{len(lines)}"
            lines.append(f"{self._names[id(expr)]} = {_tidy(text)}")
            self.hoisted[self._names[id(expr)]] = expr
        return self._names[id(expr)]

    def text(self, expr: Expr, level: str) -> str:
        """Return the value for a statement of ``level``: a variable if shared or hoisted."""
        if expr[0] in _LEAVES:
            return _LEAVES[expr[0]][0]
        if expr[0] == "const":
            return _number(expr[1])
        if expr[0] == "load" or self._uses.get(id(expr), 0) > 1 or self.level(expr) != level:
            return self.name(expr)
        return f"({self.compute(expr, level)})"

    def truth(self, expr: Expr, level: str) -> str:
        text = self.text(expr, level)
        return text if self.kind(expr) == "bool" else f"({text} != 0)"

    def real(self, expr: Expr, level: str) -> str:
        if expr[0] == "const":
            return _number(float(expr[1]))
        text = self.text(expr, level)
        return text if self.kind(expr) == "float" else f"{text}.to(tl.float32)"

    def whole(self, expr: Expr, level: str) -> str:
        """Return an operand of arithmetic: booleans as integers."""
        text = self.text(expr, level)
        return f"{text}.to(tl.int32)" if self.kind(expr) == "bool" and expr[0] != "const" else text

    def compute(self, expr: Expr, level: str) -> str:
        """Return the operation itself."""
        op, *arguments = expr
        if op == "load":
            return self.load(arguments[0], arguments[1:], level)
        if op in _FLOATING:
            name = "tanh" if op == "tanh" else f"tl.{op}"
            return f"{name}({self.real(arguments[0], level)})"
        if op in ("and", "or"):
            first, second = (self.truth(item, level) for item in arguments)
            return f"{first} {'&' if op == 'and' else '|'} {second}"
        if op == "not":
            return f"{self.truth(arguments[0], level)} == 0"
        if op == "where":
            first, second = (self.whole(item, level) for item in arguments[1:])
            if self.kind(expr) == "float":
                first, second = (self.real(item, level) for item in arguments[1:])
            return f"tl.where({self.truth(arguments[0], level)}, {first}, {second})"
        return self.arithmetic(op, arguments, self.kind(expr), level)

    def arithmetic(self, op: str, arguments: list[Expr], kind: str, level: str) -> str:
        if kind == "bool" and op in ("add", "mul", "min", "max"):  # as torch does for booleans
            first, second = (self.truth(item, level) for item in arguments)
            return f"{first} {'|' if op in ('add', 'max') else '&'} {second}"
        operands = [self.real(item, level) if kind == "float" else self.whole(item, level) for item in arguments]
        if op in _ARITHMETIC or op in _COMPARISONS:
            symbol = _ARITHMETIC.get(op) or _COMPARISONS[op]
            first, second = operands if op in _ARITHMETIC else (self.whole(item, level) for item in arguments)
            return f"{first} {symbol} {second}"
        if op == "div":
            return f"{self.real(arguments[0], level)} / {self.real(arguments[1], level)}"
        if op in ("min", "max"):
            return f"tl.{op}imum({operands[0]}, {operands[1]})"
        if op in ("floordiv", "mod"):
            name = "floor_divide" if op == "floordiv" else "remainder"
            return f"{name}({operands[0]}, {operands[1]}, {kind == 'float'})"
        if op == "neg":
            return f"-{operands[0]}"
        if op == "abs":
            return f"tl.abs({operands[0]})"
        if op == "float":
            return self.real(arguments[0], level)
        if op == "int":
            return f"{self.whole(arguments[0], level)}.to(tl.int64)"
        if op == "pow":
            return self.power(arguments, level)
        raise UnsupportedError(f"a generated kernel must use the ops of treefx.kernels.score, got {op!r}")

    def power(self, arguments: list[Expr], level: str) -> str:
        base, exponent = arguments
        if exponent[0] != "const" or int(exponent[1]) != exponent[1] or not 0 <= exponent[1] <= 8:
            raise UnsupportedError(
                "a power in a generated kernel must have a constant exponent from 0 to 8 unless q.k is its base, "
                f"got {exponent!r:.80}: use impl='flex'"
            )
        return " * ".join([self.whole(base, level)] * int(exponent[1])) or "1"

    def load(self, number: int, indices: list[Expr], level: str) -> str:
        self.check_load(("load", number, *indices))
        self.used.add(number)
        buffer = self.buffers[number]
        if buffer.kind == "float" and level in ("pair", "column"):
            self.soft = True  # an additive mask may hold the lowest number of its type
        offsets = [self.offset(number, dim, index, level) for dim, index in enumerate(indices)]
        loaded = f"tl.load({' + '.join([f'buffer_{number}', *offsets])})"
        if buffer.kind == "float":
            return f"{loaded}.to(tl.float32)"
        return f"{loaded} != 0" if buffer.kind == "bool" else loaded

    def offset(self, number: int, dim: int, index: Expr, level: str) -> str:
        stride = f"buffer_{number}_stride_{dim}"
        text = self.text(index, level)
        if index[0] == "const":
            text = f"tl.full([], {text}, tl.int64)"
        if index[0] not in _LEAVES:  # computed indices may run out where the pair is invisible
            text = f"clamped({text}, buffer_{number}_size_{dim})"
        return f"{text}.to(tl.int64) * {stride}"


def _number(value: bool | int | float) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        return f"float('{value}')"
    return f"({value!r})" if value < 0 else repr(value)
