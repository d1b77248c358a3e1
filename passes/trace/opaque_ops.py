"""Operators that the first trace keeps whole, because later passes read them by name.

``treefx::attention`` stands for ``F.scaled_dot_product_attention`` until it is rewritten or written back.
``treefx::custom_function`` stands for a user's ``autograd.Function``: its backward is the user's own and may differ
from the derivative of its forward, so neither body may be traced through and differentiated again.
"""

from __future__ import annotations

import hashlib
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from treefx.kernels.common import owned
from treefx.kernels.cuda_graphs import NOT_CAPTURED
from treefx.passes.trace.fingerprint import fingerprint

__all__ = [
    "Function",
    "attention",
    "bodies_of",
    "custom_function",
    "gradients_of",
    "hold_functions",
    "is_pointwise_body",
    "register_function",
]


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
class Function:
    """An ``autograd.Function`` for inputs of one shape, its bodies in functional ATen.

    ``forward`` maps the inputs to outputs and then the saved values, ``backward`` gradients of the outputs and the
    saved values to the existing gradients of inputs. ``saved`` says where each saved value comes from: ("input", i) or
    ("result", i). Results of the forward are kept, never recomputed: they may hold random numbers.
    """

    forward: fx.GraphModule
    backward: fx.GraphModule
    outputs: int
    saved: tuple[tuple[str, int], ...]
    differentiated: tuple[bool, ...]
    """Per input, whether the backward has a gradient for it."""


_FUNCTIONS: weakref.WeakValueDictionary[str, Function] = weakref.WeakValueDictionary()
"""By key, as long as a graph that calls it is there."""
_NEWEST: deque[Function] = deque(maxlen=64)
"""Functions that stay when their graphs are gone: the compiled backward of a call may still run."""


def register_function(function: Function) -> str:
    """Register a function for graphs under `hold_functions`; return a hash of it."""
    parts = (fingerprint(function.forward), fingerprint(function.backward), function.outputs, function.saved)
    key = hashlib.sha256(repr((*parts, function.differentiated)).encode()).hexdigest()[:16]
    _NEWEST.append(_FUNCTIONS.setdefault(key, function))
    return key


def hold_functions(gm: fx.GraphModule) -> None:
    """Keep the functions that a graph calls as long as the graph."""
    for target in (torch.ops.treefx.custom_function.default, torch.ops.treefx.custom_function_backward.default):
        for node in gm.graph.find_nodes(op="call_function", target=target):
            node.meta["treefx_function"] = _FUNCTIONS[str(node.args[-1])]


def bodies_of(key: str) -> tuple[fx.GraphModule, fx.GraphModule]:
    """The forward and the backward of a registered function."""
    return _FUNCTIONS[key].forward, _FUNCTIONS[key].backward


def gradients_of(key: str) -> int:
    """How many of the backward's inputs are gradients; they are its first ones."""
    return _FUNCTIONS[key].outputs


def is_pointwise_body(body: fx.GraphModule) -> bool:
    """Return whether a body is all pointwise, by a run on one shape under a recorder."""
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


def _apart(results: Sequence[Tensor], others: Sequence[Tensor]) -> list[Tensor]:
    """The results in memory of their own, as operators must return them."""
    taken = {x.untyped_storage()._cdata for x in others}
    found = []
    for x in results:
        found.append(x.clone() if x.untyped_storage()._cdata in taken else x)
        taken.add(found[-1].untyped_storage()._cdata)
    return found


def _run(body: fx.GraphModule, *values: Tensor) -> list[Tensor]:
    with torch.no_grad():
        return _apart(fx.Interpreter(body).run(*values), values)


@torch.library.custom_op("treefx::custom_function", mutates_args=(), tags=NOT_CAPTURED)
def custom_function(inputs: Sequence[Tensor], key: str) -> list[Tensor]:
    """Apply a registered ``autograd.Function``; return its outputs, then its saved values."""
    return _run(_FUNCTIONS[key].forward, *inputs)


@custom_function.register_fake
def _(inputs: Sequence[Tensor], key: str) -> list[Tensor]:
    return _run(_FUNCTIONS[key].forward, *inputs)


@torch.library.custom_op("treefx::custom_function_backward", mutates_args=(), tags=NOT_CAPTURED)
def custom_function_backward(grads: Sequence[Tensor], saved: Sequence[Tensor], key: str) -> list[Tensor]:
    """The gradients of a registered ``autograd.Function`` that it has."""
    return _run(_FUNCTIONS[key].backward, *grads, *saved)


@custom_function_backward.register_fake
def _(grads: Sequence[Tensor], saved: Sequence[Tensor], key: str) -> list[Tensor]:
    return _run(_FUNCTIONS[key].backward, *grads, *saved)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    tensors, ctx.key = inputs
    ctx.function = _FUNCTIONS[ctx.key]
    sources = {"input": tensors, "result": output}
    ctx.save_for_backward(*[sources[source][i] for source, i in ctx.function.saved])


def _backward(ctx: Any, grads: list[Tensor]) -> tuple[list[Tensor | None], None]:
    function = ctx.function
    results = iter(custom_function_backward(grads[: function.outputs], list(ctx.saved_tensors), ctx.key))
    return [next(results) if there else None for there in function.differentiated], None


custom_function.register_autograd(_backward, setup_context=_setup_context)
