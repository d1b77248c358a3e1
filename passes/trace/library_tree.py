"""Run a library's recurrence kernel along a tree: ``treefx::library_tree``, by level.

flash-linear-attention and mamba_ssm start sequences from given states and return final ones, so that a forest runs
level by level (``tree_levels``), every node from its parent's state. Where the operator ``tree_scan`` has the
recurrence too, each forest takes the form that launches fewer kernels: many levels of short nodes run there.

=============================  ==============================================================================
``chunk_gated_delta_rule``     the nodes of a level are sequences of one row (``cu_seqlens``)
``chunk_kda``                  likewise; there is no other form along a tree
``mamba_chunk_scan_combined``  takes states per row only: the nodes of a level are rows, padded by steps of 0
=============================  ==============================================================================

A graph on a GPU keeps these calls whole, and a law reads them as ``library_tree``; on a CPU they are read as
operators that passes know (``library_calls.read_call``), except where there is no such form.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from treefx.kernels.common import autograd_enabled, owned
from treefx.kernels.cuda_graphs import NOT_CAPTURED
from treefx.kernels.recurrence.tree_levels import Level, Step, find_levels, levels_cost_less, run_levels
from treefx.kernels.recurrence.tree_scan import CHUNK, tree_delta_rule, tree_ssd
from treefx.passes.trace.flash import number_segments
from treefx.passes.trace.library_calls import (
    Arguments,
    Given,
    LibraryCall,
    call_of,
    read_call,
    steps_of,
    unfused,
)

__all__ = ["Leveled", "call_library", "find_inner", "leveled", "library_tree", "step_of", "tokens_of"]

_KEPT_WHOLE = {"cuda"}
"""Devices on which a library's kernel is worth calling where ``tree_scan`` has the recurrence."""


@dataclass(frozen=True)
class Leveled:
    """How a function runs level by level.

    Attributes:
        step: runs one level of a call; takes the call, and the arguments of a ``Step``.
        of_tokens: the operands [B, T, ...] that have a value per token; the others have none.
        like: the operand with the shape of the result.
        needs: arguments by which the library takes and returns states.
        keys: the operand with as many features as a state has rows.
        padded: whether the nodes of a level are padded to the longest.
        transposed: whether the library's states are ``[H, E, D]``, not ``[H, D, E]``.
    """

    step: Any
    of_tokens: frozenset[str]
    like: str
    needs: frozenset[str]
    keys: str
    padded: bool = False
    transposed: bool = False


def _as_sequences(
    call: LibraryCall, numbers: Sequence[int], fixed: Sequence[Tensor | None], taken: list[Tensor],
    states: Tensor | None, level: Level,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """One row with all nodes of a level."""
    args, kwargs = call.filled(_placed(numbers, fixed, taken))
    kwargs |= {"initial_state": states, "output_final_state": level.returns_states, "cu_seqlens": level.bounds}
    out, final = call.function(*args, **kwargs)
    return out, final


def _as_rows(
    call: LibraryCall, numbers: Sequence[int], fixed: Sequence[Tensor | None], taken: list[Tensor],
    states: Tensor | None, level: Level,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """A row per node, padded by steps of 0, which leave its state."""
    given = call.arguments(_placed(numbers, fixed, taken))
    given["dt"] = given["dt"].to(torch.promote_types(torch.float32, given["dt"].dtype))
    first, lengths = level.bounds[:-1], level.bounds.diff()
    column = torch.arange(level.longest, device=first.device)
    place = first[:, None] + torch.minimum(column, lengths[:, None] - 1)
    x, b, c = (given[name].squeeze(0)[place] for name in ("hidden_states", "B", "C"))
    dt = steps_of(given).squeeze(0)[place].masked_fill((column >= lengths[:, None])[..., None], 0)
    result = call.function(
        x, dt, given["A"], b, c, given["chunk_size"],
        D=given.get("D"), initial_states=states, return_final_states=level.returns_states,
    )  # fmt: skip
    out, final = result if level.returns_states else (result, None)
    count = len(level.tokens)
    node = torch.repeat_interleave(lengths, output_size=count)
    places = torch.arange(count, device=first.device) - first[node] + node * level.longest
    return out.flatten(0, 1).index_select(0, places)[None], final


def _placed(numbers: Sequence[int], fixed: Sequence[Tensor | None], taken: Sequence[Tensor]) -> list[Any]:
    """All tensors of a call: those without tokens, and those of a level in their places."""
    found: list[Any] = list(fixed)
    for number, tensor in zip(numbers, taken, strict=True):
        found[number] = tensor
    return found


_STATE_SPACE = "mamba_chunk_scan_combined"
_DELTA = frozenset({"query", "key", "value", "g", "beta"})
_SEQUENCES = frozenset({"initial_state", "output_final_state", "cu_seqlens"})
_LEVELED = {
    "chunk_gated_delta_rule": Leveled(_as_sequences, _DELTA, "value", _SEQUENCES, "key"),
    "chunk_kda": Leveled(_as_sequences, _DELTA, "value", _SEQUENCES, "key"),
    _STATE_SPACE: Leveled(
        _as_rows, frozenset({"hidden_states", "dt", "B", "C"}), "hidden_states",
        frozenset({"initial_states", "return_final_states"}), "B", padded=True, transposed=True,
    ),
}  # fmt: skip


def leveled(call: LibraryCall) -> Leveled | None:
    """Return how a call runs by level; None where the function or release has no states."""
    found = _LEVELED.get(call.name)
    return found if found is not None and found.needs <= call.takes else None


def call_library(tensors: Sequence[Tensor], key: str, known: dict[int, tuple[Tensor, Tensor]]) -> Tensor:
    """Return the result of a call for passes: whole where it runs by level, else operators.

    Args:
        tensors: of the call.
        key: of the call.
        known: segments of the graph, as ``number_segments`` takes them.
    """
    call = call_of(key)
    segments = _segments_of(call, tensors, known)
    is_kept = call.kind.read is None or tensors[0].device.type in _KEPT_WHOLE
    if is_kept and leveled(call) is not None:
        result: Tensor = torch.ops.treefx.library(list(tensors), key, segments)
        return result
    if is_kept and call.inner is not None and leveled(call.inner) is not None:
        return unfused(call.arguments(tensors), partial(_state_space, call.inner.key, segments), segments)
    return read_call(tensors, key, segments)


def _segments_of(call: LibraryCall, tensors: Sequence[Tensor], known: dict[int, tuple[Tensor, Tensor]]) -> Any:
    """The numbers of packed sequences [B, T]; None where a call has none."""
    ends = call.separator("cu_seqlens", tensors)
    if ends is None:
        return call.separator("seq_idx", tensors)
    return number_segments(known, None, ends, call.kind.result(call.arguments(tensors)).shape[call.kind.tokens])


def find_inner(
    name: str, implementation: Any, given: Mapping[str, Any], *, is_packed: bool = False
) -> LibraryCall | None:
    """Return the call of the recurrence alone, of a function that fuses it with others.

    Args:
        name: of the fused function.
        implementation: the library's.
        given: its arguments by name, tensors as ``Given``.
        is_packed: whether it gets ``seq_idx``.
    """
    function = getattr(inspect.getmodule(implementation), _STATE_SPACE, None)
    if name != "mamba_split_conv1d_scan_combined" or function is None:
        return None
    present = [item for item in ("D", "dt_bias") if given.get(item) is not None]
    named = tuple((item, Given(5 + number)) for number, item in enumerate(present))
    fixed = tuple((item, given[item]) for item in ("dt_limit",) if item in given)
    return LibraryCall(
        _STATE_SPACE, function, f"{function.__module__}.{_STATE_SPACE}", _state_space_arguments,
        (*map(Given, range(5)), given["chunk_size"]), (*named, *fixed, ("dt_softplus", True)),
        frozenset(inspect.signature(function).parameters),
        ("seq_idx", Given(5 + len(present))) if is_packed else None,
    )  # fmt: skip


def _state_space_arguments(
    hidden_states: Any, dt: Any, A: Any, B: Any, C: Any, chunk_size: Any, D: Any = None,
    dt_bias: Any = None, dt_limit: Any = None, dt_softplus: bool = False,
) -> None:  # fmt: skip
    """Names of arguments, for ``inspect.signature``."""


def _state_space(key: str, segments: Tensor | None, given: Arguments) -> Tensor:
    tensors = [*(given.get(name) for name in ("hidden_states", "dt", "A", "B", "C", "D", "dt_bias")), segments]
    result: Tensor = torch.ops.treefx.library([x for x in tensors if x is not None], key, segments)
    return result


@torch.library.custom_op("treefx::library_tree", mutates_args=(), tags=NOT_CAPTURED)
def library_tree(tensors: list[Tensor], subtree_end: Tensor, key: str) -> Tensor:
    """The result of a call along the paths of a forest.

    Args:
        tensors: of the call; those of tokens are packed, [1, N, ...].
        subtree_end: exclusive end of each token's subtree, int [N].
        key: of the call.

    Returns:
        [1, N, ...].
    """
    return owned(_along_tree(call_of(key), tensors, subtree_end))


@library_tree.register_fake
def _(tensors: list[Tensor], subtree_end: Tensor, key: str) -> Tensor:
    call = call_of(key)
    return call.kind.result(call.arguments(tensors))


def _along_tree(call: LibraryCall, tensors: Sequence[Tensor], subtree_end: Tensor) -> Tensor:
    how, levels = leveled(call), find_levels(subtree_end)
    assert how is not None
    with torch.autocast(tensors[0].device.type, enabled=False):  # dtypes are settled outside
        read = call.kind.read
        if read is not None and not levels_cost_less(levels, subtree_end, CHUNK, padded=how.padded):
            return read(call.arguments(tensors), partial(_tree_scan, subtree_end), None)
        return run_levels(*step_of(call, how, tensors), levels)


def step_of(call: LibraryCall, how: Leveled, tensors: Sequence[Tensor]) -> tuple[Step, list[Tensor]]:
    """Return the step of a level, and the values of tokens that it takes."""
    numbers = tokens_of(call, how, len(tensors))
    fixed = [None if number in numbers else x for number, x in enumerate(tensors)]
    return partial(how.step, call, numbers, fixed), [tensors[number] for number in numbers]


def tokens_of(call: LibraryCall, how: Leveled, count: int) -> list[int]:
    """Return the numbers of the call's tensors that have a value per token."""
    named = call.arguments([Given(number) for number in range(count)])
    return [item.number for name, item in named.items() if isinstance(item, Given) and name in how.of_tokens]


def _tree_scan(subtree_end: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, step: Tensor | None) -> Tensor:
    q, k, v, g = (x.squeeze(0) for x in (q, k, v, g))
    if step is None:
        return tree_ssd(q, k, v, g, subtree_end)[None]
    return tree_delta_rule(q, k, v, g, step.squeeze(0), subtree_end)[None]


@torch.library.custom_op("treefx::library_tree_backward", mutates_args=(), tags=NOT_CAPTURED)
def library_tree_backward(grad: Tensor, tensors: list[Tensor], subtree_end: Tensor, key: str) -> list[Tensor]:
    """Return gradients of all floating-point tensors in order; rerun the forward."""
    leaves = [x.detach().requires_grad_(x.is_floating_point()) for x in tensors]
    learned = [x for x in leaves if x.requires_grad]
    with autograd_enabled():
        found = torch.autograd.grad(_along_tree(call_of(key), leaves, subtree_end), learned, grad, allow_unused=True)
    return [torch.zeros_like(x) if of is None else owned(of) for of, x in zip(found, learned, strict=True)]


@library_tree_backward.register_fake
def _(grad: Tensor, tensors: list[Tensor], subtree_end: Tensor, key: str) -> list[Tensor]:
    learned = [x for x in tensors if x.is_floating_point()]
    return [torch.empty_like(x, memory_format=torch.contiguous_format) for x in learned]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[0], inputs[1])
    ctx.key = inputs[2]


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    *tensors, subtree_end = ctx.saved_tensors
    found = iter(torch.ops.treefx.library_tree_backward(grad, tensors, subtree_end, ctx.key))
    return [next(found) if x.is_floating_point() else None for x in tensors], None, None


library_tree.register_autograd(_backward, setup_context=_setup_context)
