"""Laws of operators that keep the elements and change how dimensions hold them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from treefx.passes.labels import dims as algebra
from treefx.passes.labels.dims import NoLaw
from treefx.passes.labels.facts import Axis, Dims, Fact, Factor, shape_of
from treefx.passes.labels.laws.base import Call, law

__all__ = ["copy", "expand", "permute", "squeeze", "unsqueeze", "view", "view_as_complex"]

aten = torch.ops.aten


@law(aten.view, aten.reshape, aten._unsafe_view, aten._reshape_alias)
def view(call: Call) -> Fact:
    """A view regroups factors in order."""
    source = call.node_arg(0)
    return call.result(algebra.regroup(call.dims(source), shape_of(call.node)))


@law(aten.permute, aten.transpose, aten.t, aten.movedim, aten.numpy_T, aten.mT)
def permute(call: Call) -> Fact:
    """A permutation of dimensions permutes their factors."""
    source = call.node_arg(0)
    dims = call.dims(source)
    labels = torch.empty([2 + i for i in range(len(dims))], device="meta")  # distinct sizes name the dimensions
    moved = call.node.target(labels, *call.node.args[1:], **call.node.kwargs)  # type: ignore[operator]
    return call.result(algebra.move(dims, [size - 2 for size in moved.shape]))


@law(aten.view_as_complex)
def view_as_complex(call: Call) -> Fact:
    """Pairs of a last plain dimension of two become complex numbers."""
    dims = call.dims(call.node_arg(0))
    return call.result(algebra.resize(dims, -1, 1)[:-1])


@law(aten.view_as_real)
def view_as_real(call: Call) -> Fact:
    """Complex numbers become pairs along a new last plain dimension."""
    return call.result((*call.dims(call.node_arg(0)), algebra.plain(2)))


@law(aten.repeat)
def repeat(call: Call) -> Fact:
    """Copies of a dimension one behind the other: a plain factor before its own."""
    source = call.node_arg(0)
    counts: Any = call.node.args[1]
    dims = ((),) * (len(counts) - len(call.dims(source))) + call.dims(source)
    pairs = zip(dims, counts, strict=True)
    return call.result(tuple((*algebra.plain(count), *algebra.unrepeated(dim)) for dim, count in pairs))


@law(aten.copy)
def copy(call: Call) -> Fact:
    """y[n] = x[n] in the shape and dtype of another value, of which nothing else is read."""
    source = call.node_arg(1)
    if not call.labelled(source):
        raise NoLaw("writes a value without token axes over tokens")
    dims, shape = call.dims(source), shape_of(call.node)
    dims = ((),) * (len(shape) - len(dims)) + dims
    if any(algebra.extent(dim) not in (1, size) for dim, size in zip(dims, shape, strict=True)):
        raise NoLaw("copies to another shape")
    return call.result(_expanded(dims, shape))


@law(aten.unsqueeze)
def unsqueeze(call: Call) -> Fact:
    """A new dimension of size one is an empty product, or the only row of a batch, in front of its tokens."""
    dims, position = call.dims(call.node_arg(0)), call.arg(1, "dim")
    position %= len(dims) + 1
    if position < len(dims) and algebra.has_only_row(dims[position]) and len(dims[position]) > 1:
        return call.result(algebra.regroup(dims, shape_of(call.node)))
    return call.result(algebra.insert(dims, position))


@law(aten.squeeze)
def squeeze(call: Call) -> Fact:
    """A dimension that is an empty product may go; that of an only row becomes one with the next."""
    source = call.node_arg(0)
    dims = call.dims(source)
    given = call.arg(1, "dim")
    where = range(len(dims)) if given is None else [given] if isinstance(given, int) else given
    gone = {d % len(dims) for d in where if shape_of(source)[d] == 1}
    if any(algebra.has_tokens(dims[d]) for d in gone):
        if not all(algebra.has_only_row(dims[d]) for d in gone if dims[d]):
            raise NoLaw("squeezes a row or token axis of size one")
        return call.result(algebra.regroup(dims, shape_of(call.node)))
    return call.result(tuple(dim for d, dim in enumerate(dims) if d not in gone))


@law(aten.expand)
def expand(call: Call) -> Fact:
    """An expanded dimension is a plain factor along which nothing varies."""
    source = call.node_arg(0)
    dims, shape = call.dims(source), shape_of(call.node)
    return call.result(_expanded(((),) * (len(shape) - len(dims)) + dims, shape))


def _expanded(dims: Dims, shape: Sequence[int]) -> Dims:
    """Dimensions of size one expanded to plain ones along which nothing varies."""
    for d, (dim, size) in enumerate(zip(dims, shape, strict=True)):
        if size != 1 and len(dim) == 1 and algebra.has_only_row(dim):
            dims = algebra.row_before_tokens(dims, d)
    result = []
    for dim, size in zip(dims, shape, strict=True):
        if algebra.extent(dim) != size and algebra.has_tokens(dim):
            raise NoLaw("expands a row or token axis of size one")
        result.append(dim if algebra.extent(dim) == size else (Factor(Axis.PLAIN, size, repeated=True),))
    return tuple(result)
