"""Define laws of collectives over ranks that shard weights: none mixes tokens."""

from __future__ import annotations

import torch

from treefx.passes.labels import dims as algebra
from treefx.passes.labels.facts import Fact
from treefx.passes.labels.laws.base import Call, law
from treefx.passes.labels.laws.pointwise import pointwise
from treefx.passes.ranks import collectives as _collectives  # noqa: F401  (registers operators)

__all__ = ["gather_pieces", "own_piece"]

_ops = torch.ops.treefx

law(_ops.sum_over_ranks, _ops.same_on_ranks)(pointwise)


@law(_ops.gather_pieces)
def gather_pieces(call: Call) -> Fact:
    """Label the concatenation over ranks of x[n], which have the same tokens."""
    dims, dim, ranks = call.dims(call.node_arg(0)), int(call.arg(1, "dim")), int(call.arg(2, "ranks"))
    return call.result(algebra.resize(dims, dim, algebra.extent(dims[dim]) * ranks))


@law(_ops.own_piece)
def own_piece(call: Call) -> Fact:
    """y[n] is a range of x[n] along a plain dimension."""
    dims, dim, ranks = call.dims(call.node_arg(0)), int(call.arg(1, "dim")), int(call.arg(2, "ranks"))
    return call.result(algebra.resize(dims, dim, algebra.extent(dims[dim]) // ranks))
