"""Laws of operators that read or write at indices, which are values themselves."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from treefx.passes.labels import dims as algebra
from treefx.passes.labels.dims import NoLaw
from treefx.passes.labels.facts import Axis, Dims, Fact, Kind, fact_of, plain_dims, shape_of
from treefx.passes.labels.laws.base import Call, aligned, law
from treefx.passes.labels.laws.gradients import counts_tokens
from treefx.passes.labels.uniformity import is_uniform

__all__ = ["gather", "reads_table", "scatter"]

aten = torch.ops.aten


@law(aten.embedding)
def embedding(call: Call) -> Fact:
    """A row of an invariant table per token, unless its backward counts tokens."""
    reason = counts_tokens(call.node)
    if reason is not None:
        raise NoLaw(reason)
    table, index = call.node.args[0], call.node.args[1]
    return _lookup(call, table, index)


@law(aten.embedding_renorm)
def renormalised_table(call: Call) -> Fact:
    """Refuse a table whose rows a batch rescales to a norm: it changes a parameter."""
    raise NoLaw("rescales rows of the table in place (max_norm); max_norm=None keeps the table")


def _lookup(call: Call, table: Any, index: Any) -> Fact:
    if call.labelled(table) or not call.labelled(index):
        raise NoLaw("looks tokens up in a table made of tokens")
    dims = call.dims(index) + plain_dims(shape_of(table)[1:])
    return Fact(Kind.PACKED, dims, learned=fact_of(table).learned)


@law(aten.index_select)
def index_select(call: Call) -> Fact:
    """Label a row of an invariant table per token, or invariant indices of a plain dimension."""
    table, dim, index = call.node.args[:3]
    if call.labelled(table) and not call.labelled(index):
        assert isinstance(table, fx.Node) and isinstance(dim, int)
        return call.result(algebra.resize(call.dims(table), dim, shape_of(call.node)[dim]))
    if dim != 0:
        raise NoLaw("selects along another dimension than the first")
    return _lookup(call, table, index)


@law(aten.gather)
def gather(call: Call) -> Fact:
    """y[n, i] = x[n, index[n, i]] along a plain dimension; all other dimensions run together."""
    source, dim, index = call.node.args[:3]
    assert isinstance(source, fx.Node) and isinstance(index, fx.Node) and isinstance(dim, int)
    dims = call.dims(index)
    dim %= len(dims)
    if call.labelled(source) and not call.labelled(index) and _is_table_of_pairs(call.dims(source), dims, dim):
        return call.result(
            algebra.with_keys(call.dims(source), dim, shape_of(index)[dim])
        )  # the lifter reads the index
    if reads_table(call.node):
        return _entries(call, source, dims, dim)
    if algebra.has_tokens(dims[dim]):
        raise NoLaw("gathers along the tokens")
    if call.labelled(source):
        algebra.resize(call.dims(source), dim, 1)
        _same_elsewhere(call.dims(source), dims, dim)
        if not call.labelled(index):
            raise NoLaw("gathers at indices without token axes")
    else:
        aligned(call, source, dims)
    return call.result(tuple(algebra.unrepeated(d) for d in dims))


def reads_table(node: fx.Node) -> bool:
    """Return whether a gather reads an invariant along the dimension with the tokens."""
    source, dim, index = node.args[:3]
    assert isinstance(source, fx.Node) and isinstance(index, fx.Node) and isinstance(dim, int)
    dims = fact_of(index).dims
    return fact_of(source).kind is Kind.INVARIANT and dims is not None and algebra.has_tokens(dims[dim % len(dims)])


def _entries(call: Call, table: fx.Node, dims: Dims, dim: int) -> Fact:
    """Label y[n, i] = x[index[n, i], i] of an invariant table: sines by position, say."""
    for d, factors in enumerate(dims):
        axes = {factor.axis for factor in factors} - {Axis.PLAIN}
        if d != dim and axes and (axes != {Axis.ROW} or not is_uniform(table, d)):
            raise NoLaw("gathers along the tokens, from a table for each row")
    return call.result(tuple(algebra.unrepeated(d) for d in dims))


def _is_table_of_pairs(source: Dims, index: Dims, dim: int) -> bool:
    """Return whether an invariant index [.., T, T] picks a feature per query and key.

    By their distance, say.
    """
    shape = [algebra.extent(item) for item in source]
    tokens = [factor.axis for factor in source[-2]] if len(source) > 2 else []
    same = [algebra.extent(item) for item in index[:-1]] == shape[:-1] and not algebra.has_tokens(source[-1])
    return dim == len(source) - 1 and tokens == [Axis.TOKEN] and same and algebra.extent(index[-1]) == shape[-2]


@law(aten.scatter, aten.scatter_add)
def scatter(call: Call) -> Fact:
    """Label x[n, index[n, i]] = y[n, i] along a plain dimension.

    An invariant x is read at the token's column.
    """
    source, dim, index, *values = call.node.args[:4]
    assert isinstance(source, fx.Node) and isinstance(index, fx.Node) and isinstance(dim, int)
    if not all(call.labelled(item) for item in (index, *values) if isinstance(item, fx.Node)):
        raise NoLaw("scatters between values with and without token axes")
    dims = algebra.resize(call.dims(index), dim, shape_of(source)[dim])
    if call.labelled(source):
        _same_elsewhere(call.dims(source), call.dims(index), dim % len(dims))
        dims = algebra.resize(call.dims(source), dim, shape_of(source)[dim])
    elif shape_of(source) == tuple(map(algebra.extent, dims)):
        aligned(call, source, dims)
    else:
        raise NoLaw("scatters into more than the tokens it reads")
    return call.result(tuple(algebra.unrepeated(d) for d in dims))


def _same_elsewhere(left: Dims, right: Dims, dim: int) -> None:
    """Check that two values run over the same tokens everywhere but along ``dim``."""
    for d, (a, b) in enumerate(zip(left, right, strict=True)):
        if d == dim or algebra.same_tokens(a, b) or not (algebra.has_tokens(a) or algebra.has_tokens(b)):
            continue
        raise NoLaw("pairs different tokens")
