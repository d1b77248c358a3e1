"""Laws of operators that cut, join and overwrite parts of plain dimensions."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from treefx.passes.labels import dims as algebra
from treefx.passes.labels.dims import NoLaw
from treefx.passes.labels.facts import Fact, Kind, fact_of, shape_of
from treefx.passes.labels.laws.base import Call, aligned, law

__all__ = ["cat", "nonempty_pieces", "overwrite", "pad", "slice_"]

aten = torch.ops.aten


LEARNED = Fact(Kind.INVARIANT, learned=True)


@law(aten.slice_scatter, aten.select_scatter)
def overwrite(call: Call) -> Fact:
    """Label x with y written over a part of a plain dimension.

    An invariant one of them is read at the token's column.
    """
    target, piece = call.node_arg(0), call.node_arg(1)
    dim = call.arg(2, "dim", 0) % len(shape_of(target))
    selects = call.node.target is aten.select_scatter.default
    given = []
    if call.labelled(target):
        given.append(algebra.resize(call.dims(target), dim, 1))
    if call.labelled(piece):
        dims = call.dims(piece)
        given.append(algebra.insert(dims, dim) if selects else algebra.resize(dims, dim, 1))
    rest = algebra.broadcast(given)
    for node in (target, piece):
        if not call.labelled(node):
            aligned(call, node, rest if node is target or not selects else rest[:dim] + rest[dim + 1 :])
    return call.result(algebra.resize(rest, dim, shape_of(target)[dim]))


@law(aten.slice)
def slice_(call: Call) -> Fact:
    """Label a slice of a plain dimension; a slice of all changes nothing."""
    source = call.node_arg(0)
    dims, dim = call.dims(source), call.arg(1, "dim", 0)
    size = shape_of(call.node)[dim]
    if size == shape_of(source)[dim]:
        return call.result(dims)
    if algebra.is_keys(dims[dim]) and call.arg(4, "step", 1) == 1:
        return call.result(algebra.with_keys(dims, dim, size))  # which ones they are is proved when they are lifted
    return call.result(algebra.resize(dims, dim, size))


@law(aten.constant_pad_nd)
def pad(call: Call) -> Fact:
    """A plain dimension grows or shrinks at its ends; padding by nothing changes nothing."""
    dims, widths = call.dims(call.node_arg(0)), call.arg(1, "pad")
    for offset in range(len(widths) // 2):
        if any(widths[2 * offset : 2 * offset + 2]):
            d = len(dims) - 1 - offset
            dims = algebra.resize(dims, d, shape_of(call.node)[d])
    return call.result(dims)


@law(aten.select)
def select(call: Call) -> Fact:
    """One index of a plain dimension, or the only row of a batch."""
    source = call.node_arg(0)
    dim = call.arg(1, "dim") % len(call.dims(source))
    if algebra.has_only_row(call.dims(source)[dim]) and len(call.dims(source)[dim]) == 1:
        return call.result(algebra.regroup(call.dims(source), shape_of(call.node)))
    dims = algebra.resize(call.dims(source), dim, 1)
    return call.result(dims[:dim] + dims[dim + 1 :])


@law(aten.split, aten.split_with_sizes, aten.chunk, aten.unbind, aten.tensor_split)
def split(call: Call) -> Fact:
    """Pieces of a plain dimension."""
    source = call.node_arg(0)
    unbinds = call.node.target in {aten.unbind.int}
    dim = call.arg(1, "dim", 0) if unbinds else call.arg(2, "dim", 0)
    dim %= len(call.dims(source))
    parts = []
    for value in call.node.meta["val"]:
        dims = algebra.resize(call.dims(source), dim, 1 if unbinds else value.shape[dim])
        parts.append(call.result(dims[:dim] + dims[dim + 1 :] if unbinds else dims))
    return Fact(parts[0].kind, parts=tuple(parts), learned=parts[0].learned)


def nonempty_pieces(node: fx.Node) -> list[fx.Node]:
    """Return the pieces of ``cat`` or ``stack`` without the empty vectors that ``cat`` skips."""
    pieces: Any = node.args[0]
    return [piece for piece in pieces if tuple(shape_of(piece)) != (0,)]


@law(aten.cat, aten.stack)
def cat(call: Call) -> Fact:
    """Concatenation along a plain dimension; invariant pieces are read at the token's column."""
    pieces = nonempty_pieces(call.node)
    labelled = [call.dims(node) for node in pieces if call.labelled(node)]
    if len(pieces) == len(labelled) == 1 and call.node.target is aten.cat.default:
        return call.result(labelled[0])
    stacks = call.node.target is aten.stack.default
    dim = call.arg(1, "dim", 0) % (len(labelled[0]) + stacks)
    scores = [dims for dims in labelled if not stacks and algebra.is_keys(dims[dim])]
    if scores:
        return call.result(
            algebra.with_keys(scores[0], dim, shape_of(call.node)[dim])
        )  # which is which: proved when lifted
    if not stacks and algebra.has_tokens(labelled[0][dim]) and any(fact_of(node) == LEARNED for node in pieces):
        raise NoLaw("puts learned values before or behind the tokens (prompt or prefix tuning)")
    if stacks:
        result = algebra.insert(algebra.broadcast(labelled), dim, algebra.plain(len(pieces)))
    else:
        sized = [algebra.resize(dims, dim, 1) for dims in labelled]
        result = algebra.resize(algebra.broadcast(sized), dim, shape_of(call.node)[dim])
    for node in pieces:
        if not call.labelled(node):
            aligned(call, node, result if not stacks else result[:dim] + result[dim + 1 :])
    return call.result(result)


@law(aten.repeat_interleave.self_int)
def repeat_interleave(call: Call) -> Fact:
    """Each index of a plain dimension several times."""
    source = call.node_arg(0)
    dims, dim = call.dims(source), call.arg(2, "dim")
    if dim is None:
        raise NoLaw("flattens tokens")
    return call.result(algebra.resize(dims, dim, shape_of(call.node)[dim]))
