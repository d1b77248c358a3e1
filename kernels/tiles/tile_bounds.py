"""Decide a score's condition for whole tiles, by interval arithmetic over blocks.

Every part of the condition becomes a lower and an upper bound per tile. Values of one token (its index, or a vector
indexed by it: a depth, a document number) are bounded by the block's extrema; other values are unbounded, which decides
nothing and stays correct.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from treefx.kernels.score import Expr

__all__ = ["Extrema", "decide_tiles"]

Bounds = tuple[Tensor, Tensor]
_COMPARISONS = ("lt", "le", "gt", "ge", "eq", "ne")


@dataclass(frozen=True)
class Extrema:
    """Smallest and largest values over blocks of tokens.

    Attributes:
        leaf: ``"q"`` or ``"k"``.
        index: index of each token in the score's expressions, int64 ``[T]``.
        block: tokens per block.
        buffers: tensors that expressions load.
    """

    leaf: str
    index: Tensor
    block: int
    buffers: Sequence[Tensor]
    _known: dict[int | None, Bounds] = field(default_factory=dict, repr=False)

    def of(self, buffer: int | None) -> Bounds:
        """Return the bounds per block of a vector's elements, or of the index itself (None)."""
        if buffer not in self._known:
            values = self.index if buffer is None else self.buffers[buffer][self.index]
            blocks = -(-len(values) // self.block)
            padding = blocks * self.block - len(values)
            # The last value again: it changes no extremum.
            wide = torch.cat([values, values[-1:].expand(padding)]).to(torch.float64).view(blocks, self.block)
            self._known[buffer] = wide.amin(1), wide.amax(1)
        return self._known[buffer]


def decide_tiles(
    condition: Expr, queries: Extrema, keys: Extrema, query_tile: Tensor, key_tile: Tensor
) -> tuple[Tensor, Tensor]:
    """Decide a condition on tiles.

    Args:
        condition: a boolean expression free of ``dot``.
        queries: extrema of the query blocks.
        keys: extrema of the key blocks.
        query_tile: query block of each tile, int64 ``[T]``.
        key_tile: key block of each tile, int64 ``[T]``.

    Returns:
        Where it holds for no pair of the tile, and where for all of them, bool ``[T]`` each. Both may be False.
    """
    low, high = _Bounder(queries, keys, query_tile, key_tile).visit(condition)
    # NaN bounds (infinity minus itself) compare False and decide nothing.
    return (low == 0) & (high == 0), (low > 0) | (high < 0)


@dataclass(frozen=True)
class _Bounder:
    queries: Extrema
    keys: Extrema
    query_tile: Tensor
    key_tile: Tensor

    def visit(self, expr: Expr) -> Bounds:
        op, *arguments = expr
        if op == "const":
            return self._filled(float(arguments[0]), float(arguments[0]))
        if op in ("q", "k"):
            return self._tokens(op, None)
        if op == "load":
            indexed_by_token = len(arguments) == 2 and arguments[1] in (("q",), ("k",))
            return self._tokens(arguments[1][0], arguments[0]) if indexed_by_token else self._unknown()
        if op in ("head", "batch", "dot"):
            return self._unknown()
        inner = [self.visit(argument) for argument in arguments]
        law = getattr(self, f"_{op}", None)
        if op in _COMPARISONS:
            return self._compared(op, *inner)
        if law is not None:
            result: Bounds = law(*inner)
            return result
        return self._unknown()

    def _tokens(self, leaf: str, buffer: int | None) -> Bounds:
        side, tiles = (self.queries, self.query_tile) if leaf == "q" else (self.keys, self.key_tile)
        low, high = side.of(buffer)
        return low[tiles], high[tiles]

    def _filled(self, low: float, high: float) -> Bounds:
        shape, device = self.query_tile.shape, self.query_tile.device
        return (
            torch.full(shape, low, dtype=torch.float64, device=device),
            torch.full(shape, high, dtype=torch.float64, device=device),
        )

    def _unknown(self) -> Bounds:
        return self._filled(-torch.inf, torch.inf)

    def _compared(self, op: str, a: Bounds, b: Bounds) -> Bounds:
        if op in ("gt", "ge"):
            return self._compared({"gt": "lt", "ge": "le"}[op], b, a)
        if op == "ne":
            return self._not(self._compared("eq", a, b))
        if op == "eq":
            possible = (a[0] <= b[1]) & (b[0] <= a[1])
            certain = (a[0] == a[1]) & (b[0] == b[1]) & (a[0] == b[0])
        elif op == "lt":
            possible, certain = a[0] < b[1], a[1] < b[0]
        else:
            possible, certain = a[0] <= b[1], a[1] <= b[0]
        return certain.to(torch.float64), possible.to(torch.float64)

    @staticmethod
    def _truth(a: Bounds) -> Bounds:
        """Bounds of a value taken as a boolean."""
        certain = (a[0] > 0) | (a[1] < 0)
        possible = ~((a[0] == 0) & (a[1] == 0))
        return certain.to(torch.float64), possible.to(torch.float64)

    def _not(self, a: Bounds) -> Bounds:
        low, high = self._truth(a)
        return 1 - high, 1 - low

    def _and(self, a: Bounds, b: Bounds) -> Bounds:
        first, second = self._truth(a), self._truth(b)
        return first[0] * second[0], first[1] * second[1]

    def _or(self, a: Bounds, b: Bounds) -> Bounds:
        return self._not(self._and(self._not(a), self._not(b)))

    def _where(self, condition: Bounds, a: Bounds, b: Bounds) -> Bounds:
        certain, possible = self._truth(condition)
        low, high = torch.minimum(a[0], b[0]), torch.maximum(a[1], b[1])
        low = torch.where(certain > 0, a[0], torch.where(possible > 0, low, b[0]))
        return low, torch.where(certain > 0, a[1], torch.where(possible > 0, high, b[1]))

    @staticmethod
    def _add(a: Bounds, b: Bounds) -> Bounds:
        return a[0] + b[0], a[1] + b[1]

    @staticmethod
    def _neg(a: Bounds) -> Bounds:
        return -a[1], -a[0]

    def _sub(self, a: Bounds, b: Bounds) -> Bounds:
        return self._add(a, self._neg(b))

    @staticmethod
    def _min(a: Bounds, b: Bounds) -> Bounds:
        return torch.minimum(a[0], b[0]), torch.minimum(a[1], b[1])

    @staticmethod
    def _max(a: Bounds, b: Bounds) -> Bounds:
        return torch.maximum(a[0], b[0]), torch.maximum(a[1], b[1])

    def _floordiv(self, a: Bounds, b: Bounds) -> Bounds:
        # Only by a positive constant: monotone.
        fixed = (b[0] == b[1]) & (b[0] > 0)
        low, high = self._unknown()
        return torch.where(fixed, (a[0] / b[0]).floor(), low), torch.where(fixed, (a[1] / b[0]).floor(), high)

    def _mod(self, a: Bounds, b: Bounds) -> Bounds:
        """Only by a positive constant; exact where the whole interval lies in one period."""
        fixed = (b[0] == b[1]) & (b[0] > 0)
        low, high = self._unknown()
        one_period = (a[0] / b[0]).floor() == (a[1] / b[0]).floor()
        low = torch.where(fixed, torch.where(one_period, torch.remainder(a[0], b[0]), 0.0), low)
        return low, torch.where(fixed, torch.where(one_period, torch.remainder(a[1], b[0]), b[0]), high)

    @staticmethod
    def _int(a: Bounds) -> Bounds:
        return a[0].trunc(), a[1].trunc()

    @staticmethod
    def _float(a: Bounds) -> Bounds:
        return a
