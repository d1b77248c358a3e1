"""Define collectives of ranks that shard weights, forward and backward.

A value is *whole* where every rank holds all of it, a *piece* where each holds a range of its features, *partial* where
it is the sum over the ranks' tensors. Its gradient is whole where it is whole or partial, and a piece where it is a
piece. So these four are each other's derivatives:

===========================  ===================  ==============================  ============================
operator                     from, to             forward                         backward
===========================  ===================  ==============================  ============================
``treefx::sum_over_ranks``   partial, whole       sum over ranks                  the gradient unchanged
``treefx::same_on_ranks``    whole, read by each  the value unchanged             sum over ranks
``treefx::gather_pieces``    piece, whole         pieces one behind the other     the rank's piece
``treefx::own_piece``        whole, piece         the rank's piece                pieces one behind the other
===========================  ===================  ==============================  ============================

``same_on_ranks`` stands where ranks compute different things of a value that all hold: each then has one summand of its
gradient. Without it gradients are too small, and nothing else shows it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from treefx.kernels.cuda_graphs import NOT_CAPTURED

__all__ = ["gather_pieces", "own_piece", "same_on_ranks", "sum_over_ranks"]


@torch.library.custom_op("treefx::sum_over_ranks", mutates_args=(), tags=NOT_CAPTURED)
def sum_over_ranks(x: Tensor, group: str) -> Tensor:
    """Return the sum of the tensors of a process group's ranks, of the shape of ``x``."""
    ops = torch.ops._c10d_functional
    total: Tensor = ops.wait_tensor(ops.all_reduce(x.contiguous(), "sum", group))
    return total


@torch.library.custom_op("treefx::same_on_ranks", mutates_args=())
def same_on_ranks(x: Tensor, group: str) -> Tensor:
    """Return the value that all ranks hold, for separate computation on each."""
    return x.clone(memory_format=torch.contiguous_format)


@torch.library.custom_op("treefx::gather_pieces", mutates_args=(), tags=NOT_CAPTURED)
def gather_pieces(x: Tensor, dim: int, ranks: int, group: str) -> Tensor:
    """Concatenate the pieces of all ranks along ``dim``."""
    ops = torch.ops._c10d_functional
    first = x.movedim(dim, 0).contiguous()
    pieces: Tensor = ops.wait_tensor(ops.all_gather_into_tensor(first, ranks, group))
    return pieces.movedim(0, dim).contiguous()


@torch.library.custom_op("treefx::own_piece", mutates_args=())
def own_piece(x: Tensor, dim: int, ranks: int, group: str) -> Tensor:
    """Of ``ranks`` equal pieces along ``dim`` the one of this rank."""
    found: Any = group  # a name, with its own type there
    rank = dist.get_rank(torch._C._distributed_c10d._resolve_process_group(found))
    size = x.shape[dim] // ranks
    return x.narrow(dim, rank * size, size).clone(memory_format=torch.contiguous_format)


@sum_over_ranks.register_fake
@same_on_ranks.register_fake
def _(x: Tensor, group: str) -> Tensor:
    return x.new_empty(x.shape)


@gather_pieces.register_fake
def _(x: Tensor, dim: int, ranks: int, group: str) -> Tensor:
    shape = list(x.shape)
    shape[dim] *= ranks
    return x.new_empty(shape)


@own_piece.register_fake
def _(x: Tensor, dim: int, ranks: int, group: str) -> Tensor:
    shape = list(x.shape)
    shape[dim] //= ranks
    return x.new_empty(shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.how = inputs[1:]


def _of_sum(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    return grad, None


def _of_same(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    return sum_over_ranks(grad, *ctx.how), None


def _of_gathered(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    return own_piece(grad, *ctx.how), None, None, None


def _of_piece(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    return gather_pieces(grad, *ctx.how), None, None, None


sum_over_ranks.register_autograd(_of_sum, setup_context=_keep)
same_on_ranks.register_autograd(_of_same, setup_context=_keep)
gather_pieces.register_autograd(_of_gathered, setup_context=_keep)
own_piece.register_autograd(_of_piece, setup_context=_keep)
