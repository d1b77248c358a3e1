"""Operators that the first trace keeps whole, because later passes read them by name.

``treefx::attention`` stands for ``F.scaled_dot_product_attention`` until it is rewritten or written back.
``treefx::custom_function`` stands for a user's ``autograd.Function``: its backward is the user's own and may differ
from the derivative of its forward, so neither body may be traced through and differentiated again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from treefx.kernels.common import owned

__all__ = ["attention", "custom_function", "is_pointwise_body", "is_pointwise_function", "register_function"]


@torch.library.custom_op("treefx::attention", mutates_args=())
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> Tensor:
    """``F.scaled_dot_product_attention`` with every argument explicit.

    Shapes: query [..., H, T, D], key [..., Hkv, S, D], value [..., Hkv, S, Dv], result [..., H, T, Dv].
    """
    # torch's kernels choose a layout by the inputs', the fake implementation cannot follow all of them
    return owned(
        F.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    )


@attention.register_fake
def _(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> Tensor:
    return query.new_empty([*query.shape[:-1], value.shape[-1]])


@dataclass(frozen=True)
class _Function:
    """The two bodies of an ``autograd.Function``: forward -> (outputs, saved), backward(*grads, *saved) -> grads."""

    forward: fx.GraphModule
    backward: fx.GraphModule


_FUNCTIONS: dict[str, _Function] = {}


def register_function(forward: fx.GraphModule, backward: fx.GraphModule) -> str:
    """Keep a pair of bodies; returns its key, a hash of their code."""
    code = forward.code + backward.code
    key = hashlib.sha256(code.encode()).hexdigest()[:16]
    _FUNCTIONS.setdefault(key, _Function(forward, backward))
    return key


def is_pointwise_function(key: str) -> bool:
    """Whether both bodies are made of pointwise operators alone, and so mean the same on any shape."""
    function = _FUNCTIONS[key]
    return all(is_pointwise_body(body) for body in (function.forward, function.backward))


def is_pointwise_body(body: fx.GraphModule) -> bool:
    """Whether a body is made of pointwise operators alone: it is run on one shape under a recorder."""
    examples = [
        node.meta.get("example_value", node.meta.get("val")) for node in body.graph.find_nodes(op="placeholder")
    ]
    if not examples or any(not isinstance(example, Tensor) for example in examples):
        return False
    if len({tuple(example.shape) for example in examples}) != 1:
        return False
    inputs = [torch.ones(2, 3, dtype=example.dtype) for example in examples]
    recorder = _PointwiseRecorder()
    with torch.no_grad(), recorder:
        fx.Interpreter(body).run(*inputs)
    return recorder.all_pointwise


class _PointwiseRecorder(torch.utils._python_dispatch.TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.all_pointwise = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        same_shape = {
            torch.ops.aten._to_copy.default,
            torch.ops.aten.clone.default,
            torch.ops.aten.detach.default,
        }
        self.all_pointwise &= torch.Tag.pointwise in func.tags or func in same_shape
        return func(*args, **(kwargs or {}))


def _run(body: fx.GraphModule, *values: Tensor) -> Any:
    with torch.no_grad():  # bodies end by switching gradients on; leaving the block restores what was
        return fx.Interpreter(body).run(*values)


@torch.library.custom_op("treefx::custom_function", mutates_args=())
def custom_function(inputs: Sequence[Tensor], key: str) -> list[Tensor]:
    """Apply a registered ``autograd.Function``."""
    outputs, _ = _run(_FUNCTIONS[key].forward, *inputs)
    return [output.clone() for output in outputs]


@custom_function.register_fake
def _(inputs: Sequence[Tensor], key: str) -> list[Tensor]:
    outputs, _ = _run(_FUNCTIONS[key].forward, *inputs)
    return [torch.empty_like(output) for output in outputs]


@torch.library.custom_op("treefx::custom_function_backward", mutates_args=())
def custom_function_backward(grads: Sequence[Tensor], inputs: Sequence[Tensor], key: str) -> list[Tensor]:
    """Gradients of a registered ``autograd.Function``; a gradient the user left out comes back as zeros."""
    function = _FUNCTIONS[key]
    _, saved = _run(function.forward, *inputs)
    results = _run(function.backward, *grads, *saved)
    return [_gradient_of(x, grad) for grad, x in zip(results, inputs, strict=True)]


def _gradient_of(x: Tensor, grad: Tensor | None) -> Tensor:
    """A gradient that the user returned, in the shape and dtype of the input, as autograd takes it, and its layout."""
    return torch.zeros_like(x) if grad is None else torch.empty_like(x).copy_(grad.sum_to_size(x.shape))


@custom_function_backward.register_fake
def _(grads: Sequence[Tensor], inputs: Sequence[Tensor], key: str) -> list[Tensor]:
    return [torch.empty_like(x) for x in inputs]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    tensors, ctx.key = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, grads: list[Tensor]) -> tuple[list[Tensor], None]:
    return custom_function_backward(grads, list(ctx.saved_tensors), ctx.key), None


custom_function.register_autograd(_backward, setup_context=_setup_context)
