"""Run a library's recurrence kernel over one part of a cut forest: ``treefx::library_part``.

As ``treefx::library_tree``, but roots start from states of parts above, and states leave to parts below
(``treefx.kernels.recurrence.part_scan``). Each part takes the form that launches fewer kernels; states have the layout
of ``tree_scan`` between parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from treefx.kernels.common import accumulation_dtype, autograd_enabled, owned
from treefx.kernels.cuda_graphs import NOT_CAPTURED
from treefx.kernels.recurrence.part_scan import part_recurrence
from treefx.kernels.recurrence.tree_chunks import Doors
from treefx.kernels.recurrence.tree_levels import find_part_levels, levels_cost_less, run_part_levels
from treefx.kernels.recurrence.tree_scan import CHUNK
from treefx.passes.trace.library_calls import LibraryCall, call_of
from treefx.passes.trace.library_tree import Leveled, leveled, step_of

__all__ = ["library_part", "state_of"]


def state_of(tensors: Sequence[Tensor], key: str) -> tuple[tuple[int, int, int], torch.dtype]:
    """Return the shape [H, D, E] and the dtype of a call's states, by its packed tensors."""
    call = call_of(key)
    how, given = _how(call), call.arguments(tensors)
    heads, width = given[how.like].shape[2:]
    return (int(heads), int(given[how.keys].shape[-1]), int(width)), accumulation_dtype(given[how.like])


def _how(call: LibraryCall) -> Leveled:
    how = leveled(call)
    assert how is not None, "a call without states does not run along a tree"
    return how


@torch.library.custom_op("treefx::library_part", mutates_args=(), tags=NOT_CAPTURED)
def library_part(
    tensors: list[Tensor], subtree_end: Tensor, key: str, states: Tensor, entry: Tensor, exits: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the result of a call along the paths of a part, [1, N, ...], and the states that leave [X, H, D, E].

    Args:
        tensors: as subtree_end and key, those of ``treefx::library_tree``.
        states: that enter [S, H, D, E].
        entry: see ``Doors``, as exits.
    """
    out, left = _along_part(call_of(key), tensors, subtree_end, states, Doors(len(states), entry, exits))
    return owned(out), owned(left)


@library_part.register_fake
def _(
    tensors: list[Tensor], subtree_end: Tensor, key: str, states: Tensor, entry: Tensor, exits: Tensor
) -> tuple[Tensor, Tensor]:
    call = call_of(key)
    return call.kind.result(call.arguments(tensors)), states.new_empty(exits.shape[0], *states.shape[1:])


def _along_part(
    call: LibraryCall, tensors: Sequence[Tensor], subtree_end: Tensor, states: Tensor, doors: Doors
) -> tuple[Tensor, Tensor]:
    how, levels = _how(call), find_part_levels(subtree_end, doors)
    with torch.autocast(tensors[0].device.type, enabled=False):  # dtypes are settled outside
        read = call.kind.read
        if read is None or levels_cost_less(levels, subtree_end, CHUNK, padded=how.padded, doors=doors):
            given = states.mT.contiguous() if how.transposed else states
            out, left = run_part_levels(*step_of(call, how, tensors), levels, given)
            return out, left.mT if how.transposed else left
        leaving: list[Tensor] = []

        def scan(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None) -> Tensor:
            q, k, v, g = (x.squeeze(0) for x in (q, k, v, g))
            step = None if beta is None else beta.squeeze(0)
            found, left = part_recurrence(q, k, v, g, step, subtree_end, states, doors)
            leaving.append(left)
            return found[None]

        out = read(call.arguments(tensors), scan, None)
        return out, leaving[0]


@torch.library.custom_op("treefx::library_part_backward", mutates_args=(), tags=NOT_CAPTURED)
def library_part_backward(
    grad: Tensor, of_left: Tensor, tensors: list[Tensor], subtree_end: Tensor, key: str, states: Tensor,
    entry: Tensor, exits: Tensor,
) -> list[Tensor]:  # fmt: skip
    """Return gradients of all floating-point tensors in order, then of the states; rerun the forward."""
    leaves = [x.detach().requires_grad_(x.is_floating_point()) for x in tensors]
    first = states.detach().requires_grad_()
    learned = [*(x for x in leaves if x.requires_grad), first]
    with autograd_enabled():
        results = _along_part(call_of(key), leaves, subtree_end, first, Doors(len(states), entry, exits))
        pairs = [(x, of) for x, of in zip(results, (grad, of_left), strict=True) if x.requires_grad]
        outputs, gradients = [x for x, _ in pairs], [of for _, of in pairs]
        found = torch.autograd.grad(outputs, learned, gradients, allow_unused=True)
    return [torch.zeros_like(x) if of is None else owned(of) for of, x in zip(found, learned, strict=True)]


@library_part_backward.register_fake
def _(
    grad: Tensor, of_left: Tensor, tensors: list[Tensor], subtree_end: Tensor, key: str, states: Tensor,
    entry: Tensor, exits: Tensor,
) -> list[Tensor]:  # fmt: skip
    learned = [*(x for x in tensors if x.is_floating_point()), states]
    return [torch.empty_like(x, memory_format=torch.contiguous_format) for x in learned]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    tensors, subtree_end, ctx.key, states, entry, exits = inputs
    ctx.save_for_backward(*tensors, subtree_end, states, entry, exits)


def _backward(ctx: Any, grad: Tensor, of_left: Tensor) -> tuple[Any, ...]:
    *tensors, subtree_end, states, entry, exits = ctx.saved_tensors
    given = (tensors, subtree_end, ctx.key, states, entry, exits)
    found = iter(torch.ops.treefx.library_part_backward(grad, of_left, *given))
    return [next(found) if x.is_floating_point() else None for x in tensors], None, None, next(found), None, None


library_part.register_autograd(_backward, setup_context=_setup_context)
