"""Trace one operator per call in place of recurrence libraries.

transformers binds functions of flash-linear-attention, causal-conv1d and mamba_ssm to hybrid models where these
packages are installed. They forbid tracing, or are C++, and cut the graph in every layer. A call that passes states on
(a cache) is traced unchanged; so is one that takes packed sequences (``PACKING``) in another way than by one argument.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch._dynamo.variables import ConstantVariable
from torch._dynamo.variables.tensor import TensorVariable

from treefx.passes.trace.library_calls import KINDS, PACKING, Given, LibraryCall, register_call
from treefx.passes.trace.library_tree import find_inner
from treefx.runtime.whole.heads import setting_of

__all__ = ["recurrence_instead"]

_MODULE = "transformers.integrations.hub_kernels"
_STATES = {"initial_state", "initial_states", "output_final_state", "return_final_states", "return_last_state"}
_ACTIVATIONS = (None, "silu", "swish")
"""Of a convolution; the library itself refuses others."""


def recurrence_instead(function: Any, tx: Any, args: Any, kwargs: Any) -> tuple[Any, list[Any], dict[str, Any]] | None:
    """Return ``treefx::library`` in place of a library's function; None for other calls."""
    bound = _bound(function)
    if bound is None:
        return None
    name, implementation, body = bound
    call = _described(name, function, implementation, body, args, kwargs) if name in KINDS else None
    if call is None:
        return None
    made, tensors = call
    key = ConstantVariable.create(register_call(made).key)
    return _as_pair if made.kind.pair else _alone, [key, *tensors], {}


def _alone(key: str, *tensors: Any) -> Any:
    return torch.ops.treefx.library(list(tensors), key, None)


def _as_pair(key: str, *tensors: Any) -> Any:
    return torch.ops.treefx.library(list(tensors), key, None), None


def _bound(function: Any) -> tuple[str, Callable[..., Any], Callable[..., Any]] | None:
    """Return name, implementation and PyTorch body of a library function in transformers."""
    code = getattr(function, "__code__", None)
    if code is None or code.co_name != "wrapped" or function.__globals__.get("__name__") != _MODULE:
        return None
    found = inspect.getclosurevars(function).nonlocals
    if not found.get("is_new_implementation") or not {"func_name", "implementation", "torch_function"} <= set(found):
        return None
    return found["func_name"], found["implementation"], found["torch_function"]


def _described(
    name: str, function: Any, implementation: Any, body: Any, args: Any, kwargs: Any
) -> tuple[LibraryCall, list[Any]] | None:
    """Return a library call and its tensors; None for options the operator does not know."""
    known = inspect.signature(body).parameters
    taken = {*inspect.signature(implementation).parameters}
    tensors: list[Any] = []

    def slot(item: Any) -> Any:
        item = item.realize()
        if isinstance(item, TensorVariable):
            tensors.append(item)
            return Given(len(tensors) - 1)
        return setting_of(item)

    named: list[tuple[str, Any]] = []
    packing: list[tuple[str, Any]] = []
    try:
        positional = tuple(map(slot, args))
        for keyword, item in kwargs.items():
            item = item.realize()
            empty = isinstance(item, ConstantVariable) and item.value is None
            if keyword in known and keyword not in PACKING:
                named.append((keyword, slot(item)))
            elif keyword in (taken | {*known}) and not empty:
                packing.append((keyword, item))
        if len(packing) > 1 or not all(name in PACKING and isinstance(x, TensorVariable) for name, x in packing):
            return None  # the library heeds an option that the body lacks
        given = inspect.signature(body).bind(*positional, **dict(named)).arguments
        packed = next(((name, slot(item)) for name, item in packing), None)
    except (NotImplementedError, TypeError):  # a value that is no constant, or a call that the function itself refuses
        return None
    if any(given.get(name) not in (None, False) for name in _STATES) or given.get("activation") not in _ACTIVATIONS:
        return None
    library = f"{getattr(implementation, '__module__', '')}.{getattr(implementation, '__qualname__', name)}"
    inner = find_inner(name, implementation, given, is_packed=packed is not None)
    inner = None if inner is None else register_call(inner)
    options = positional, tuple(named), frozenset(taken), packed, inner
    return LibraryCall(name, function, library, body, *options), tensors
