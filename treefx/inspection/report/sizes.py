"""Substitute sizes of a call for symbols of a graph, without guards on them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._dtype_abbrs import dtype_abbrs

__all__ = ["Sizes", "values_in"]


@dataclass(frozen=True)
class Sizes:
    """Numbers by symbol; a symbol without one has that of its trace."""

    numbers: Mapping[Any, int] = field(default_factory=dict)

    def number(self, size: Any) -> int:
        """A size as a number."""
        if not isinstance(size, torch.SymInt):
            return int(size)
        expression = size.node.expr
        known = {symbol: n for symbol, n in self.numbers.items() if symbol in expression.free_symbols}
        value = expression.subs(known)
        return int(value) if value.is_number else int(size.node.hint or 0)

    def shape(self, value: Any) -> list[int]:
        """The shape of a tensor, or of the value of a node."""
        tensor = value.meta["val"] if isinstance(value, fx.Node) else value
        return [self.number(size) for size in tensor.shape]

    def bytes(self, value: Any) -> int:
        """Bytes of all tensors in a (nested) value."""
        return sum(math.prod(self.shape(x)) * x.dtype.itemsize for x in values_in(value))

    def text(self, value: Any) -> str:
        """``f32[4, 12, 64]``, or several of them."""
        if isinstance(value, list | tuple):
            return f"({', '.join(filter(None, map(self.text, value)))})"
        if isinstance(value, Tensor):
            return f"{dtype_abbrs.get(value.dtype, str(value.dtype))}[{', '.join(map(str, self.shape(value)))}]"
        return ""

    def example(self, value: Any) -> Any:
        """A value as tensors without memory, for formulas that read shapes."""
        if isinstance(value, Tensor):
            return torch.empty(self.shape(value), dtype=value.dtype, device="meta")
        if isinstance(value, list | tuple):
            return type(value)(map(self.example, value))
        return self.number(value) if isinstance(value, torch.SymInt) else value


def values_in(value: Any) -> Iterator[Tensor]:
    """Every tensor in a (nested) value."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from values_in(item)
