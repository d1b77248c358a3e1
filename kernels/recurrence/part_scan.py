"""Run a linear recurrence over one part of a cut forest: ``treefx::part_scan``.

A part is a forest. Roots start from states of parts above instead of zero, and the states of some tokens leave to
parts below (``Doors``). With S_r the state that enters at root r, and S_x the state of an exit x::

    o, S_x = scan(q, k, v, g, w, S_r)         the gradients of S_x are those of the parts below, summed

States are ``[H, D, E]`` per path in all forms of a recurrence, so that a part by ``tree_scan`` may follow one by a
library's kernel.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from treefx.kernels.cuda_graphs import NOT_CAPTURED
from treefx.kernels.recurrence.scan_chunk import split
from treefx.kernels.recurrence.tree_chunks import ChunkPlan, Doors
from treefx.kernels.recurrence.tree_scan import CHUNK, Inputs, Scan, contained, per_head

__all__ = ["part_recurrence", "part_scan"]


def part_recurrence(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None, subtree_end: Tensor, states: Tensor, doors: Doors
) -> tuple[Tensor, Tensor]:
    """Run ``tree_ssd``, or with ``beta`` ``tree_delta_rule``, over a part.

    Args:
        q: as k, v, g, beta and subtree_end, those of ``tree_delta_rule``.
        states: that enter ``[S, H, D, E]``.
        doors: of the part.

    Returns:
        ``[N, H, E]``, and the states that leave ``[X, H, D, E]``.
    """
    w = None
    if beta is not None:
        q, k = per_head(q, v.shape[1]), per_head(k, v.shape[1])
        v, w = beta[..., None] * v, beta[..., None] * k
    out, left = torch.ops.treefx.part_scan(q, k, v, g, w, subtree_end, CHUNK, states.to(v.dtype), *doors.vectors)
    return out, left.to(states.dtype)


def _grouped(states: Tensor, groups: int) -> Tensor:
    """``[S, H, D, E]`` as ``[S, G, D, R * E]``."""
    return split(states, 1, groups).transpose(2, 3).flatten(3)


def _per_head(states: Tensor, width: int) -> Tensor:
    """``[S, G, D, R * E]`` as ``[S, H, D, E]``."""
    return split(states, 3, states.shape[3] // width).transpose(2, 3).flatten(1, 2).contiguous()


@torch.library.custom_op("treefx::part_scan", mutates_args=(), tags=NOT_CAPTURED)
def part_scan(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, w: Tensor | None, subtree_end: Tensor, chunk: int,
    states: Tensor, entry: Tensor, exits: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the results ``[N, H, E]``, and the states that leave ``[X, H, D, E]``.

    Args:
        q: as k, v, g, w, subtree_end and chunk, those of ``treefx::tree_scan``.
        states: that enter ``[S, H, D, E]``.
        entry: see ``Doors``, as exits.
    """
    inputs, doors = Inputs(q, k, v, g, w), Doors(len(states), entry, exits)

    def run(plan: ChunkPlan) -> list[Tensor]:
        scan = Scan(inputs, plan, _grouped(states, q.shape[1]))
        return [scan.output(), _per_head(scan.leaving(), v.shape[2])]

    with torch.autocast(v.device.type, enabled=False):  # dtypes are settled outside
        out, left = contained(run, inputs, subtree_end, chunk, doors=doors)
        return out, left


@part_scan.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, w: Tensor | None, subtree_end: Tensor, chunk: int,
    states: Tensor, entry: Tensor, exits: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    out = torch.empty_like(v, memory_format=torch.contiguous_format)
    return out, states.new_empty(exits.shape[0], *states.shape[1:])


@torch.library.custom_op("treefx::part_scan_backward", mutates_args=(), tags=NOT_CAPTURED)
def _part_scan_backward(
    grad: Tensor, of_left: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, w: Tensor | None,
    subtree_end: Tensor, chunk: int, states: Tensor, entry: Tensor, exits: Tensor,
) -> list[Tensor]:  # fmt: skip
    """Gradients of q, k, v, then of g and w where given, then of the states that enter."""
    inputs, doors = Inputs(q, k, v, g, w), Doors(len(states), entry, exits)
    groups, width = q.shape[1], v.shape[2]

    def run(plan: ChunkPlan) -> list[Tensor]:
        *found, of_given = Scan(inputs, plan, _grouped(states, groups)).backward(grad, _grouped(of_left, groups))
        return [*found, _per_head(of_given, width)]

    with torch.autocast(v.device.type, enabled=False):
        return contained(run, inputs, subtree_end, chunk, [grad], doors)


@_part_scan_backward.register_fake
def _(
    grad: Tensor, of_left: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, w: Tensor | None,
    subtree_end: Tensor, chunk: int, states: Tensor, entry: Tensor, exits: Tensor,
) -> list[Tensor]:  # fmt: skip
    return [
        torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v, g, w, states) if x is not None
    ]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    *tensors, subtree_end, ctx.chunk, states, entry, exits = inputs
    ctx.save_for_backward(*tensors, subtree_end, states, entry, exits)


def _backward(ctx: Any, grad: Tensor, of_left: Tensor) -> tuple[Any, ...]:
    q, k, v, g, w, subtree_end, states, entry, exits = ctx.saved_tensors
    given = (q, k, v, g, w, subtree_end, ctx.chunk, states, entry, exits)
    found = iter(torch.ops.treefx.part_scan_backward(grad, of_left, *given))
    of_inputs = [None if x is None else next(found) for x in (q, k, v, g, w)]
    return *of_inputs, None, None, next(found), None, None


part_scan.register_autograd(_backward, setup_context=_setup_context)
