"""Exchange keys and values between ranks of one forest: an operator and its gradient.

Every rank sends each other one the tokens that its tokens have as ancestors there, keys and values of one attention in
one message, and gets the gradients back the same way: gradients from several ranks for one token are summed in float32
(float64 for float64), rank by rank, so that two runs agree to the bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from treefx.kernels.common import accumulation_dtype
from treefx.kernels.cuda_graphs import NOT_CAPTURED

__all__ = ["all_to_all", "exchange", "exchange_backward", "processes_of"]


@torch.library.custom_op("treefx::exchange", mutates_args=(), tags=NOT_CAPTURED)
def exchange(values: list[Tensor], sent: Tensor, order: Tensor, counts: Tensor, group: str) -> list[Tensor]:
    """Send tokens' values to other ranks, and get the boundary's from them.

    Args:
        values: ``[1, H, N, D]`` each, of one dtype; they travel in one message.
        sent: int64 ``[S]``, the own tokens that are sent, those for rank 0 first; later entries are not read.
        order: int64 ``[P]``, the place of each of the boundary's tokens among the received ones, rank 0's first; past
            the end: zeros.
        counts: int64 ``[2, ranks]`` on the CPU, how many tokens each rank is sent and sends.
        group: name of the process group.

    Returns:
        The boundary's values, ``[1, P, H, D]`` each.
    """
    to, of = counts.tolist()
    message = _as_rows([x[0].index_select(1, sent[: sum(to)]).transpose(0, 1) for x in values])
    came = all_to_all(message, to, of, group)
    rows = torch.cat([came, came.new_zeros(len(order) - len(came), came.shape[1])])
    pieces = torch.split(rows, [x.shape[1] * x.shape[3] for x in values], 1)
    sizes = [(1, len(order), x.shape[1], x.shape[3]) for x in values]
    return [piece[order].view(size) for piece, size in zip(pieces, sizes, strict=True)]


@exchange.register_fake
def _(values: list[Tensor], sent: Tensor, order: Tensor, counts: Tensor, group: str) -> list[Tensor]:
    return [x.new_empty(1, order.shape[0], x.shape[1], x.shape[3]) for x in values]


@torch.library.custom_op("treefx::exchange_backward", mutates_args=(), tags=NOT_CAPTURED)
def exchange_backward(
    grads: list[Tensor], sent: Tensor, order: Tensor, counts: Tensor, tokens: int, group: str
) -> list[Tensor]:
    """Return gradients of the boundary's values to their owners; sum them per own token.

    Args:
        grads: ``[1, P, H, D]`` each.
        sent: as for `exchange`; likewise order, counts and group.
        order: see there.
        counts: see there.
        tokens: N.
        group: see there.

    Returns:
        Gradients of the values, ``[1, H, N, D]`` each.
    """
    to, of = counts.tolist()
    taken = _as_rows([x[0, : sum(of)] for x in grads])
    message = torch.empty_like(taken)
    message[order[: sum(of)]] = taken
    came = all_to_all(message, of, to, group)
    total = came.new_zeros(tokens, came.shape[1], dtype=accumulation_dtype(came))
    for own, piece in zip(torch.split(sent[: sum(to)], to), torch.split(came, to), strict=True):
        total[own] += piece  # a rank is sent a token once
    pieces = torch.split(total.to(came.dtype), [x.shape[2] * x.shape[3] for x in grads], 1)
    heads = [piece.reshape(tokens, x.shape[2], x.shape[3]) for piece, x in zip(pieces, grads, strict=True)]
    return [x.transpose(0, 1)[None].clone(memory_format=torch.contiguous_format) for x in heads]


@exchange_backward.register_fake
def _(grads: list[Tensor], sent: Tensor, order: Tensor, counts: Tensor, tokens: int, group: str) -> list[Tensor]:
    return [x.new_empty(1, x.shape[2], tokens, x.shape[3]) for x in grads]


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    values, sent, order, counts, ctx.group = inputs
    ctx.save_for_backward(sent, order, counts)
    ctx.tokens = values[0].shape[2]


def _backward(ctx: Any, grads: Sequence[Tensor]) -> tuple[Any, ...]:
    sent, order, counts = ctx.saved_tensors
    found = torch.ops.treefx.exchange_backward(list(grads), sent, order, counts, ctx.tokens, ctx.group)
    return found, None, None, None, None


exchange.register_autograd(_backward, setup_context=_setup)


def _as_rows(values: Sequence[Tensor]) -> Tensor:
    """Values [S, H, D] each as one row per token."""
    return torch.cat([x.flatten(1) for x in values], 1)


def all_to_all(message: Tensor, to: list[int], of: list[int], group: str) -> Tensor:
    """Send ``to[r]`` rows of a message to rank r, and return the ``of[r]`` rows that came from each, rank 0's first."""
    came = message.new_empty(sum(of), message.shape[1])
    dist.all_to_all_single(came, message.contiguous(), of, to, group=processes_of(group))
    return came


def processes_of(group: str) -> Any:
    """Return the process group of a name, as graphs hold it."""
    return dist.distributed_c10d._resolve_process_group(group)  # type: ignore[attr-defined,arg-type]
