"""Rows and columns as symbols, so that one analysis and one compilation serve every batch.

The environment answers for a hint, a prime that is like no other size, and records what the answer depends on; the run
time checks that at every call. What had to know a size itself has recorded that it *is* the hint: such an analysis is
good for nothing else and is not used.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

import sympy
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, StatelessSymbolicContext
from torch.utils._sympy.value_ranges import bound_sympy

from treefx.passes.trace.token_count import TokenCount

__all__ = ["BatchSizes"]

_LEAST_HINT = 13
"""Sizes of models are often smaller primes."""
_TABLE = 1024
"""Constants are evaluated for at least so many columns, where a smaller batch sees a corner of the same."""


class BatchSizes(TokenCount):
    """The shape environment of an analysis that holds for many batches.

    Args:
        sizes: The sizes of a call by the symbols of its pattern.
        avoid: Sizes in the model, which no hint may be equal to.
    """

    def __init__(self, sizes: Mapping[sympy.Symbol, int], avoid: Collection[int]) -> None:
        super().__init__(math.prod(sizes.values()))
        taken = {*avoid, *sizes.values(), self.hint}
        self._hints: dict[sympy.Symbol, int] = {}
        self._made: dict[sympy.Symbol, Any] = {}
        mode = FakeTensorMode(shape_env=self)
        context: StatelessSymbolicContext[..., Any] = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DUCK])
        for symbol, size in sizes.items():
            self._hints[symbol] = hint = _prime(size, taken)
            taken.add(hint)
            fake: Any = mode.from_tensor(torch.empty(hint, device="meta"), symbolic_context=context)
            self._made[symbol] = fake.shape[0].node.expr

    def size(self, expr: Any) -> Any:
        """A size of a pattern as a ``torch.SymInt`` of this environment; numbers stay."""
        if not isinstance(expr, sympy.Expr):
            return expr
        hint = int(expr.xreplace(self._hints))
        return self.create_symintnode(expr.xreplace(self._made), hint=hint)

    def fake(self, shape: tuple[Any, ...], like: Tensor, mode: FakeTensorMode) -> Tensor:
        """A fake tensor of a shape of the pattern, contiguous, otherwise like a real one; ``mode`` has this."""
        with mode:
            return torch.empty(
                [self.size(size) for size in shape],
                dtype=like.dtype,
                device=like.device,
                requires_grad=like.requires_grad,
            )

    def values(self, sizes: Mapping[sympy.Symbol, int]) -> dict[Any, int]:
        """The sizes of a call by the symbols of this environment."""
        return {made: sizes[symbol] for symbol, made in self._made.items()}

    def table_columns(self, columns: Any, actual: int) -> int:
        """How many columns constants are to be evaluated for, so that what is proved holds for as many; recorded."""
        bound = bound_sympy(columns.node.expr, self.var_to_range).upper
        wanted = max(_TABLE, 1 << (actual - 1).bit_length())
        found = min(wanted, int(bound)) if bound.is_Integer else wanted
        assert columns <= found
        return found


def _prime(near: int, taken: Collection[int]) -> int:
    """A prime at or below a size, which tables of the model bound from above; above it where there is none left."""
    candidate = max(near, _LEAST_HINT) + 1
    while candidate > _LEAST_HINT:
        candidate = int(sympy.prevprime(candidate))
        if candidate not in taken:
            return candidate
    candidate = max(near, _LEAST_HINT)
    while candidate in taken or not sympy.isprime(candidate):
        candidate = int(sympy.nextprime(candidate))
    return candidate
