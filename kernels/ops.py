"""Define ``treefx::tree_attention``: schema, fake, autograd, choice of implementation.

The query q sees the key k iff ``k <= q < subtree_end[k]`` (k is q or an ancestor of it) and the score's own
condition holds. The backward is a separate operator, so that checkpointing, functionalisation and
partitioners treat both as plain calls. Neither mutates or aliases an input. For any implementation and layout of q, k
and v, results of heads leave the operators in the layout of :func:`empty_heads_inside` and others dense, each in
separate memory, as in the fake implementations.

Part of a forest may have run elsewhere: the keys and values of P tokens above the own ones then come as a boundary, of
which key j is seen by the own queries i with ``lo[j] <= i < hi[j]``. There is one softmax over all of them. In a score
boundary tokens come first: key j of the boundary is token j, own token i is token P + i, and buffers along the tokens
hold P + N entries.

The operators are defined through ``torch.library.Library``, with the autograd formula in a function of their own:
``torch.library.custom_op`` would walk the arguments as a pytree on every call, which takes as long as a small forest's
attention.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from treefx.errors import InputError, UnsupportedError
from treefx.kernels import checks, reference
from treefx.kernels.common import Boundary, Inputs, empty_heads_inside, empty_outputs, heads_inside, own_dtypes, owned
from treefx.kernels.cpu import attention as cpu
from treefx.kernels.cpu import boundary as boundary_cpu
from treefx.kernels.cpu import one_call
from treefx.kernels.cuda_graphs import NOT_CAPTURED
from treefx.kernels.gpu import dispatch as cuda
from treefx.kernels.gpu import flex
from treefx.kernels.gpu.triton_tree import support as triton_support
from treefx.kernels.score import Score

__all__ = ["IMPLEMENTATIONS", "attend", "attend_with_lse", "choose_implementation"]

IMPLEMENTATIONS = ("auto", "reference", "cpu", "flex", "triton")
"""Values of ``impl``. ``auto``: ``cpu`` on the CPU; on CUDA ``triton`` where it runs and gives the reference's numbers,
else ``flex`` with a warning; ``reference`` for float64."""

_TAGS = (torch.Tag.pt2_compliant_tag, *NOT_CAPTURED)
"""The tile lists of a forest are made on the host: a captured CUDA graph would replay those of another forest."""
_SHARED = "Tensor q, Tensor k, Tensor v, Tensor subtree_end, Tensor[] buffers, Tensor? sinks"
_BOUNDARY = "Tensor? boundary_k=None, Tensor? boundary_v=None, Tensor? lo=None, Tensor? hi=None"
_FIXED = "*, bool deterministic=False"

_torch: Any = torch  # no types below
_library = _torch.library.Library("treefx", "FRAGMENT")
_library.define(
    f"tree_attention({_SHARED}, str score, str impl, {_BOUNDARY}, {_FIXED}) -> (Tensor, Tensor)", tags=_TAGS
)
_library.define(
    f"tree_attention_backward(Tensor grad_out, {_SHARED}, Tensor out, Tensor lse, str score, str impl, "
    f"bool[] buffer_grads, {_BOUNDARY}, {_FIXED}) -> (Tensor, Tensor, Tensor, Tensor[])",
    tags=_TAGS,
)
_operator = torch.ops.treefx.tree_attention.default
_backward_operator = torch.ops.treefx.tree_attention_backward.default


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    subtree_end: Tensor,
    score: Score,
    buffers: Sequence[Tensor] = (),
    sinks: Tensor | None = None,
    impl: str = "auto",
    boundary: Boundary | None = None,
    *,
    deterministic: bool = False,
) -> Tensor:
    """Attend along the paths of a forest with any score expression.

    Args:
        q: queries ``[B, H, N, D]``, any strides, any floating dtype.
        k: keys ``[B, Hkv, N, D]``; H is a multiple of Hkv.
        v: values ``[B, Hkv, N, Dv]``.
        subtree_end: int32 ``[N]``, shared by the batch; the caller guarantees that the subtrees nest.
        score: the logit and the extra condition.
        buffers: tensors that the score loads; floating ones that require grad receive it.
        sinks: one extra logit per query head ``[H]``, which takes weight and has no value.
        impl: one of :data:`IMPLEMENTATIONS`.
        boundary: keys and values of tokens above the own ones, and the own tokens that see them; its keys and values
            receive gradients. The score then counts P + N tokens.
        deterministic: whether gradients must be the same bits every time, as under
            ``torch.use_deterministic_algorithms``.

    Returns:
        ``[B, H, N, Dv]`` in the dtype of q, contiguous as ``[B, N, H, Dv]``. A query without a visible key
        gives 0.

    Raises:
        InputError: an unknown ``impl``, or a score that does not fit its buffers.
        UnsupportedError: the implementation cannot run these inputs.
    """
    if boundary is None and sinks is None and not buffers and not checks.EVERY and not torch.compiler.is_compiling():
        whole = one_call.attend(q, k, v, subtree_end, score, impl)
        if whole is not None:
            return heads_inside(whole)
    fixed = {"deterministic": True} if deterministic else {}
    return attend_with_lse(q, k, v, subtree_end, score, buffers, sinks, impl, boundary, **fixed)[0]


def attend_with_lse(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    subtree_end: Tensor,
    score: Score,
    buffers: Sequence[Tensor] = (),
    sinks: Tensor | None = None,
    impl: str = "auto",
    boundary: Boundary | None = None,
    **fixed: bool,
) -> tuple[Tensor, Tensor]:
    """Attend as :func:`attend` does, and return the logarithm of each query's sum of weights too.

    Returns:
        The result of :func:`attend`; and ``[B, H, N]`` in the dtype of sums, -inf for a query without a visible key and
        without a sink. It has no gradient.
    """
    outside = () if boundary is None else (boundary.k, boundary.v, boundary.lo, boundary.hi)
    out, lse = _operator(q, k, v, subtree_end, list(buffers), sinks, score.to_json(), impl, *outside, **fixed)
    return out, lse


def choose_implementation(impl: str, inputs: Inputs) -> Any:
    """Return the module that runs ``impl`` for these inputs; all read a boundary."""
    q = inputs.q
    if impl == "auto":
        if q.dtype == torch.float64:
            return reference
        impl = "cpu" if q.device.type == "cpu" else "cuda"
    if impl == "reference":
        return reference
    if impl == "flex":
        return flex
    if impl == "cuda":
        return cuda
    if impl == "cpu":
        if q.device.type != "cpu":
            raise UnsupportedError(f"impl='cpu' must get tensors on the CPU, got {q.device}: use impl='auto'")
        return cpu if inputs.boundary is None else boundary_cpu
    if impl == "triton":
        reason = triton_support.refusal(q)
        if reason is not None:
            raise UnsupportedError(f"impl='triton' {reason}")
        from treefx.kernels.gpu.triton_tree import attention  # only here: it brings in templates and sympy

        return attention
    raise InputError(f"impl must be one of {', '.join(IMPLEMENTATIONS)}, got {impl!r}")


def _inputs(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    subtree_end: Tensor,
    buffers: Sequence[Tensor],
    sinks: Tensor | None,
    outside: Sequence[Any],
    deterministic: bool = False,
) -> Inputs:
    """Bundle the operands; the dispatcher leaves out arguments that have their default value."""
    given = [tensor for tensor in outside if tensor is not None]
    if len(given) not in (0, 4):
        raise InputError(f"a boundary must be its keys, values, lo and hi, got {len(given)} of the four")
    return Inputs(q, k, v, subtree_end, buffers, sinks, Boundary(*given) if given else None, deterministic)


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    subtree_end: Tensor,
    buffers: list[Tensor],
    sinks: Tensor | None,
    score: str,
    impl: str,
    *outside: Tensor | None,
    deterministic: bool = False,
) -> tuple[Tensor, Tensor]:
    inputs = _inputs(q, k, v, subtree_end, buffers, sinks, outside, deterministic)
    if q.numel() == 0 or v.numel() == 0:
        out, lse = empty_outputs(q, v)
        return out.zero_(), lse.fill_(-torch.inf)
    with own_dtypes(q.device.type):
        out, lse = choose_implementation(impl, inputs).forward(inputs, Score.from_json(score))
        if checks.EVERY:
            checks.check_forward(inputs, Score.from_json(score), out, lse)
    return heads_inside(out), owned(lse)


def _forward_fake(q: Tensor, k: Tensor, v: Tensor, *others: Any, deterministic: bool = False) -> tuple[Tensor, Tensor]:
    return empty_outputs(q, v)


def _backward(
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
    *outside: Tensor | None,
    deterministic: bool = False,
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """Return the gradients of q, k, v, and a list of all others.

    Implementations return them in any layout.
    """
    inputs = _inputs(q, k, v, subtree_end, buffers, sinks, outside, deterministic)
    if q.numel() == 0 or v.numel() == 0:
        dq, dk, dv, *rest = [torch.zeros_like(leaf) for leaf in inputs.differentiable(buffer_grads)]
    else:
        with own_dtypes(q.device.type):
            module = choose_implementation(impl, inputs)
            given = (grad_out, inputs, out, lse, Score.from_json(score), buffer_grads)
            if checks.EVERY:
                checks.check_backward(module.backward, *given)
            dq, dk, dv, rest = module.backward(*given)
    grads, heads = [dq, dk, dv, *rest], _tensors_of_heads(inputs)
    dq, dk, dv, *rest = [*map(heads_inside, grads[:heads]), *map(owned, grads[heads:])]
    return dq, dk, dv, rest


def _tensors_of_heads(inputs: Inputs) -> int:
    """Count the differentiable tensors laid out as ``[B, H, N, D]``, which come first."""
    return 3 if inputs.boundary is None else 5


def _backward_fake(
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
    *outside: Tensor | None,
    deterministic: bool = False,
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    inputs = _inputs(q, k, v, subtree_end, buffers, sinks, outside)
    leaves, heads = inputs.differentiable(buffer_grads), _tensors_of_heads(inputs)
    dq, dk, dv, *rest = [
        *(empty_heads_inside(leaf, leaf.shape[-1]) for leaf in leaves[:heads]),
        *(leaf.new_empty(leaf.shape) for leaf in leaves[heads:]),
    ]
    return dq, dk, dv, rest


# Autograd -------------------------------------------------------------------------------------------------------------


def _below_autograd(operator: Any, keys: Any, arguments: Sequence[Any], fixed: dict[str, bool]) -> Any:
    with torch._C._AutoDispatchBelowAutograd():
        return operator.redispatch(keys & torch._C._after_autograd_keyset, *arguments, **fixed)


_Call = tuple[str, str, dict[str, bool]]
"""The score, ``impl``, and ``deterministic`` where it is asked for."""


class _Attention(torch.autograd.Function):
    """Apply the operator with its formula; autograd sees separate tensor arguments only."""

    @staticmethod
    def forward(ctx: Any, keys: Any, call: _Call, q: Any, k: Any, v: Any, ends: Any, sinks: Any, *others: Any) -> Any:
        outside, buffers = others[:4], others[4:]
        arguments = (q, k, v, ends, list(buffers), sinks, *call[:2], *outside)
        out, lse = _below_autograd(_operator, keys, arguments, call[2])
        ctx.save_for_backward(q, k, v, ends, sinks, *others, out, lse)
        ctx.call = call
        ctx.mark_non_differentiable(lse)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        needs = ctx.needs_input_grad
        if grads[0] is None:
            return (None,) * len(needs)
        q, k, v, ends, sinks, *others, out, lse = ctx.saved_tensors
        outside, buffers = others[:4], others[4:]
        marked = [bool(need) and buffer.is_floating_point() for need, buffer in zip(needs[11:], buffers, strict=True)]
        score, impl, fixed = ctx.call
        dq, dk, dv, rest = _backward_operator(
            grads[0], q, k, v, ends, buffers, sinks, out, lse, score, impl, marked, *outside, **fixed
        )
        left = list(rest)
        dbk, dbv = (None, None) if outside[0] is None else (left.pop(0), left.pop(0))
        dsinks = None if sinks is None else left.pop(0)
        dbuffers = [left.pop(0) if wanted else None for wanted in marked]
        return None, None, dq, dk, dv, None, dsinks, dbk, dbv, None, None, *dbuffers


class _Backward(torch.autograd.Function):
    """Apply the backward, which has no derivative."""

    @staticmethod
    def forward(ctx: Any, keys: Any, arguments: Sequence[Any], fixed: dict[str, bool], *tensors: Any) -> Any:
        del ctx, tensors
        dq, dk, dv, rest = _below_autograd(_backward_operator, keys, arguments, fixed)
        return dq, dk, dv, *rest

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise UnsupportedError("tree attention must be differentiated once, got a second derivative: it has none")


_differentiable: Callable[..., Any] = _Attention.apply
_refused_twice: Callable[..., Any] = _Backward.apply


def _records(tensors: Sequence[Tensor | None]) -> bool:
    return torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)


def _forward_autograd(
    keys: Any,
    q: Any,
    k: Any,
    v: Any,
    ends: Any,
    buffers: Any,
    sinks: Any,
    score: str,
    impl: str,
    *outside: Any,
    **fixed: bool,
) -> Any:
    if not _records((q, k, v, sinks, *buffers, *outside)):
        return _below_autograd(_operator, keys, (q, k, v, ends, buffers, sinks, score, impl, *outside), fixed)
    missing = (None,) * (4 - len(outside))
    return _differentiable(keys, (score, impl, fixed), q, k, v, ends, sinks, *outside, *missing, *buffers)


def _backward_autograd(keys: Any, *arguments: Any, **fixed: bool) -> Any:
    flat = [item for item in arguments if isinstance(item, Tensor)]
    flat += [item for entry in arguments if isinstance(entry, list) for item in entry if isinstance(item, Tensor)]
    if not _records(flat):
        return _below_autograd(_backward_operator, keys, arguments, fixed)
    dq, dk, dv, *rest = _refused_twice(keys, arguments, fixed, *flat)
    return dq, dk, dv, rest


def _register(name: str, kernel: Callable[..., Any], fake: Callable[..., Any], autograd: Callable[..., Any]) -> None:
    # Dynamo must not trace into the operator.
    _library.impl(name, _torch._disable_dynamo(kernel), "CompositeExplicitAutograd")
    _library.impl(name, _torch._disable_dynamo(autograd), "Autograd", with_keyset=True)
    torch.library.register_fake(f"treefx::{name}", fake, lib=_library)


_register("tree_attention", _forward, _forward_fake, _forward_autograd)
_register("tree_attention_backward", _backward, _backward_fake, _backward_autograd)
