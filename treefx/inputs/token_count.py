"""The number of distinct tokens as a symbol, so that one compilation serves every number.

Compilers look at the size they compile for (the *hint*) and torch records what they saw as a guard. Three kinds:

* A question with an answer that is right for every size (``guard_or_false`` and its like: they get that answer where
  the size is unknown). When the hint gives the same answer, nothing depends on the size and nothing is recorded here,
  although torch would.
* A question of speed or rounding (``_ADVICE``). Any answer is right; that for the hint, the largest size expected, is
  taken and nothing is recorded.
* Everything else is a condition of the generated code: recorded, and checked at every call.

On a GPU the packed row is filled up to a multiple of 64 tokens (``PackedSize``), and compilers are told so: they leave
out masks and take wide loads where sizes divide.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import CodeType
from typing import Any

import sympy
import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import SYMPY_INTERP, DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.utils._sympy.printers import PythonPrinter

from treefx.kernels.memory import Bounded

__all__ = ["PackedSize", "SizeConditions", "TokenCount", "add_count_input", "common_multiple"]

_ADVICE = (
    # Sums of more than 4096 numbers go through a helper that rounds less; it also adds fewer numbers correctly.
    ("torch._inductor.codegen.cpp", "CppKernel", "need_use_acc_helper"),
    # Whether fusing sums over rows with sums over columns is expected to pay.
    ("torch._inductor.scheduler", "MixOrderReduction", "can_fuse"),
    # Which order of dimensions a layout looks like; no dimension is left out of it.
    ("torch._prims_common", "", "are_strides_like_channels_last_or_false"),
)
_NAMES: dict[str, Any] = {**SYMPY_INTERP}
"""Names available to the code of a condition, apart from sizes."""
_DEPTH = 8
"""How many callers up a question of ``_ADVICE`` is looked for; they ask through two or three functions of inductor."""
_MULTIPLES = {"cuda": 64}
"""Type of device -> divisor of the length of packed rows; a power of two."""
_SIZES_PER_OCTAVE = 8
"""Lengths between a power of two and the next in ``PackedSize(few=True)``: filler adds at most an eighth."""
_REMEMBERED = 64
"""Cached calls by whether their sizes meet the conditions: SymPy evaluates slowly."""


def common_multiple(inputs: Sequence[Any]) -> int:
    """Return the divisor of all packed rows of a graph; rows of a plan's parts have none."""
    devices = {x.device.type for x in inputs if isinstance(x, Tensor) and x.dim()}
    return min((_MULTIPLES.get(device, 1) for device in devices), default=1)


@dataclass(frozen=True)
class PackedSize:
    """The length of a packed row.

    Attributes:
        few: Whether to use few lengths on a GPU, because inductor records separate CUDA graphs for each.
        ranks: A further divisor of the length.
    """

    few: bool = False
    ranks: int = 1

    def __call__(self, tokens: int, device: torch.device) -> int:
        """Round a number of distinct tokens, at least one, up to a length."""
        step = _MULTIPLES.get(device.type, 1)
        if self.few and step > 1:
            step = max(step, (1 << (tokens.bit_length() - 1)) // _SIZES_PER_OCTAVE)
        return tokens + -tokens % math.lcm(step, self.ranks)


class SizeConditions(ShapeEnv):
    """Provide a compilation's shape environment that records conditions alone."""

    def __init__(self) -> None:
        super().__init__()
        self._admitted: Bounded[tuple[Any, ...], bool] = Bounded(_REMEMBERED)
        self._promised: set[Any] = set()
        """Conditions that hold without a check."""
        self._conditions: dict[Any, _Condition] = {}

    def holds(self, values: Mapping[Any, int]) -> bool:
        """Return whether all recorded conditions on these symbols alone hold for values."""
        key = (tuple(values.items()), len(self.guards))
        found = self._admitted.get(key)
        if found is None:
            numbers = {symbol.name: value for symbol, value in values.items()}
            asked = (self._condition(guard.expr) for guard in self.guards if guard.expr not in self._promised)
            known = [condition for condition in asked if condition.names <= numbers.keys()]
            found = self._admitted[key] = all(condition.holds(numbers) for condition in known)
        return found

    def _condition(self, expr: Any) -> _Condition:
        found = self._conditions.get(expr)
        if found is None:
            found = self._conditions[expr] = _Condition(expr)
        return found

    def evaluate_expr(
        self,
        orig_expr: sympy.Basic,
        hint: int | bool | float | None = None,
        fx_node: fx.Node | None = None,
        size_oblivious: bool = False,
        fallback_value: bool | None = None,
        *,
        forcing_spec: bool = False,
    ) -> sympy.Basic:
        """Answer a question on sizes for the hint; record only conditions of the code."""
        ask = functools.partial(
            super().evaluate_expr, orig_expr, hint, fx_node, size_oblivious, fallback_value, forcing_spec=forcing_spec
        )
        if fallback_value is None and not _is_asked_by(_helper_code()):
            return ask()
        with self.suppress_guards():
            answer = ask()
        advice = fallback_value is None or bool(answer) == fallback_value or _is_asked_by(_advice_code())
        return answer if advice else ask()


class _Condition:
    """Hold a condition on sizes as Python code, which is much faster than SymPy.

    Attributes:
        names: Of the symbols that it speaks of.
    """

    def __init__(self, expr: Any) -> None:
        self._expr, self._symbols = expr, {symbol.name: symbol for symbol in expr.free_symbols}
        self.names = self._symbols.keys()
        self._code: CodeType | None = None
        try:
            self._code = compile(PythonPrinter().doprint(expr), "<condition on sizes>", "eval")
        except (SyntaxError, NotImplementedError, TypeError, ValueError):
            pass  # PyTorch has no Python for one of its functions

    def holds(self, values: Mapping[str, int]) -> bool:
        """Whether it holds for values of its symbols, and perhaps of others."""
        if self._code is not None:
            try:
                return bool(eval(self._code, _NAMES, dict(values)))
            except NameError:
                self._code = None
        return bool(self._expr.xreplace({symbol: values[name] for name, symbol in self._symbols.items()}))


class TokenCount(SizeConditions):
    """Provide a compilation's shape environment with N, the number of distinct tokens.

    Args:
        largest: The largest N expected. The hint is the next prime, a size like no other dimension: being equal to
            one, or a multiple of a block size, would be taken for a property of N.
        multiple: A power of two that divides the hint and every N. Compilers rely on it.
    """

    def __init__(self, largest: int, multiple: int = 1) -> None:
        super().__init__()
        self.multiple = multiple
        self.hint = multiple * int(sympy.nextprime(max(2, -(-largest // multiple))))
        self.count: Any = None
        """N, a ``torch.SymInt``; there once ``vectors`` was called."""
        self._symbols: list[Any] = []
        self._of_guards: set[Any] = set()
        """The symbols of the conditions up to ``_read``."""
        self._read = 0

    def vectors(self, dtypes: Sequence[torch.dtype], device: torch.device, mode: FakeTensorMode) -> list[Tensor]:
        """Fake vectors [N], one per dtype; ``mode`` has this environment."""
        fakes = self._vectors(self.hint, dtypes, device, mode)
        self.count = fakes[0].shape[0]
        self._promise()
        return fakes

    def _promise(self) -> None:
        """Record the divisors of N: each power of two, as inductor derives none."""
        before = len(self.guards)
        for power in range(1, self.multiple.bit_length()):
            torch._check(self.count % (1 << power) == 0)  # type: ignore[no-untyped-call]
            # inductor of PyTorch 2.11 uses sympy's own remainder, which no guard mentions
            self.axioms[sympy.Mod(self.count.node.expr, 1 << power)] = sympy.S.Zero
        self._promised.update(guard.expr for guard in self.guards[before:])

    def further(self, dtypes: Sequence[torch.dtype], device: torch.device, mode: FakeTensorMode) -> list[Tensor]:
        """Return fake vectors of a further size with a new symbol; call it after ``vectors``."""
        hint = self.hint
        for _ in self._symbols:
            hint = int(sympy.nextprime(hint))
        return self._vectors(hint, dtypes, device, mode)

    def _vectors(
        self, hint: int, dtypes: Sequence[torch.dtype], device: torch.device, mode: FakeTensorMode
    ) -> list[Tensor]:
        assert mode.shape_env is self
        context: StatelessSymbolicContext[..., Any] = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DUCK])
        real = [torch.zeros(hint, dtype=dtype, device=device) for dtype in dtypes]
        fakes: list[Tensor] = [mode.from_tensor(vector, symbolic_context=context) for vector in real]
        symbol = fakes[0].shape[0].node.expr  # type: ignore[attr-defined]
        self._symbols += [] if symbol in self._symbols else [symbol]
        return fakes

    def admits(self, tokens: int, *further: int, given: Mapping[Any, int] | None = None) -> bool:
        """Return whether all recorded conditions hold for these tokens and further sizes.

        No other code checks it. ``given`` are the values of other symbols. A graph may have the first sizes alone.
        """
        if tokens % self.multiple:
            return False
        sizes = (tokens, *further)[: len(self._symbols)]
        values = {**dict(zip(self._symbols, sizes, strict=True)), **(given or {})}
        return self._asked() <= values.keys() and self.holds(values)

    def _asked(self) -> set[Any]:
        """The symbols of all conditions; there may be more of them than at the last question."""
        count = len(self.guards)
        for guard in self.guards[self._read : count]:
            self._of_guards |= guard.expr.free_symbols
        self._read = count
        return self._of_guards


def add_count_input(gm: fx.GraphModule, count: Any, name: str = "tokens") -> None:
    """Append N, or another size, to the inputs of a graph.

    Caches of compiled code keep conditions on inputs that are numbers only: those on sizes of tensors are forgotten,
    and code that needs 2 * N < 32767 comes back for every N.
    """
    last = gm.graph.find_nodes(op="placeholder")[-1]
    with gm.graph.inserting_after(last):
        gm.graph.placeholder(name).meta["val"] = count
    gm.recompile()


def _is_asked_by(wanted: frozenset[CodeType]) -> bool:
    """Return whether one of these functions is on the stack of the question."""
    frame = sys._getframe(2)
    for _ in range(_DEPTH):
        if frame.f_code in wanted:
            return True
        if frame.f_back is None:
            return False
        frame = frame.f_back
    return False


@functools.cache
def _helper_code() -> frozenset[CodeType]:
    """Return the helper's code, which PyTorch 2.11 calls by asserting the hint's answer."""
    return frozenset(_code_of(*_ADVICE[0]))


@functools.cache
def _advice_code() -> frozenset[CodeType]:
    return frozenset(itertools.chain.from_iterable(_code_of(*place) for place in _ADVICE))


def _code_of(module: str, owner: str, function: str) -> Iterator[CodeType]:
    """Yield the code of a function or method; nothing where this torch has none."""
    place: Any = importlib.import_module(module)
    found = getattr(getattr(place, owner, None) if owner else place, function, None)
    code = getattr(found, "__code__", None)
    if isinstance(code, CodeType):
        yield code
