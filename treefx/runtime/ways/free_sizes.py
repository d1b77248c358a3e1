"""Provide Dynamo's symbolic sizes to a compilation of its unchanged graph.

Dynamo's own environment is closed once its frame is compiled. This one has the same symbols with the values of a call
as hints, and records the inner compiler's guards on them: code compiled with it accepts the calls for which they hold.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import sympy
import torch
from torch import SymBool, SymFloat, SymInt, Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, StatelessSymbolicContext
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from treefx.inputs.fakes import fake_inputs, strided_fake
from treefx.inputs.token_count import SizeConditions

__all__ = ["FreeSizes", "Sizes", "Symbols", "share_memory"]

_SYMBOLIC = (SymInt, SymFloat, SymBool)
Sizes = Mapping[sympy.Symbol, int]
"""Values of Dynamo's symbols in a call."""


class Symbols:
    """Dynamo's symbols: inputs that are numbers, and sizes, strides and offsets of the others.

    Args:
        gm: Dynamo's graph.

    Attributes:
        are_known: Whether numbers among the inputs determine all of them. Those of subclasses of tensors, and of
            sizes that depend on values, are Dynamo's own; of a size that is no number among the inputs, caches of
            compiled code forget the conditions.
    """

    def __init__(self, gm: fx.GraphModule) -> None:
        examples = [node.meta.get("example_value") for node in gm.graph.find_nodes(op="placeholder")]
        found = [(number, (i, j)) for i, x in enumerate(examples) for j, number in enumerate(_numbers(x))]
        symbolic: list[Any] = [(number, place) for number, place in found if isinstance(number, _SYMBOLIC)]
        self._where: dict[sympy.Symbol, tuple[int, int]] = {}
        for number, place in symbolic:
            if isinstance(number.node.expr, sympy.Symbol):
                self._where.setdefault(number.node.expr, place)
        self._constant = [i for i, x in enumerate(examples) if not isinstance(x, (Tensor, *_SYMBOLIC))]
        given = {x.node.expr for x in examples if isinstance(x, SymInt)}
        of_sizes = all(isinstance(number, SymInt) and number.node.expr.free_symbols <= given for number, _ in symbolic)
        self.are_known = of_sizes and all(map(_is_plain, examples))

    def values(self, args: Sequence[Any]) -> Sizes:
        """Return their values in a call; ``args`` has one value per placeholder."""
        return {symbol: int(_numbers(args[i])[j]) for symbol, (i, j) in self._where.items()}

    def fixed(self, args: Sequence[Any]) -> list[Any]:
        """Return constants that compiled code assumes of a call, besides Dynamo's own guards."""
        if self._where:
            return [args[i] for i in self._constant]
        return [tuple(x.shape) if isinstance(x, Tensor) else x for x in args]


def share_memory(args: Sequence[Any]) -> bool:
    """Return whether inputs other than parameters share memory, so that writes alias."""
    tensors = [x for x in args if _is_strided(x) and not isinstance(x, torch.nn.Parameter)]
    places = [place for place in (_place(x.untyped_storage()) for x in tensors) if place]
    return len(set(places)) < len(places)


def _place(storage: torch.UntypedStorage) -> int:
    """Return the address of memory; memory without contents has none.

    That is memory of fake tensors, or on the meta device.
    """
    return storage._cdata if storage.device.type == "meta" else storage.data_ptr()


def _is_plain(x: Any) -> bool:
    """Whether strides and offset are all there is to an input with a symbol among its sizes."""
    symbolic = isinstance(x, Tensor) and any(isinstance(size, _SYMBOLIC) for size in x.shape)
    return not symbolic or (_is_strided(x) and not is_traceable_wrapper_subclass(x))


def _numbers(x: Any) -> list[Any]:
    return [*x.shape, *x.stride(), x.storage_offset()] if _is_strided(x) else [x]


def _is_strided(x: Any) -> bool:
    return isinstance(x, Tensor) and x.layout is torch.strided


class FreeSizes(SizeConditions):
    """The shape environment of an ordinary compilation.

    Args:
        values: Of Dynamo's symbols in the call that compiles, each at least 2.
    """

    def __init__(self, values: Sizes) -> None:
        super().__init__()
        self.mode = FakeTensorMode(shape_env=self)
        self._hints = dict(values)
        self._made = {symbol: self._symbol(hint) for symbol, hint in values.items()}

    def _symbol(self, hint: int) -> Any:
        context: StatelessSymbolicContext[..., Any] = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC])
        fake: Any = self.mode.from_tensor(torch.empty(hint, device="meta"), symbolic_context=context)
        return fake.shape[0].node.expr

    def serves(self, values: Sizes) -> bool:
        """Return whether the recorded guards hold for a call."""
        return self.holds({self._made[symbol]: size for symbol, size in values.items()})

    def fakes(self, gm: fx.GraphModule, args: Sequence[Any]) -> list[Any]:
        """Fake inputs like those of a call, with symbols where Dynamo has them."""
        examples = [node.meta.get("example_value") for node in gm.graph.find_nodes(op="placeholder")]
        return [self._fake(example, x) for example, x in zip(examples, args, strict=True)]

    def _fake(self, example: Any, x: Any) -> Any:
        if not isinstance(x, Tensor):
            return self._number(example, x)
        found = [isinstance(item, SymInt) for item in _numbers(example)]
        if not any(found):
            return fake_inputs([x], self.mode)[0]
        pairs = zip(_numbers(example), _numbers(x), strict=True)
        *numbers, offset = [self._number(traced, number) for traced, number in pairs]
        return strided_fake(x, numbers[: x.dim()], numbers[x.dim() :], offset, self.mode)

    def _number(self, traced: Any, size: Any) -> Any:
        """A number of a call, as the expression in symbols that Dynamo has for it."""
        expr = traced.node.expr if isinstance(traced, SymInt) else None
        if expr is None or not expr.free_symbols <= self._made.keys():
            return size
        return self.create_symintnode(expr.xreplace(self._made), hint=int(expr.xreplace(self._hints)))
