"""Name sizes of inputs by symbols: rows, columns, and their values in a call.

Dynamo has a symbol for every size that may change; two of them are the rows B and the columns T of the batch, and most
others are these again, or one more or less. A *pattern* names the sizes of all inputs in B and T, so that calls of one
pattern share an analysis. Before, two calls of Dynamo's graph::

    ids [4, 16], mask [4, 16], labels [4, 15]        ids [9, 31], mask [9, 31], labels [9, 30]

After, one pattern::

    ids [B, T], mask [B, T], labels [B, T - 1]       with B, T = 4, 16 and B, T = 9, 31

An analysis has these symbols in its shape environment (``BatchSizes``), so that one analysis and one compilation serve
every batch. The environment answers for a hint, a prime that is like no other size, and records the guards of the
answer; the run time checks them at every call. Code that specialises on a size has recorded that it *is* the hint: such
an analysis holds for no other size and is not used.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import sympy
import torch
from torch import SymInt, Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, StatelessSymbolicContext
from torch.utils._sympy.value_ranges import bound_sympy

from treefx.inputs.fakes import fake_inputs, strided_fake
from treefx.inputs.token_count import TokenCount, common_multiple

__all__ = [
    "COLUMNS",
    "ROWS",
    "SEGMENTS",
    "BatchSizes",
    "Pattern",
    "SizedInputs",
    "Specialised",
    "autograd_key",
    "concrete",
    "has_symbols",
    "name_size",
    "pattern_of",
    "sizes_of_call",
    "tensor_key",
]

ROWS, COLUMNS = sympy.symbols("rows columns", integer=True, positive=True)
SEGMENTS = sympy.Symbol("segments", integer=True, positive=True)
"""The size of an input that says where the segments of a row end, for flash attention alone."""
_LESS, _MORE, _GRID, _SHIFTED = COLUMNS - 1, COLUMNS + 1, ROWS * COLUMNS, ROWS * (COLUMNS - 1)


class Pattern(NamedTuple):
    """The sizes of all inputs of a graph in ``ROWS`` and ``COLUMNS`` (and ``SEGMENTS``).

    ``inputs`` holds, per placeholder, the shape of a tensor as expressions and numbers, or one for a number. A number
    of the caller has a separate symbol: a vector of which only the size is read, or a size of other inputs that the
    graph computes with (how many labels there are, which the caller gives too).
    """

    inputs: tuple[Any, ...]

    def symbols(self) -> list[sympy.Symbol]:
        """Those that occur."""
        found = {symbol for item in _leaves(self.inputs) for symbol in getattr(item, "free_symbols", ())}
        return [*[symbol for symbol in (ROWS, COLUMNS, SEGMENTS) if symbol in found], *self.numbers()]

    def numbers(self) -> list[sympy.Symbol]:
        """Those of the caller's numbers."""
        found = dict.fromkeys(item for item in _leaves(self.inputs) if isinstance(item, sympy.Symbol))
        return [symbol for symbol in found if symbol not in (ROWS, COLUMNS, SEGMENTS)]


@functools.cache
def _number_symbol(position: int) -> sympy.Symbol:
    return sympy.Symbol(f"number_{position}", integer=True, positive=True)


def _leaves(inputs: Sequence[Any]) -> list[Any]:
    return [size for item in inputs for size in (item if isinstance(item, tuple) else (item,))]


def pattern_of(known: SizedInputs, roles: Sequence[str], args: Sequence[Any]) -> Pattern | None:
    """Return the pattern of a call of Dynamo's graph; None without symbolic batch sizes.

    Args:
        known: What the graph says of its inputs; a size that is a number in it stays one.
        roles: Role of each placeholder: rows and columns are those of the first integer "input" [B, T].
        args: One value per placeholder.
    """
    for ids, role in zip(args, roles, strict=True):
        if role == "input" and _may_be_ids(ids):
            break
    else:
        return None
    rows, columns = ids.shape
    names: dict[Any, Any] = {}
    numbers = _numbers_of_caller(known, args) if known.sizes or known.numbers else {}
    inputs: list[Any] = list(args)
    for i in known.tensors:
        if isinstance(args[i], Tensor):
            inputs[i] = tuple(args[i].shape)
    for i in known.numbers:
        inputs[i] = (_number_symbol(i),)
    for i, traced in known.moving.items():
        sizes, named = list[Any](), False
        for d, (size, symbol) in enumerate(zip(args[i].shape, traced, strict=True)):
            name = size
            if isinstance(symbol, SymInt):
                name = names[symbol.node.expr] = (
                    SEGMENTS if i in known.ends else name_size(size, d, rows, columns, numbers)
                )
            sizes.append(name)
            named = named or isinstance(name, sympy.Expr)
        if named and args[i].requires_grad and not args[i].is_contiguous():
            return None
        inputs[i] = tuple(sizes)
    for i, expr in known.sizes.items():
        inputs[i] = names.get(expr, inputs[i]) if expr is not None else 0  # an unread one may be a stride
    return Pattern(tuple(inputs)) if _has_symbols(inputs) else None


def _has_symbols(inputs: Sequence[Any]) -> bool:
    for item in inputs:
        for size in item if isinstance(item, tuple) else (item,):
            if getattr(size, "free_symbols", None):
                return True
    return False


def _numbers_of_caller(known: SizedInputs, args: Sequence[Any]) -> dict[int, sympy.Symbol]:
    """Return symbols of numbers the graph computes with, by value; other inputs share them."""
    found = dict[int, sympy.Symbol]()
    for i, expr in known.sizes.items():
        if expr is not None:
            found[args[i]] = _number_symbol(i)
    for i in known.numbers:
        found[args[i].shape[0]] = _number_symbol(i)
    return found


@dataclass(frozen=True)
class SizedInputs:
    """Hold what a graph says of the sizes of its inputs, by position.

    Attributes:
        tensors: Those that are tensors.
        moving: The shapes of those with a symbol among their sizes, but for ``numbers``.
        ends: Those that say where segments end.
        numbers: Those that only their size is asked of.
        sizes: The expressions of those that are numbers with symbols; None if unused.
    """

    tensors: frozenset[int]
    moving: dict[int, tuple[Any, ...]]
    ends: frozenset[int]
    numbers: frozenset[int]
    sizes: dict[int, Any]


def _may_be_ids(x: Any) -> bool:
    return isinstance(x, Tensor) and x.dim() == 2 and x.dtype in (torch.int64, torch.int32)


def name_size(
    size: int, dim: int, rows: int, columns: int, numbers: Mapping[int, sympy.Symbol] = MappingProxyType({})
) -> Any:
    """Write a size in rows and columns, else as a caller's number, else unchanged.

    Where several names fit, the first dimension counts rows and the others columns.
    """
    names = [(rows, ROWS), (columns, COLUMNS)] if dim == 0 else [(columns, COLUMNS), (rows, ROWS)]
    names += [(columns - 1, _LESS), (columns + 1, _MORE), (rows * columns, _GRID), (rows * (columns - 1), _SHIFTED)]
    for value, name in (*names, *numbers.items()):
        if value == size and size > 1:
            return name
    return size


_LEAST_HINT = 13
"""Sizes of models are often smaller primes."""
_TABLE = 1024
"""Constants are evaluated for at least so many columns, where a smaller batch sees a corner of the same."""
Values = Mapping[Any, int]
"""Values of an environment's symbols in a call."""


class Specialised(Exception):
    """A size has to be known; the message says which question asked for it.

    ``sizes`` are those of the analysis where its conditions do not hold for the call, as they may for another one.
    """

    def __init__(self, question: str, sizes: BatchSizes | None = None) -> None:
        super().__init__(question)
        self.sizes = sizes


class BatchSizes(TokenCount):
    """The shape environment of an analysis that holds for all batches of a pattern.

    Args:
        pattern: Names the sizes of the inputs.
        inputs: The values of a call, one per placeholder.
    """

    def __init__(self, pattern: Pattern, inputs: Sequence[Any]) -> None:
        shapes = [item for item in pattern.inputs if isinstance(item, tuple)]
        self._where = {
            symbol: next((i, shape.index(symbol)) for i, shape in enumerate(shapes) if symbol in shape)
            for symbol in pattern.symbols()
        }
        self._pattern = pattern
        sizes = self._sizes(_tensors(inputs))
        numbers = pattern.numbers()
        largest = math.prod(size for symbol, size in sizes.items() if symbol not in numbers)
        super().__init__(largest, common_multiple(inputs))
        self.mode = FakeTensorMode(shape_env=self, allow_non_fake_inputs=True)
        taken = {*sizes.values(), self.hint, *(size for x in _tensors(inputs) for size in x.shape)}
        self._hints = {symbol: _prime(size, taken) for symbol, size in sizes.items() if symbol not in numbers}
        for symbol in numbers:
            self._hints[symbol] = _number(sizes[symbol], self._hints.get(COLUMNS, 0), sizes.get(COLUMNS, 0), taken)
        self._made = {symbol: self._symbol(hint) for symbol, hint in self._hints.items()}
        self._places = [(self._made[symbol], i, d) for symbol, (i, d) in self._where.items()]
        self.inputs: list[Tensor] = []
        """The fake inputs that are tensors, in the order made."""
        self._symbolic: list[bool] = []
        """Whether each of them has symbols among its sizes."""

    def _symbol(self, hint: int) -> Any:
        context: StatelessSymbolicContext[..., Any] = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DUCK])
        fake: Any = self.mode.from_tensor(torch.empty(hint, device="meta"), symbolic_context=context)
        return fake.shape[0].node.expr

    def _sizes(self, tensors: Sequence[Tensor]) -> dict[sympy.Symbol, int]:
        return {symbol: tensors[i].shape[d] for symbol, (i, d) in self._where.items()}

    def values(self, tensors: Sequence[Tensor]) -> dict[Any, int]:
        """Return the values of the symbols in a call; ``tensors`` are those among its inputs."""
        return {made: tensors[i].shape[d] for made, i, d in self._places}

    def holds_for(self, values: Mapping[Any, int], sizes: Mapping[sympy.Symbol, int]) -> bool:
        """Return whether it holds for other sizes of the pattern than those in the values of a call."""
        if any(size != 1 for of, size in sizes.items() if of not in self._made):  # a size of 1 is no symbol
            return False
        return self.holds({**values, **{self._made[of]: size for of, size in sizes.items() if of in self._made}})

    def symbol(self, of: sympy.Symbol) -> Any:
        """The symbol that stands for one of the pattern in ``values``."""
        return self._made[of]

    def symbols(self) -> list[SymInt]:
        """The sizes that are symbols, in the order of ``values``."""
        return [self.size(symbol) for symbol in self._made]

    def size(self, expr: Any) -> Any:
        """A size of a pattern as a ``torch.SymInt``; numbers stay."""
        if not isinstance(expr, sympy.Expr):
            return expr
        hint = int(expr.xreplace(self._hints))
        return self.create_symintnode(expr.xreplace(self._made), hint=hint)

    def fakes(self, inputs: Sequence[Any]) -> list[Any]:
        """Fake inputs of the sizes of the pattern, contiguous, otherwise like those of a call."""
        made = [self._fake(x, named) for x, named in zip(inputs, self._pattern.inputs, strict=True)]
        self.inputs += _tensors(made)
        return made

    def _fake(self, x: Any, named: Any) -> Any:
        if not isinstance(x, Tensor):
            return self.size(named)
        if not any(isinstance(size, sympy.Expr) for size in named):
            return fake_inputs([x], self.mode)[0]
        return self.like(x, named)

    def like(self, x: Tensor, shape: Sequence[Any]) -> Tensor:
        """A fake tensor of a shape of the pattern."""
        return strided_fake(x, [self.size(size) for size in shape], None, 0, self.mode)

    def fake_beside(self, x: Tensor, inputs: Sequence[Tensor]) -> Tensor:
        """Return a fake input for a value made outside of the graph, with the call's sizes."""
        sizes = self._sizes(inputs)
        rows, columns = sizes.get(ROWS, 0), sizes.get(COLUMNS, 0)
        self.inputs.append(self.like(x, [name_size(size, d, rows, columns) for d, size in enumerate(x.shape)]))
        return self.inputs[-1]

    def check(self, inputs: Sequence[Any]) -> None:
        """Raise ``Specialised`` if a guard fails for the call that the hints stand for."""
        values = self.values(_tensors(inputs))
        for guard in self.guards:
            if guard.expr.free_symbols <= values.keys() and not bool(guard.expr.xreplace(values)):
                raise Specialised(str(guard.expr), self)

    def keys(self, tensors: Sequence[Tensor]) -> list[tuple[Any, ...]]:
        """Return properties of inputs that compiled code depends on, with batch sizes by name."""
        pairs = zip(tensors, self.inputs, strict=False)  # there may be more: values made outside of the graph
        return [
            (type(x), str(fake.shape), x.dtype, x.device, *autograd_key(x)) if has_symbols(fake) else tensor_key(x)
            for x, fake in pairs
        ]

    def laid_out(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return a call's tensors in compiled code's layout: contiguous with batch sizes."""
        if len(self._symbolic) != len(self.inputs):  # one was made since
            self._symbolic = [has_symbols(fake) for fake in self.inputs]
        pairs = zip(tensors, self._symbolic, strict=True)
        return [x.contiguous() if symbolic else x for x, symbolic in pairs]

    def table_columns(self, columns: SymInt, tensors: Sequence[Tensor]) -> int:
        """Return and record the number of columns for which constants are evaluated."""
        actual = int(columns.node.expr.xreplace(self.values(tensors)))
        bound = bound_sympy(columns.node.expr, self.var_to_range).upper
        wanted = max(_TABLE, 1 << (actual - 1).bit_length())
        found = min(wanted, int(bound)) if bound.is_Integer else wanted
        assert columns <= found
        return found


def sizes_of_call(batch: BatchSizes | None, tensors: Sequence[Any]) -> tuple[dict[Any, int], Sequence[Any]]:
    """Return the values of symbols in a call, and its tensors as compiled code takes them.

    Args:
        batch: The environment of the analysis; None where sizes are numbers.
        tensors: The tensors of the call.
    """
    return ({}, tensors) if batch is None else (batch.values(tensors), batch.laid_out(tensors))


def concrete(value: Any, values: Values) -> Any:
    """Arguments of an operator with the numbers of a call in place of symbols."""
    if not values:
        return value
    if isinstance(value, SymInt):
        expr = value.node.expr
        known = values.get(expr)
        return int(expr.xreplace(values)) if known is None else known
    if isinstance(value, tuple | list):
        return type(value)([concrete(x, values) if isinstance(x, _HOLD_SIZES) else x for x in value])
    if isinstance(value, dict):
        return {key: concrete(x, values) if isinstance(x, _HOLD_SIZES) else x for key, x in value.items()}
    return value


_HOLD_SIZES = (SymInt, tuple, list, dict)


def has_symbols(x: Tensor) -> bool:
    """Whether a size of a fake tensor is a symbol."""
    return any(isinstance(size, SymInt) for size in x.shape)


def _tensors(inputs: Sequence[Any]) -> list[Tensor]:
    return [x for x in inputs if isinstance(x, Tensor)]


def _prime(near: int, taken: set[int]) -> int:
    """Return a prime at or below a size, bounded by tables of the model; else above it."""
    start = max(near, _LEAST_HINT)
    candidates = itertools.chain(range(start, _LEAST_HINT - 1, -1), itertools.count(start + 1))
    found = next(n for n in candidates if n not in taken and sympy.isprime(n))
    taken.add(found)
    return found


def _number(size: int, hint: int, columns: int, taken: set[int]) -> int:
    """Return a prime for a caller's number, on the same side of the columns' hint."""
    inside = [n for n in range(hint - 1, 2, -1) if size <= columns and n not in taken and sympy.isprime(n)]
    found = inside[0] if inside else _prime(max(size, hint + 1), taken)
    taken.add(found)
    return found


def tensor_key(x: Tensor) -> tuple[Any, ...]:
    """Return properties of a tensor that compiled code depends on."""
    return (type(x), tuple(x.shape), x.stride(), x.dtype, x.device, *autograd_key(x))


def autograd_key(x: Tensor) -> tuple[bool, ...]:
    """Return properties of an input that AOTAutograd depends on, besides type and sizes.

    A change in place passes gradients to an input that is no leaf, and none to a leaf. The caches of inductor on disk
    do not look at that.
    """
    return (x.requires_grad, x.is_leaf, x.is_conj(), x.is_neg())
