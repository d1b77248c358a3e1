"""Define score expressions: an attention's logit per pair, as plain data.

An expression is a nested tuple ``(op, *arguments)``. It is JSON-serialisable, so that a whole score fits into
one string argument of a custom op, and it is evaluated by broadcasting on tiles of any shape.

======================================  ====================================================================
``("const", value)``                    bool, int or float (exact, infinities included)
``("dot",)``                            raw q.k, unscaled, in the accumulation type
``("q",) ("k",)``                       packed indices of the query and the key token (integers)
``("head",) ("batch",)``                query head index, batch index
``("load", i, *indices)``               element of ``buffers[i]`` at integer indices, one a dimension;
                                        a negative index counts from the end; an index out of range (which
                                        only an invisible pair may have) is clamped
unary, binary, ternary                  the names in :data:`UNARY`, :data:`BINARY` and ``("where", c, x, y)``
======================================  ====================================================================
"""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor

from treefx.errors import InputError

__all__ = ["BINARY", "UNARY", "Expr", "Linear", "Score", "evaluate", "linear_in_dot", "loads", "make_score", "walk"]

Expr = tuple[Any, ...]
Linear = tuple[float, Expr | None]
"""``a * dot + bias``: the factor a, and a bias free of ``dot`` (``None``: zero)."""

UNARY: dict[str, Callable[[Tensor], Tensor]] = {
    "neg": torch.neg,
    "not": torch.logical_not,
    "exp": torch.exp,
    "log": torch.log,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "sqrt": torch.sqrt,
    "abs": torch.abs,
    "int": lambda x: x.to(torch.int64),
}
BINARY: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": torch.div,
    "pow": torch.pow,
    "min": torch.minimum,
    "max": torch.maximum,
    "floordiv": torch.floor_divide,
    "mod": torch.remainder,
    "eq": torch.eq,
    "ne": torch.ne,
    "lt": torch.lt,
    "le": torch.le,
    "gt": torch.gt,
    "ge": torch.ge,
    "and": torch.logical_and,
    "or": torch.logical_or,
}
_LEAVES = ("dot", "q", "k", "head", "batch")
_ABSORBING = 1e30
"""A constant below minus this absorbs any finite product q.k: it masks under any addition."""


@dataclass(frozen=True)
class Score:
    """Hold an attention's computation before its softmax.

    Attributes:
        value: the logit, an expression in ``dot`` and the indices.
        visible: an extra boolean condition, ANDed with the tree condition (key is query or an ancestor of
            it); ``None`` for none.
    """

    value: Expr
    visible: Expr | None = None
    _text: str = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # Written at once: inside a compiled region the numbers may have become symbols.
        object.__setattr__(self, "_text", f"[{_write(self.value)},{_write(self.visible)}]")

    @cached_property
    def linear(self) -> "Linear | None":
        """The value as :func:`linear_in_dot` splits it."""
        return linear_in_dot(self.value)

    def to_json(self) -> str:
        """Return the score as one string; floats round-trip exactly, infinities included."""
        return self._text

    @staticmethod
    @lru_cache(maxsize=1024)
    def from_json(text: str) -> "Score":
        """Read the string of :meth:`to_json`; merge equal subexpressions, evaluated once.

        Raises:
            InputError: the text is not a score.
        """
        try:
            value, visible = json.loads(text)
            table: dict[tuple[Any, ...], Expr] = {}
            return Score(_intern(value, table), None if visible is None else _intern(visible, table))
        except (ValueError, TypeError, IndexError) as error:
            raise InputError(f"score must be the text of Score.to_json(), got {text[:80]!r}: {error}") from error


_NUMBERS = {math.inf: "Infinity", -math.inf: "-Infinity"}


def _write(item: Any) -> str:
    # Not json.dumps: Dynamo must be able to trace this function.
    if isinstance(item, tuple):
        return f"[{','.join([_write(inner) for inner in item])}]"
    if isinstance(item, str):
        return f'"{item}"'
    if item is None:
        return "null"
    if isinstance(item, bool):
        return "true" if item else "false"
    return _NUMBERS.get(item, "NaN" if item != item else str(item))


def _intern(node: list[Any], table: dict[tuple[Any, ...], Expr]) -> Expr:
    arguments = tuple(_intern(item, table) if isinstance(item, list) else item for item in node)
    # True == 1 == 1.0 in Python: the type belongs to the key. Interned children are compared by identity.
    key = tuple(id(item) if isinstance(item, tuple) else (type(item), repr(item)) for item in arguments)
    return table.setdefault(key, arguments)


@lru_cache(maxsize=1024)
def loads(expr: Expr | None) -> tuple[int, ...]:
    """Return the numbers of the buffers that an expression loads from, in ascending order."""
    return () if expr is None else tuple(sorted({item[1] for item in walk(expr) if item[0] == "load"}))


def evaluate(
    expr: Expr, *, dot: Tensor, q: Tensor, k: Tensor, head: Tensor, batch: Tensor, buffers: Sequence[Tensor]
) -> Tensor:
    """Evaluate an expression by broadcasting, usually on one tile.

    Args:
        expr: the expression.
        dot: raw products q.k, ``[B, H, Q, K]``; its dtype is the accumulation type of the result's floats.
        q: packed indices of the queries, ``[Q, 1]`` int64.
        k: packed indices of the keys, ``[1, K]`` int64.
        head: query head indices, ``[H, 1, 1]``.
        batch: batch indices, ``[B, 1, 1, 1]``.
        buffers: tensors that ``load`` reads.

    Returns:
        A tensor that broadcasts to ``[B, H, Q, K]``; expressions that do not use ``dot`` keep smaller shapes.

    Raises:
        InputError: an unknown op, or a load of a buffer that is not there or with the wrong number of
            indices.
    """
    leaves = {"dot": dot, "q": q, "k": k, "head": head, "batch": batch}
    return _Evaluator(leaves, buffers, {}).visit(expr)


@dataclass(frozen=True)
class _Evaluator:
    leaves: dict[str, Tensor]
    buffers: Sequence[Tensor]
    memo: dict[int, Tensor]

    def visit(self, expr: Expr) -> Tensor:
        if torch.compiler.is_dynamo_compiling():  # that of PyTorch 2.11 cannot trace id() of a tuple
            return self.compute(expr)
        found = self.memo.get(id(expr))
        if found is None:
            found = self.memo[id(expr)] = self.compute(expr)
        return found

    def compute(self, expr: Expr) -> Tensor:
        op = expr[0]
        if op in self.leaves:
            return self.leaves[op]
        if op == "const":
            return self.constant(expr[1])
        if op == "load":
            return self.load(expr)
        arguments = [self.visit(argument) for argument in expr[1:]]
        if op == "float":
            return arguments[0].to(self.leaves["dot"].dtype)
        if op == "where" and len(arguments) == 3:
            return torch.where(arguments[0].to(torch.bool), arguments[1], arguments[2])
        if op in UNARY and len(arguments) == 1:
            return UNARY[op](arguments[0])
        if op in BINARY and len(arguments) == 2:
            return BINARY[op](arguments[0], arguments[1])
        raise InputError(f"a score expression must use the ops of treefx.kernels.score, got {expr!r:.120}")

    def constant(self, value: bool | int | float) -> Tensor:
        dot = self.leaves["dot"]
        dtype = dot.dtype if isinstance(value, float) else None  # 0-dim: promotes like a Python number
        return torch.full((), value, dtype=dtype, device=dot.device)

    def load(self, expr: Expr) -> Tensor:
        number, indices = expr[1], expr[2:]
        if not 0 <= number < len(self.buffers) or self.buffers[number].ndim != len(indices):
            shapes = [list(buffer.shape) for buffer in self.buffers]
            raise InputError(f"a load must index every dimension of a buffer, got {expr!r:.120} on buffers {shapes}")
        buffer = self.buffers[number]
        if not indices:
            return buffer
        sizes = zip(indices, buffer.shape, strict=True)
        return buffer[(*[self.index(index, size) for index, size in sizes],)]

    def index(self, expr: Expr, size: int) -> Tensor | int:
        if expr[0] == "const":  # a tensor of no dimensions would be asked for its number
            return min(max(int(expr[1]), -size), size - 1)
        value = self.visit(expr)
        # Indices taken from tokens are in range; computed ones may run out of it where the pair is invisible.
        return value if expr[0] in _LEAVES else value.to(torch.int64).clamp(-size, size - 1)


def walk(expr: Expr) -> list[Expr]:
    """All subexpressions, the expression itself first."""
    found = [expr]
    if expr[0] != "dot":
        for item in expr[1:]:
            if isinstance(item, tuple):
                found += walk(item)
    return found


def linear_in_dot(expr: Expr) -> Linear | None:
    """Split ``expr`` into ``a * dot + bias``.

    A ``where`` with a masking constant (-inf, or so low that adding a product q.k does not change it) in one
    branch counts as a bias, which it equals in floating point.

    Returns:
        ``(a, bias)`` with ``a`` a number and ``bias`` free of ``dot`` (``None``: zero), or ``None`` if the
        expression is not recognised as linear.
    """
    if not _uses_dot(expr):
        return 0.0, None if _constant(expr) == 0 else expr
    op = expr[0]
    if op == "dot":
        return 1.0, None
    if op == "float":
        return linear_in_dot(expr[1])
    if op == "neg":
        return _scaled(linear_in_dot(expr[1]), -1.0)
    if op in ("add", "sub"):
        return _summed(op, linear_in_dot(expr[1]), linear_in_dot(expr[2]))
    if op == "where":
        return _chosen(expr)
    if op == "mul":
        factor, rest = (expr[1], expr[2]) if not _uses_dot(expr[1]) else (expr[2], expr[1])
        number = _constant(factor)
        return None if number is None else _scaled(linear_in_dot(rest), number)
    if op == "div":
        number = _constant(expr[2])
        return None if not number else _scaled(linear_in_dot(expr[1]), 1.0 / number)
    return None


def _uses_dot(expr: Expr) -> bool:
    return expr[0] == "dot" or any(isinstance(item, tuple) and _uses_dot(item) for item in expr[1:])


def _constant(expr: Expr) -> float | None:
    """Return the number that ``expr`` is, or None; arithmetic of constants is folded."""
    if expr[0] == "const":
        return float(expr[1])
    if expr[0] == "float":
        return _constant(expr[1])
    if expr[0] == "neg":
        number = _constant(expr[1])
        return None if number is None else -number
    return None


def _scaled(linear: Linear | None, number: float) -> Linear | None:
    if linear is None or not math.isfinite(number):
        return None
    factor, bias = linear
    return factor * number, None if bias is None else ("mul", bias, ("const", number))


def _summed(op: str, left: Linear | None, right: Linear | None) -> Linear | None:
    if left is None or right is None:
        return None
    if op == "sub":
        right = -right[0], None if right[1] is None else ("neg", right[1])
    biases = [bias for bias in (left[1], right[1]) if bias is not None]
    return left[0] + right[0], ("add", biases[0], biases[1]) if len(biases) == 2 else next(iter(biases), None)


def _chosen(expr: Expr) -> Linear | None:
    condition, first, second = expr[1:]
    if _uses_dot(condition):
        return None
    for kept, other, order in ((first, second, (0, 1)), (second, first, (1, 0))):
        number, linear = _constant(other), linear_in_dot(kept)
        if number is not None and number <= -_ABSORBING and linear is not None:
            branches = (linear[1] or ("const", 0.0), ("const", number))
            return linear[0], ("where", condition, branches[order[0]], branches[order[1]])
    left, right = linear_in_dot(first), linear_in_dot(second)
    if left is None or right is None or left[0] != right[0]:
        return None
    zero = ("const", 0.0)
    return left[0], ("where", condition, left[1] or zero, right[1] or zero)


def make_score(
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    alibi: int | None = None,
    depth: int | None = None,
) -> Score:
    """Return the score of the keyword interface in canonical form.

    ``cap(scale * dot) - slope_h * (depth_q - depth_k)``, ``cap(x) = softcap * tanh(x / softcap)``, visible
    iff ``depth_q - depth_k < window`` (besides the tree condition).

    Args:
        scale: factor of q.k.
        window: number of visible keys along the path, the query's own included; ``None`` for all.
        softcap: bound of the capped logit; ``None`` for none.
        alibi: index of the buffer of slopes ``[H]``; ``None`` for no ALiBi.
        depth: index of the buffer of depths ``[N]``; needed by ``window`` and ``alibi``.

    Raises:
        InputError: ``window`` or ``alibi`` without ``depth``.
    """
    if depth is None and (window is not None or alibi is not None):
        raise InputError("window and alibi must come with a depth buffer, got depth=None: pass its buffer index")
    value: Expr = ("mul", ("dot",), ("const", float(scale)))
    if softcap is not None:
        value = ("mul", ("tanh", ("div", value, ("const", float(softcap)))), ("const", float(softcap)))
    distance: Expr = ("sub", ("load", depth, ("q",)), ("load", depth, ("k",)))
    if alibi is not None:
        value = ("sub", value, ("mul", ("load", alibi, ("head",)), distance))
    return Score(value, None if window is None else ("lt", distance, ("const", int(window))))
