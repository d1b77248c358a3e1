"""Define laws along features: gates, order statistics, windows of indices, transforms, group norms.

Each of them reads one token, so its plain dimensions are computed once per distinct token.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from treefx.passes.labels import dims as algebra
from treefx.passes.labels.dims import NoLaw
from treefx.passes.labels.facts import Dims, Fact, Kind, shape_of
from treefx.passes.labels.laws.base import Call, law
from treefx.passes.labels.laws.pointwise import pointwise

__all__ = ["complex_", "group_norm"]

aten = torch.ops.aten

law(aten.hardswish, aten._prelu_kernel, aten.fill)(pointwise)


@law(aten.complex)
def complex_(call: Call) -> Fact:
    """z[n] = x[n] + i y[n]."""
    return pointwise(call)


@law(aten.log_sigmoid_forward)
def log_sigmoid(call: Call) -> Fact:
    """Label y[n] = log sigmoid(x[n]).

    The second result is kept for the backward, in a device-dependent shape.
    """
    part = pointwise(call)
    return Fact(part.kind, parts=(part, Fact(Kind.ROW, learned=part.learned)), learned=part.learned)


@law(aten.glu)
def glu(call: Call) -> Fact:
    """y[n, i] = x[n, i] * sigmoid(x[n, i + C / 2]) for a plain dimension of C entries."""
    dims, dim = call.dims(call.node_arg(0)), call.arg(1, "dim", -1)
    return call.result(algebra.resize(dims, dim, algebra.extent(dims[dim]) // 2))


@law(aten.bucketize.Tensor, aten.searchsorted.Tensor, aten.isin.Tensor_Tensor)
def bucket(call: Call) -> Fact:
    """Where x[n] stands among an invariant list of numbers, or whether it is one of them."""
    searches = call.node.target is aten.searchsorted.Tensor
    items, source = call.node.args[:2] if searches else reversed(call.node.args[:2])
    assert isinstance(items, fx.Node) and isinstance(source, fx.Node)
    others = [node for node in call.operands if node is not source]
    if any(call.labelled(node) for node in others) or len(shape_of(items)) != 1:
        raise NoLaw("looks tokens up among numbers made of tokens")
    return call.result(_forget_repeats(call.dims(source)))


@law(aten.cummax, aten.cummin)
def running_extreme(call: Call) -> Fact:
    """Label the running maximum or minimum along a plain dimension, and its place."""
    part = call.result(_resized(call, 1))
    return Fact(part.kind, parts=(part, part), learned=part.learned)


@law(aten.median.dim, aten.nanmedian.dim, aten.mode, aten.kthvalue, aten.aminmax, aten.std_mean.correction)
def statistics(call: Call) -> Fact:
    """Two statistics of a plain dimension."""
    part = call.result(_reduced(call, 2 if call.node.target is aten.kthvalue.default else 1))
    return Fact(part.kind, parts=(part, part), learned=part.learned)


@law(aten.nansum, aten.count_nonzero)
def statistic(call: Call) -> Fact:
    """A sum over plain dimensions."""
    return call.result(_reduced(call, 1))


def _reduced(call: Call, position: int) -> Dims:
    """Dimensions of the first operand without those that the argument at ``position`` names."""
    dims = call.dims(call.node_arg(0))
    one_of_them: Any = -1 if call.node.target in {aten.mode.default, aten.kthvalue.default} else None
    given = call.arg(position, "dim", one_of_them)
    chosen = range(len(dims)) if given in (None, [], ()) else [given] if isinstance(given, int) else given
    where = {d % len(dims) for d in chosen}
    for d in where:
        dims = algebra.resize(dims, d, 1)
    value = call.node.meta["val"]
    keeps = (value if isinstance(value, torch.Tensor) else value[0]).dim() == len(dims)
    return tuple(dim for d, dim in enumerate(dims) if keeps or d not in where)


@law(aten.index_fill, aten.index_add, aten.index_copy)
def write(call: Call) -> Fact:
    """Label x[n] with entries at invariant indices of a plain dimension replaced or added to."""
    target, dim, index = call.node.args[:3]
    assert isinstance(target, fx.Node) and isinstance(dim, int)
    values = [node for node in call.operands if node not in (target, index)]
    if call.labelled(index) or not call.labelled(target):
        raise NoLaw("writes at indices made of tokens")
    for node in values:
        if call.labelled(node):
            _same_elsewhere(call.dims(node), call.dims(target), dim)
        elif shape_of(node).numel() != 1:
            raise NoLaw("writes a value without token axes over tokens")
    return call.result(_resized(call, 1))


def _same_elsewhere(left: Dims, right: Dims, dim: int) -> None:
    """Check that two values run over the same tokens, except along the plain dimension."""
    left, right = (algebra.resize(dims, dim, 1) for dims in (left, right))
    if any(not algebra.same_tokens(a, b) for a, b in zip(left, right, strict=True)):
        raise NoLaw("pairs different tokens")


@law(aten.tril, aten.triu)
def triangle(call: Call) -> Fact:
    """A triangle of two last plain dimensions, the rest zero."""
    dims = call.dims(call.node_arg(0))
    for dim in (-2, -1):
        algebra.resize(dims, dim, 1)
    return call.result(_forget_repeats(dims))


@law(aten._fft_r2c, aten._fft_c2r, aten._fft_c2c)
def fourier(call: Call) -> Fact:
    """y[n, k] = sum over j of x[n, j] exp(-+ 2 pi i j k / C) along plain dimensions of C entries."""
    dims, sizes = call.dims(call.node_arg(0)), call.node.meta["val"].shape
    given: Any = call.arg(1, "dim")
    for d in given:
        dims = algebra.resize(dims, d, sizes[d])
    return call.result(dims)


@law(aten.native_group_norm)
def group_norm(call: Call) -> Fact:
    """A normalisation over groups of plain dimensions, where the samples are tokens."""
    source, *parameters = (item for item in call.node.args[:3] if isinstance(item, fx.Node))
    dims = call.dims(source)
    if any(call.labelled(item) for item in parameters):
        raise NoLaw("scales groups by values of tokens")
    for d in range(1, len(dims)):
        algebra.resize(dims, d, 1)
    whole = call.result(_forget_repeats(dims))
    moments = call.result((dims[0], algebra.plain(call.arg(6, "group"))))
    return Fact(whole.kind, parts=(whole, moments, moments), learned=whole.learned)


@law(aten._native_batch_norm_legit_no_training)
def running_norm(call: Call) -> Fact:
    """Label a normalisation by running statistics of a channel, a plain second dimension."""
    source, *parameters = (item for item in call.node.args[:5] if isinstance(item, fx.Node))
    if any(call.labelled(item) for item in parameters):
        raise NoLaw("pairs different tokens")
    dims = call.dims(source)
    whole = call.result(_forget_repeats(algebra.resize(dims, 1, algebra.extent(dims[1]))))
    nothing = Fact(Kind.INVARIANT)  # statistics that were not taken have no elements
    return Fact(whole.kind, parts=(whole, nothing, nothing), learned=whole.learned)


def _resized(call: Call, position: int) -> Dims:
    """Dimensions of the first operand; the one that an argument names is checked to be plain."""
    dims, dim = call.dims(call.node_arg(0)), call.arg(position, "dim")
    return _forget_repeats(algebra.resize(dims, dim, algebra.extent(dims[dim])))


def _forget_repeats(dims: Dims) -> Dims:
    """The same dimensions of a value that may vary along every one of them."""
    return tuple(algebra.unrepeated(dim) for dim in dims)
