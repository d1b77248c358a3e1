"""The operator ``treefx::tree_attention``: schema, fake implementation, autograd, choice of implementation.

The query q sees the key k iff ``k <= q < subtree_end[k]`` (k is q or an ancestor of it) and the score's own
condition holds. The backward is an operator of its own, so that checkpointing, functionalisation and
partitioners treat both as plain calls. Neither mutates or aliases an input.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from treefx.errors import InputError, UnsupportedError
from treefx.kernels import cpu, cuda, flex, reference
from treefx.kernels.common import Inputs, empty_heads_inside, empty_outputs
from treefx.kernels.score import Score
from treefx.kernels.triton_tree import support as triton_support

__all__ = ["IMPLEMENTATIONS", "OPERATOR_TAGS", "attend"]

IMPLEMENTATIONS = ("auto", "reference", "cpu", "flex", "triton")
"""Values of ``impl``. ``auto``: ``cpu`` on the CPU; on CUDA ``triton`` where it runs and gives the reference's numbers,
else ``flex`` with a warning; ``reference`` for float64."""

OPERATOR_TAGS = (torch.Tag.cudagraph_unsafe,)
"""The tile lists of a forest are made on the host: a captured CUDA graph would replay those of another forest."""


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    subtree_end: Tensor,
    score: Score,
    buffers: Sequence[Tensor] = (),
    sinks: Tensor | None = None,
    impl: str = "auto",
) -> Tensor:
    """Attend along the paths of a forest with any score expression.

    Args:
        q: queries ``[B, H, N, D]``, any strides, any floating dtype.
        k: keys ``[B, Hkv, N, D]``; H is a multiple of Hkv.
        v: values ``[B, Hkv, N, Dv]``.
        subtree_end: int32 ``[N]``, shared by the batch; the caller guarantees that the subtrees nest.
        score: the logit and the extra condition.
        buffers: what the score loads from; floating ones that require grad receive it.
        sinks: one extra logit per query head ``[H]``, which takes weight and has no value.
        impl: one of :data:`IMPLEMENTATIONS`.

    Returns:
        ``[B, H, N, Dv]`` in the dtype of q, contiguous as ``[B, N, H, Dv]``. A query without a visible key
        gives 0.

    Raises:
        InputError: an unknown ``impl``, or a score that does not fit its buffers.
        UnsupportedError: the implementation cannot run these inputs.
    """
    out, _ = torch.ops.treefx.tree_attention(q, k, v, subtree_end, list(buffers), sinks, score.to_json(), impl)
    result: Tensor = out
    return result


def choose_implementation(impl: str, inputs: Inputs) -> Any:
    """Return the module that runs ``impl`` for these inputs."""
    q = inputs.q
    if impl == "auto":
        on_device = cpu if q.device.type == "cpu" else cuda
        return reference if q.dtype == torch.float64 else on_device
    if impl == "reference":
        return reference
    if impl == "flex":
        return flex
    if impl == "cpu":
        if q.device.type != "cpu":
            raise UnsupportedError(f"impl='cpu' must get tensors on the CPU, got {q.device}: use impl='auto'")
        return cpu
    if impl == "triton":
        reason = triton_support.refusal(q)
        if reason is not None:
            raise UnsupportedError(f"impl='triton' {reason}")
        from treefx.kernels.triton_tree import attention  # only here: it brings in templates and sympy

        return attention
    raise InputError(f"impl must be one of {', '.join(IMPLEMENTATIONS)}, got {impl!r}")


@torch.library.custom_op("treefx::tree_attention", mutates_args=(), tags=OPERATOR_TAGS)
def _tree_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    subtree_end: Tensor,
    buffers: list[Tensor],
    sinks: Tensor | None,
    score: str,
    impl: str,
) -> tuple[Tensor, Tensor]:
    inputs = Inputs(q, k, v, subtree_end, buffers, sinks)
    if q.numel() == 0 or v.numel() == 0:
        out, lse = empty_outputs(q, v)
        return out.zero_(), lse.fill_(-torch.inf)
    with torch.autocast(q.device.type, enabled=False):  # dtypes are settled outside
        parsed = Score.from_json(score)
        result: tuple[Tensor, Tensor] = choose_implementation(impl, inputs).forward(inputs, parsed)
    return result


@_tree_attention.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    subtree_end: Tensor,
    buffers: list[Tensor],
    sinks: Tensor | None,
    score: str,
    impl: str,
) -> tuple[Tensor, Tensor]:
    return empty_outputs(q, v)


@torch.library.custom_op("treefx::tree_attention_backward", mutates_args=(), tags=OPERATOR_TAGS)
def _tree_attention_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    subtree_end: Tensor,
    buffers: list[Tensor],
    sinks: Tensor | None,
    out: Tensor,
    lse: Tensor,
    score: str,
    impl: str,
    buffer_grads: list[bool],
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """Return the gradients of q, k, v, and a list: that of sinks if given, then the marked buffers'."""
    inputs = Inputs(q, k, v, subtree_end, buffers, sinks)
    if q.numel() == 0 or v.numel() == 0:
        first, second, third, *rest = [torch.zeros_like(leaf) for leaf in inputs.differentiable(buffer_grads)]
        return _laid_out(first), _laid_out(second), _laid_out(third), rest
    parsed = Score.from_json(score)
    module = choose_implementation(impl, inputs)
    with torch.autocast(q.device.type, enabled=False):
        dq, dk, dv, rest = module.backward(grad_out, inputs, out, lse, parsed, buffer_grads)
    return _laid_out(dq), _laid_out(dk), _laid_out(dv), rest


def _laid_out(grad: Tensor) -> Tensor:
    return grad.transpose(1, 2).contiguous().transpose(1, 2)


@_tree_attention_backward.register_fake
def _(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    subtree_end: Tensor,
    buffers: list[Tensor],
    sinks: Tensor | None,
    out: Tensor,
    lse: Tensor,
    score: str,
    impl: str,
    buffer_grads: list[bool],
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    first, second, third, *rest = Inputs(q, k, v, subtree_end, buffers, sinks).differentiable(buffer_grads)
    grads = [empty_heads_inside(leaf, leaf.shape[-1]) for leaf in (first, second, third)]
    return grads[0], grads[1], grads[2], [leaf.new_empty(leaf.shape) for leaf in rest]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, subtree_end, buffers, sinks, score, impl = inputs
    ctx.save_for_backward(q, k, v, subtree_end, *buffers, sinks, *output)
    ctx.score, ctx.impl = score, impl
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad_out: Tensor | None, _grad_lse: Tensor | None) -> tuple[Any, ...]:
    q, k, v, subtree_end, *buffers, sinks, out, lse = ctx.saved_tensors
    needs = ctx.needs_input_grad
    buffer_grads = [bool(need) and buffer.is_floating_point() for need, buffer in zip(needs[4], buffers, strict=True)]
    if grad_out is None:
        return None, None, None, None, [None] * len(buffers), None, None, None
    dq, dk, dv, rest = torch.ops.treefx.tree_attention_backward(
        grad_out, q, k, v, subtree_end, buffers, sinks, out, lse, ctx.score, ctx.impl, buffer_grads
    )
    rest = list(rest)
    sink_grad = rest.pop(0) if sinks is not None else None
    buffer_list = [rest.pop(0) if wanted else None for wanted in buffer_grads]
    return dq, dk, dv, None, buffer_list, sink_grad, None, None


_tree_attention.register_autograd(_backward, setup_context=_setup_context)
