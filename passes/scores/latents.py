"""Read keys and values as linear functions of one latent vector per token, which all heads share.

Multi-head latent attention (DeepSeek V2 and V3) expands a latent c of R features to keys and values of every head. With
K_h and V_h the matrices of head h, r features that all heads share (rotated by position), and q = (a, b)::

    q . key = a . (K_h c) + b . r = (K_h^T a, b) . (c, r)        out = sum_k p_k V_h c_k = V_h sum_k p_k c_k

So one key (c, r) and one value c serve all heads, which pays where keys are gathered (``sparse``). The numbers are the
same up to rounding.

Layouts between the product and the attention are followed back per range of features, as ``lift_mask`` follows masks.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from treefx.passes.labels.facts import Axis, Kind, fact_of, shape_of
from treefx.passes.labels.laws.movement import nonempty_pieces
from treefx.passes.scores.attention_facts import Attention
from treefx.passes.scores.digits import Digit, Index
from treefx.passes.scores.lift_mask import step

__all__ = ["Expanded", "Latents", "Shared", "find_latents"]

aten = torch.ops.aten
_FEATURE, _HEAD = ("f",), ("head",)


@dataclass(frozen=True)
class Expanded:
    """Features of each head that a matrix makes of the latent vector.

    Attributes:
        latent: [B T, R].
        weight: [R, H stride]; head h and feature f are column h stride + offset + f.
        stride, offset, width: Of the features.
    """

    latent: fx.Node
    weight: fx.Node
    stride: int
    offset: int
    width: int


@dataclass(frozen=True)
class Shared:
    """Features that all heads share: those of a value per token, from ``offset``."""

    value: fx.Node
    offset: int
    width: int


_Parts = list[Expanded | Shared] | None


@dataclass(frozen=True)
class Latents:
    """Keys and values of an attention by their latent vector.

    Attributes:
        key: The parts of a key's features in order; one of them is expanded.
        value: The value's features.
    """

    key: tuple[Expanded | Shared, ...]
    value: Expanded

    def reads(self) -> list[fx.Node]:
        """The nodes that it is made of."""
        expanded = [part for part in (*self.key, self.value) if isinstance(part, Expanded)]
        found = [node for part in expanded for node in (part.latent, part.weight)]
        return list(dict.fromkeys([*found, *(part.value for part in self.key if isinstance(part, Shared))]))

    @property
    def features(self) -> tuple[int, int]:
        """Features of the key that all heads share, and of its value."""
        latent = int(shape_of(self.value.latent)[-1])
        return latent + sum(part.width for part in self.key if isinstance(part, Shared)), latent


def find_latents(law: Attention) -> Latents | None:
    """Return the latent form of an attention's keys and values, or None where they have none."""
    if len({node.meta["val"].dtype for node in (law.query, law.key, law.value)}) > 1:
        return None
    key, value = (_parts_of(node, law.heads) for node in (law.key, law.value))
    if key is None or value is None or len(value) != 1:
        return None
    expanded = [part for part in key if isinstance(part, Expanded)]
    (of_value,) = value
    if len(expanded) != 1 or not isinstance(of_value, Expanded) or expanded[0].latent is not of_value.latent:
        return None
    return Latents(tuple(key), of_value)


def _parts_of(node: fx.Node, heads: int) -> _Parts:
    """The parts of a key or value, in the order of its features."""
    dims = fact_of(node).dims or ()
    token = next((i for i, dim in enumerate(dims) if any(f.axis is Axis.TOKEN for f in dim)), None)
    feature = None if token is None else (3 - token if len(dims) == 3 else 5 - token)
    if feature is None or len(dims) not in (3, 4) or feature not in (1, 2, 3) or feature >= len(dims):
        return None
    names = {Axis.ROW: ("b",), Axis.TOKEN: ("ck",)}
    index: Index = tuple(
        tuple((names.get(f.axis, _FEATURE if i == feature else _HEAD), f.size) for f in dim if f.size != 1)
        for i, dim in enumerate(dims)
    )
    width = math.prod(f.size for f in dims[feature])
    places = [digit[0] for dim in index for digit in dim]
    if places.count(_FEATURE) != 1 or places.count(_HEAD) != (heads > 1):
        return None
    return _Walk(heads, node.meta["val"].dtype).parts(node, index, 0, width)


@dataclass(frozen=True)
class _Walk:
    heads: int
    dtype: torch.dtype

    def parts(self, node: Any, index: Index, offset: int, width: int) -> _Parts:
        """The parts of the features from ``offset`` on of a node, at an index with the feature as one digit."""
        while isinstance(node, fx.Node) and node.op == "call_function" and node.meta["val"].dtype is self.dtype:
            dim = next(i for i, digits in enumerate(index) if any(digit[0] == _FEATURE for digit in digits))
            if node.target is aten.cat.default:
                return self._joined(node, index, dim, offset, width)
            if node.target is aten.slice_scatter.default:
                return self._overwritten(node, index, dim, offset, width)
            moved = _moved(node, index, dim, offset)
            if moved is None:
                return self._end(node, index, dim, offset, width)
            node, index, offset = moved
            if not any(digit[0] == _FEATURE for digits in index for digit in digits):
                return None
        return None

    def _joined(self, node: fx.Node, index: Index, dim: int, offset: int, width: int) -> _Parts:
        pieces = nonempty_pieces(node)
        if len(pieces) == 1:
            return self.parts(pieces[0], index, offset, width)
        given: Any = node.args[1] if len(node.args) > 1 else 0
        if given % len(index) != dim:
            return self._end(node, index, dim, offset, width)
        if not any(digit[0] == _HEAD for digits in index for digit in digits):
            return self._end(node, index, dim, offset, width)
        found: list[Expanded | Shared] = []
        start = 0
        for piece in pieces:
            size = int(shape_of(piece)[dim])
            low, high = max(offset, start), min(offset + width, start + size)
            if low < high:
                parts = self.parts(piece, _resized(index, dim, size), low - start, high - low)
                if parts is None:
                    return None
                found += parts
            start += size
        return found

    def _overwritten(self, node: fx.Node, index: Index, dim: int, offset: int, width: int) -> _Parts:
        args: Any = node.args
        target, piece, *where = args
        at = (where[0] if where else 0) % len(index)
        size = int(shape_of(node)[dim])
        start, end = (int(where[i]) if len(where) > i and where[i] is not None else x for i, x in ((1, 0), (2, size)))
        if at != dim or start < 0 or end < 0 or (len(where) > 3 and where[3] != 1) or not isinstance(piece, fx.Node):
            return None
        start, end, last = min(start, size), min(end, size), offset + width
        found: list[Expanded | Shared] = []
        for low, high, source, first in (
            (offset, min(last, start), target, 0),
            (max(offset, start), min(last, end), piece, start),
            (max(offset, end), last, target, 0),
        ):
            if low < high:
                inner = _resized(index, dim, end - start) if source is piece else index
                parts = self.parts(source, inner, low - first, high - low)
                if parts is None:
                    return None
                found += parts
        return found

    def _end(self, node: fx.Node, index: Index, dim: int, offset: int, width: int) -> _Parts:
        """A product with a matrix, or a value without heads."""
        if fact_of(node).kind is not Kind.PACKED:
            return None
        by_head = any(digit[0] == _HEAD for digits in index for digit in digits)
        if not by_head and len(index[dim]) == 1:
            return [Shared(node, offset, width)]
        if node.target is not aten.mm.default or dim != 1 or self.heads == 1:
            return None
        latent, weight = node.args
        assert isinstance(latent, fx.Node) and isinstance(weight, fx.Node)
        places = [digit[0] for digit in index[1]]
        if places != [_HEAD, _FEATURE] or fact_of(weight).kind is not Kind.INVARIANT:
            return None
        if fact_of(latent).kind is not Kind.PACKED or any(_HEAD == digit[0] for digit in index[0]):
            return None
        return [Expanded(latent, weight, int(index[1][1][1]), offset, width)]


def _moved(node: fx.Node, index: Index, dim: int, offset: int) -> tuple[Any, Index, int] | None:
    """One movement back, or None at another operator."""
    if node.target is operator.getitem:
        split, number = node.args
        assert isinstance(split, fx.Node)
        if split.target is not aten.split_with_sizes.default:
            return None
        args: Any = split.args
        source, sizes, at = args[0], args[1], args[2] if len(args) > 2 else 0
        if at % len(index) != dim:
            return None
        assert isinstance(number, int)
        return source, _resized(index, dim, int(shape_of(source)[dim])), offset + sum(map(int, sizes[:number]))
    if node.target is aten.copy.default:
        piece = node.args[1]
        same = isinstance(piece, fx.Node) and shape_of(piece) == shape_of(node)
        return (piece, index, offset) if same else None
    moved = step(node, index)
    if moved is None:
        return None
    source, found = moved
    place = [digit for digits in found for digit in digits if digit[0] == _FEATURE]
    return (source, found, offset) if len(place) == 1 else None


def _resized(index: Index, dim: int, size: int) -> Index:
    """The index with another extent of its feature."""
    digits: tuple[Digit, ...] = tuple((expr, size if expr == _FEATURE else old) for expr, old in index[dim])
    return (*index[:dim], digits, *index[dim + 1 :])
