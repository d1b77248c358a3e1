"""The operator ``treefx::tree_attention_boundary``: tree attention of a part whose ancestors ran elsewhere.

A part of a forest holds N tokens; P tokens above them ran in other parts, and their keys and values come as inputs.
Own keys are seen as ever (``k <= q < subtree_end[k]``), key j of the boundary by the own queries i with ``lo[j] <= i <
hi[j]``. Attention over all of them has the parts' one softmax, so with ``(out_i, lse_i)`` of the own keys and of the
boundary, ``lse = logaddexp(lse_1, lse_2)`` and ``out = sum_i out_i exp(lse_i - lse)``; the backward of each with the
merged out and lse is the exact gradient, those of the boundary's keys and values included.

In a score, boundary tokens come first: key j of the boundary is token j, own token i is token P + i, and buffers along
the tokens hold P + N entries.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from treefx.errors import UnsupportedError
from treefx.kernels import boundary_cpu, cpu, flex, ops, reference
from treefx.kernels.common import Boundary, Inputs, empty_heads_inside, empty_outputs
from treefx.kernels.score import Score

__all__ = ["attend_with_boundary"]


def attend_with_boundary(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    subtree_end: Tensor,
    boundary: Boundary,
    score: Score,
    buffers: Sequence[Tensor] = (),
    sinks: Tensor | None = None,
    impl: str = "auto",
) -> Tensor:
    """Attend along the paths of a forest, the upper part of which is given as keys and values.

    Args:
        q: queries ``[B, H, N, D]``.
        k: own keys ``[B, Hkv, N, D]``.
        v: own values ``[B, Hkv, N, Dv]``.
        subtree_end: int32 ``[N]`` among the own tokens.
        boundary: keys, values and the own tokens that see them; P may be 0. Its keys and values receive gradients.
        score: the logit and the extra condition, on P + N tokens.
        buffers: what the score loads from.
        sinks: one extra logit per query head ``[H]``.
        impl: as for ``attend``.

    Returns:
        ``[B, H, N, Dv]``, contiguous as ``[B, N, H, Dv]``.

    Raises:
        InputError: an unknown ``impl``, or a score that does not fit its buffers.
        UnsupportedError: the implementation cannot run these inputs.
    """
    b = boundary
    out, _ = torch.ops.treefx.tree_attention_boundary(
        q, k, v, subtree_end, b.k, b.v, b.lo, b.hi, list(buffers), sinks, score.to_json(), impl
    )
    result: Tensor = out
    return result


_WITH_BOUNDARY: dict[Any, Any] = {reference: reference, flex: flex, cpu: boundary_cpu}
"""For each implementation of tree attention the module that reads ``Inputs.boundary``; others would ignore it."""


def _implementation(impl: str, inputs: Inputs) -> Any:
    module = ops.choose_implementation(impl, inputs)
    if getattr(module, "READS_BOUNDARY", False):
        return module
    if module in _WITH_BOUNDARY:
        return _WITH_BOUNDARY[module]
    raise UnsupportedError(f"impl must be one that reads keys from outside, got {impl!r}: use impl='auto'")


@torch.library.custom_op("treefx::tree_attention_boundary", mutates_args=(), tags=ops.OPERATOR_TAGS)
def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    subtree_end: Tensor,
    boundary_k: Tensor,
    boundary_v: Tensor,
    lo: Tensor,
    hi: Tensor,
    buffers: list[Tensor],
    sinks: Tensor | None,
    score: str,
    impl: str,
) -> tuple[Tensor, Tensor]:
    inputs = Inputs(q, k, v, subtree_end, buffers, sinks, Boundary(boundary_k, boundary_v, lo, hi))
    with torch.autocast(q.device.type, enabled=False):  # dtypes are settled outside
        parsed = Score.from_json(score)
        result: tuple[Tensor, Tensor] = _implementation(impl, inputs).forward(inputs, parsed)
    return result


@_attention.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    subtree_end: Tensor,
    boundary_k: Tensor,
    boundary_v: Tensor,
    lo: Tensor,
    hi: Tensor,
    buffers: list[Tensor],
    sinks: Tensor | None,
    score: str,
    impl: str,
) -> tuple[Tensor, Tensor]:
    return empty_outputs(q, v)


@torch.library.custom_op("treefx::tree_attention_boundary_backward", mutates_args=(), tags=ops.OPERATOR_TAGS)
def _attention_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    subtree_end: Tensor,
    boundary_k: Tensor,
    boundary_v: Tensor,
    lo: Tensor,
    hi: Tensor,
    buffers: list[Tensor],
    sinks: Tensor | None,
    out: Tensor,
    lse: Tensor,
    score: str,
    impl: str,
    buffer_grads: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, list[Tensor]]:
    """Return the gradients of q, k, v, of the boundary's k and v, and a list: of sinks if given, of marked buffers."""
    inputs = Inputs(q, k, v, subtree_end, buffers, sinks, Boundary(boundary_k, boundary_v, lo, hi))
    parsed = Score.from_json(score)
    module = _implementation(impl, inputs)
    with torch.autocast(q.device.type, enabled=False):
        dq, dk, dv, rest = module.backward(grad_out, inputs, out, lse, parsed, buffer_grads)
    dbk, dbv, *others = rest
    first, second, third, fourth, fifth = (_laid_out(grad) for grad in (dq, dk, dv, dbk, dbv))
    return first, second, third, fourth, fifth, others


def _laid_out(grad: Tensor) -> Tensor:
    return grad.transpose(1, 2).contiguous().transpose(1, 2)


@_attention_backward.register_fake
def _(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    subtree_end: Tensor,
    boundary_k: Tensor,
    boundary_v: Tensor,
    lo: Tensor,
    hi: Tensor,
    buffers: list[Tensor],
    sinks: Tensor | None,
    out: Tensor,
    lse: Tensor,
    score: str,
    impl: str,
    buffer_grads: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, list[Tensor]]:
    inputs = Inputs(q, k, v, subtree_end, buffers, sinks, Boundary(boundary_k, boundary_v, lo, hi))
    leaves = inputs.differentiable(buffer_grads)
    first, second, third, fourth, fifth = (empty_heads_inside(leaf, leaf.shape[-1]) for leaf in leaves[:5])
    return first, second, third, fourth, fifth, [leaf.new_empty(leaf.shape) for leaf in leaves[5:]]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, buffers, sinks, score, impl = inputs
    ctx.save_for_backward(*tensors, *buffers, sinks, *output)
    ctx.score, ctx.impl = score, impl
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad_out: Tensor | None, _grad_lse: Tensor | None) -> tuple[Any, ...]:
    tensors, (*buffers, sinks, out, lse) = ctx.saved_tensors[:8], ctx.saved_tensors[8:]
    needs = ctx.needs_input_grad
    buffer_grads = [bool(need) and buffer.is_floating_point() for need, buffer in zip(needs[8], buffers, strict=True)]
    if grad_out is None:
        return (*[None] * 8, [None] * len(buffers), None, None, None)
    dq, dk, dv, dbk, dbv, rest = torch.ops.treefx.tree_attention_boundary_backward(
        grad_out, *tensors, buffers, sinks, out, lse, ctx.score, ctx.impl, buffer_grads
    )
    rest = list(rest)
    sink_grad = rest.pop(0) if sinks is not None else None
    buffer_list = [rest.pop(0) if wanted else None for wanted in buffer_grads]
    return dq, dk, dv, None, dbk, dbv, None, None, buffer_list, sink_grad, None, None


_attention.register_autograd(_backward, setup_context=_setup_context)
