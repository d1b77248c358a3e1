"""Trace Dynamo's graph to functional ATen, forward only.

Works on a copy: changing Dynamo's own graph crashes Dynamo. Attention and the user's own ``autograd.Function`` stay
whole (``treefx.passes.trace.opaque_ops``); bodies of activation checkpoints are inlined and tagged for the partitioner;
regions without gradient become ``detach``; casts of autocast become explicit; associative scans become slices and
calls of their combine function, and ``flex_attention`` products and a softmax.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import operator
from collections.abc import Callable, Iterator, Sequence
from types import FunctionType
from typing import Any, NamedTuple

import torch
import torch.fx.traceback as fx_traceback
import torch.nn.functional as F
from torch import Tensor, fx
from torch._dispatch.python import enable_python_dispatcher
from torch._functorch import predispatch
from torch._functorch._aot_autograd.functional_utils import from_fun, to_fun
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.grad_mode import _enter_inference_mode, _exit_inference_mode
from torch.fx._lazy_graph_module import _use_lazy_graph_module
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.checkpoint import CheckpointPolicy

from treefx.errors import UnsupportedError
from treefx.passes.layers.copies import LayerCopies
from treefx.passes.layers.find_layers import Layer, described, find_layers, key_of
from treefx.passes.trace import opaque_ops
from treefx.passes.trace.changed_inputs import read_changed_inputs_once
from treefx.passes.trace.custom_functions import call_applied, call_custom_function
from treefx.passes.trace.flash import FlashCall, call_flash, is_flash
from treefx.passes.trace.functional import functionalised
from treefx.passes.trace.inline_flex import flex_attention
from treefx.passes.trace.inline_scan import associative_scan
from treefx.passes.trace.library_calls import is_library_call
from treefx.passes.trace.library_tree import call_library
from treefx.passes.trace.unseen_changes import check_changes, seen_by_autograd
from treefx.torch_patches.functions import applied_by
from treefx.torch_patches.symbols import write_products_whole

__all__ = ["trace_forward", "trace_function"]

_ATTENTION = {F.scaled_dot_product_attention, torch._C._nn.scaled_dot_product_attention}
_ATTENTION_NAME = "scaled_dot_product_attention"
_HIGHER_ORDER = torch.ops.higher_order
_NESTING = {
    getattr(owner, f"_{kind}_increment_nesting"): getattr(owner, f"_{kind}_decrement_nesting")
    for owner in (predispatch, torch._C._functorch)
    for kind in ("vmap", "grad", "jvp")
    if hasattr(owner, f"_{kind}_increment_nesting")
}
"""What begins a transform of ``torch.func`` in Dynamo's graph -> what ends it."""
_RECORDING = torch._C._functorch._grad_increment_nesting
_UNWRAPPING = {getattr(owner, "_unwrap_for_grad", None) for owner in (predispatch, torch._C._functorch)}
_BATCHING = {predispatch._add_batch_dim: 2, predispatch._remove_batch_dim: 1}
"""The argument that is a level, in Dynamo's count."""
_checkpoint_ids = itertools.count(1)


NAME = "treefx_name"
"""Where a placeholder keeps Dynamo's name for it."""


def trace_forward(gm: fx.GraphModule, inputs: Sequence[Any], mode: FakeTensorMode) -> fx.GraphModule:
    """Return the functional ATen graph of ``gm``.

    Args:
        gm: Dynamo's graph, unchanged.
        inputs: One value per placeholder: fake tensors of ``mode``, or numbers.
        mode: The fake tensor mode of the inputs.

    Returns:
        A graph with the same placeholders in the same order; each node has ``meta["val"]`` and the stack of the
        user's line.
    """
    traced = trace_function(_ForwardTracer(gm).run, inputs, mode, functional=True)
    named = zip(*(item.graph.find_nodes(op="placeholder") for item in (traced, gm)), strict=True)
    for node, given in named:
        node.meta[NAME] = given.name
    if torch.is_grad_enabled():
        read_changed_inputs_once(traced)
    return traced


def trace_function(
    function: Callable[..., Any], inputs: Sequence[Any], mode: FakeTensorMode, *, functional: bool = False
) -> fx.GraphModule:
    """Trace a Python function over fake tensors into a graph, keeping the current node's meta."""
    write_products_whole()
    traced = functionalised(function) if functional else function
    cached = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)  # a cached cast would hand one trace the tensors of another
    try:
        # The code of a graph that further passes change is never run, so it is not generated each time (lazy).
        lazy, preserved = _use_lazy_graph_module(True), fx_traceback.preserve_node_meta()
        with torch.no_grad(), mode, preserved, enable_python_dispatcher(), lazy:
            gm = make_fx(traced, tracing_mode="real", _allow_non_fake_inputs=True)(*inputs)
    finally:
        torch.set_autocast_cache_enabled(cached)
    assert isinstance(gm, fx.GraphModule)
    # Also unused random numbers: with them a second run would count as different.
    gm.graph.eliminate_dead_code(lambda node: node.is_impure(impure_random=False))
    if any(len(node.args) != 2 for node in gm.graph.find_nodes(op="call_function", target=operator.mul)):
        raise NotImplementedError("torch wrote a product of several sizes as one of two, which would lose a factor")
    gm.recompile()
    opaque_ops.hold_functions(gm)
    return gm


_SAVED = (
    "torch.func derives an autograd.Function in a compiled model: what the function saved is a constant to "
    "torch.compile, so the derivative of the result would lack terms; run the model uncompiled, or write the function "
    "as plain operators"
)


class _Level(NamedTuple):
    """A transform of ``torch.func`` that has begun."""

    begin: Any
    """What began it, in Dynamo's graph."""
    number: int
    is_seen: bool
    """Whether gradients are enabled around it."""


@contextlib.contextmanager
def _restoring_settings() -> Iterator[None]:
    """Restore the settings of transforms of ``torch.func`` where a trace fails in the middle of one."""
    message = torch._C._autograd._saved_tensors_hooks_get_disabled_error_message()
    tangents, in_place = torch._C._is_fwd_grad_enabled(), torch._C._functorch.get_inplace_requires_grad_allowed()
    try:
        yield
    except BaseException:
        if message is None:
            torch._C._autograd._saved_tensors_hooks_enable()
        torch._C._set_fwd_grad_enabled(tangents)
        torch._C._functorch.set_inplace_requires_grad_allowed(in_place)
        raise


class _ForwardTracer(fx.Interpreter):
    """Run Dynamo's graph; handle the operators of the module docstring, run all others."""

    def __init__(
        self, gm: fx.GraphModule, grad_enabled: bool = True, segments: dict[int, tuple[Tensor, Tensor]] | None = None
    ) -> None:
        super().__init__(gm)
        self.grad_enabled = grad_enabled
        self.segments = {} if segments is None else segments
        self.levels: list[_Level] = []
        """The transforms of ``torch.func`` that have begun."""
        self.duals: list[int] = []
        """Levels of forward derivatives that have begun."""
        self.layers = {layer.nodes[0]: layer for layer in find_layers(gm.graph)}
        """By their first nodes."""

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Run the graph, and leave the transforms that it is in where it fails."""
        self.copies, outside = LayerCopies(), len(self.levels)
        with _restoring_settings():
            try:
                with applied_by(self._apply):
                    return super().run(*args, **kwargs)
            finally:
                while self.duals:
                    torch._C._exit_dual_level(level=self.duals.pop())
                while len(self.levels) > outside:
                    _NESTING[self.levels.pop().begin]()

    def run_node(self, n: fx.Node) -> Any:
        if n in self.layers:
            self._run_layer(self.layers[n])
            return self.env[n]
        return self._run_alone(n)

    def _run_alone(self, n: fx.Node) -> Any:
        check_changes(n, self.grad_enabled)
        return super().run_node(n)

    def _run_layer(self, layer: Layer) -> None:
        """Put the values of a layer into ``env``, where ``fx.Interpreter`` finds them."""
        given = [from_fun(self.env[node]) for node in layer.operands]
        devices = {"cpu", *(x.device.type for x in given if isinstance(x, Tensor))}
        state = self._state(devices)
        known = dict(zip(layer.operands, map(described, given), strict=True))
        key = key_of(layer, known.get), seen_by_autograd((*layer.operands, *layer.nodes)), state
        operands = [x for x in tree_leaves(given) if isinstance(x, Tensor)]
        copied = self.copies.copy(key, layer, operands) if key in self.copies else None
        if copied is not None:
            self.env.update(
                {**dict.fromkeys(layer.nodes), **dict(zip(layer.results, map(to_fun, copied), strict=True))}
            )
            return
        mark = self.copies.mark()
        for node in layer.nodes:
            self.env[node] = self._run_alone(node)
        results = [from_fun(self.env[node]) for node in layer.results]
        unchanged = all(from_fun(self.env[node]) is x for node, x in zip(layer.operands, given, strict=True))
        if unchanged and state == self._state(devices):
            self.copies.remember(key, layer, mark, operands, (), results)

    def _state(self, devices: set[str]) -> tuple[Any, ...]:
        """Return the state that decides about operators besides their operands."""
        casts = [(d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in sorted(devices)]
        return self.grad_enabled, torch.is_inference_mode_enabled(), *self.levels, len(self.segments), *casts

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target is torch._C._set_grad_enabled:
            self.grad_enabled = bool(args[0])
            return None
        if target is _enter_inference_mode:
            before, self.grad_enabled = self.grad_enabled, not args[0]
            return before
        if target is _exit_inference_mode:
            self.grad_enabled = args[0]
            return None
        result = self._call(target, args, kwargs)
        is_seen = self.levels[args[1] - 1].is_seen if target in _UNWRAPPING else self.grad_enabled
        return result if is_seen else self._detached(result)

    def call_method(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target == "item" and not isinstance(args[0], Tensor):
            return args[0]  # a number that Dynamo passes as a tensor; the run time gives its value
        result = super().call_method(target, args, kwargs)
        return result if self.grad_enabled else self._detached(result)

    def _detached(self, result: Any) -> Any:
        """Cut off what no gradient passes; a tangent would."""
        if any(level.begin not in (_RECORDING, predispatch._vmap_increment_nesting) for level in self.levels):
            raise NotImplementedError("torch.no_grad together with torch.func.jvp")
        return tree_map_only(Tensor, _detach, result)

    def _call(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if getattr(target, "__name__", None) == "register_hook":
            raise NotImplementedError(
                "a gradient hook on a value inside of the graph (x.register_hook) may change gradients in any way; "
                "write it as an autograd.Function with a linear backward"
            )
        if target in _ATTENTION:
            return _call_attention(*args, **kwargs)
        if is_flash(target):
            return call_flash(FlashCall(*args), self.segments)
        if is_library_call(target):
            return call_library(args[0], args[1], self.segments)
        if target is _HIGHER_ORDER.tag_activation_checkpoint:
            return self._inline_checkpoint(args)
        if target is _HIGHER_ORDER.invoke_subgraph:  # a nested compile region; inductor has its own for equal layers
            return self._inline(args[0], args[2:])
        if target is _HIGHER_ORDER.autograd_function_apply:
            if any(level.begin is not predispatch._vmap_increment_nesting for level in self.levels):
                raise UnsupportedError(_SAVED)
            return call_custom_function(_trace_body, *args, **kwargs)
        if target is _HIGHER_ORDER.associative_scan:
            return associative_scan(*args)
        if target is _HIGHER_ORDER.flex_attention:
            return flex_attention(*args, **kwargs)
        if target in _NESTING:
            return self._begin(target, args)
        if self.levels and target is _NESTING[self.levels[-1].begin]:
            return self._end(args)
        if getattr(target, "__name__", None) == "_enter_dual_level":
            self.duals.append(target(*args, **kwargs))
            return self.duals[-1]
        if getattr(target, "__name__", None) == "_exit_dual_level":
            self.duals.pop()
        if target in _BATCHING:
            place = _BATCHING[target]
            return target(*args[:place], self.levels[args[place] - 1].number, *args[place + 1 :])
        if getattr(target, "__globals__", None) is vars(F) and _ATTENTION_NAME in target.__code__.co_names:
            return _with_attention_whole(target)(*args, **kwargs)
        return super().call_function(target, args, kwargs)

    def _apply(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        """Keep an ``autograd.Function`` whole that runs in code which Dynamo did not read (``allow_in_graph``)."""
        if not self.grad_enabled or function.__module__.startswith("torch.distributed."):  # of a DTensor and its parts
            return function.apply(*args, **kwargs)
        if self.levels:
            raise NotImplementedError(
                f"{function.__name__} (autograd.Function) runs inside of a transform of torch.func"
            )
        return call_applied(_trace_body, function, *args, **kwargs)

    def _begin(self, target: Any, args: tuple[Any, ...]) -> int:
        """Begin a transform of ``torch.func``; inside of ``grad``, operators are recorded."""
        level = _Level(target, target(*args), self.grad_enabled)
        self.levels.append(level)
        if target is _RECORDING:
            torch.set_grad_enabled(True)
        return level.number

    def _end(self, args: tuple[Any, ...]) -> Any:
        result = _NESTING[self.levels.pop().begin](*args)
        torch.set_grad_enabled(any(level.begin is _RECORDING for level in self.levels))
        return result

    def _inline_checkpoint(self, args: tuple[Any, ...]) -> Any:
        """Run a checkpointed body in place; the partitioner recomputes it by its tags."""
        body, identity = copy.deepcopy(args[0]), next(_checkpoint_ids)
        for node in body.graph.nodes:
            node.meta["recompute"] = CheckpointPolicy.PREFER_RECOMPUTE
            node.meta["ac_graph_id"] = identity
        return self._inline(body, args[1:])

    def _inline(self, body: fx.GraphModule, args: tuple[Any, ...]) -> Any:
        """Run a body in place, inside of the same transforms."""
        tracer = _ForwardTracer(body, self.grad_enabled, self.segments)
        tracer.levels = self.levels
        return tracer.run(*args)


def _detach(x: Tensor) -> Tensor:
    return x.detach() if x.is_floating_point() or x.is_complex() else x


@functools.cache
def _with_attention_whole(function: FunctionType) -> FunctionType:
    """Copy a function of ``torch.nn.functional`` to call our attention.

    A copy: other threads run the original meanwhile. It knows itself by its name: where a mode watches the
    functions that are called, it hands itself over to that and is called again.
    """
    names: dict[str, Any] = {**function.__globals__, _ATTENTION_NAME: _call_attention}
    copied = FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)
    copied.__kwdefaults__ = function.__kwdefaults__
    names[function.__name__] = copied
    return copied


def _call_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    device = query.device.type
    if torch.is_autocast_enabled(device):  # an operator of our own has no autocast rule; this is that of the original
        dtype = torch.get_autocast_dtype(device)
        query, key, value = (_autocast(x, dtype) for x in (query, key, value))
        attn_mask = None if attn_mask is None else _autocast(attn_mask, dtype)
    out: Tensor = opaque_ops.attention(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    return out


def _autocast(x: Tensor, dtype: torch.dtype) -> Tensor:
    eligible = x.is_floating_point() and x.dtype is not torch.float64
    return x.to(dtype) if eligible else x


def _trace_body(function: Callable[..., Any], inputs: Sequence[Any], mode: FakeTensorMode) -> fx.GraphModule:
    return trace_function(function, inputs, mode, functional=True)
