"""Copy a module for tracing: same code and settings, no hooks, empty parameters.

Sharding, checkpoints and compiled blocks leave marks on a model that a trace of its rows must not meet: hooks that
gather weights from other ranks, classes made by FSDP, graphs of other backends. The copy has none of them. Memory of
its parameters is asked for and never written, so that a model of any size has one.
"""

from __future__ import annotations

import types
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from treefx.runtime.converted.seam import ORIGINAL, UNWRAPPED, original_of

__all__ = ["Buffers", "UNWRAPPED", "WRAPPERS", "codes_of", "refresh", "skeleton", "wrapped_in"]

WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module")
"""Attributes in which ``torch.compile`` and ``checkpoint_wrapper`` hold the wrapped module."""

_HOOKS = (
    "_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs", "_backward_hooks", "_backward_pre_hooks",
)  # fmt: skip

_OF_SHARDING = ("_is_fsdp_managed_module", "_fsdp_use_orig_params")
"""Attributes by which Dynamo takes the buffers of a module for something else."""
_OWN = {
    *_HOOKS,
    *_OF_SHARDING,
    "_parameters",
    "_buffers",
    "_modules",
    "_compiled_call_impl",
    "gradient_checkpointing",
    "forward",
    "treefx_hooks",
    "treefx_of_class",
    "treefx_scores",
}
"""Attributes that a copy does not share with its original."""


def skeleton(module: nn.Module) -> nn.Module:
    """Copy a module and everything in it.

    Parameters are on the CPU with undefined values, buffers keep theirs.
    """
    return _Copy().of(module)


def wrapped_in(module: nn.Module) -> nn.Module | None:
    """The module that another one stands for and computes the same as, if it is such a one."""
    found = (module.__dict__["_modules"].get(name) for name in WRAPPERS)
    return next((inner for inner in found if inner is not None), None)


def codes_of(modules: Iterable[nn.Module]) -> list[Any]:
    """Return the code of modules: their classes, the forwards of these, and the modules' own methods.

    A forward that reads trees counts as its original.
    """
    found: list[Any] = []
    for module in modules:  # no call of a function for each in a steady step
        made = type(module)
        if hasattr(made, "_orig_cls_mro_index") or made.__name__.startswith("FSDP"):
            made = _class_of(module)
        found += (made, made.forward)
        state = module.__dict__
        if "forward" not in state and types.MethodType not in map(type, state.values()):
            continue
        for name, value in state.items():
            if name == "forward" or type(value) is types.MethodType:
                function = getattr(value, "__func__", value) if getattr(value, "__self__", None) is module else value
                function = getattr(function, ORIGINAL, function)
                if name != "forward" or function is not made.forward:
                    found += (name, function)
    return found


def refresh(pairs: Iterable[tuple[nn.Module, nn.Module]]) -> bool:
    """Update the settings of copies: training, probability of dropout, switch of an adapter; and their tensors.

    Args:
        pairs: Modules and their copies.

    Returns:
        Whether any setting has changed.
    """
    has_changed = False
    for module, copied in pairs:
        state = copied.__dict__
        for name, value in module.__dict__.items():
            if name in _OWN or state.get(name) is value or isinstance(value, types.MethodType | nn.Module):
                continue
            if isinstance(value, Tensor):  # no setting: a trace reads its numbers, or that it is trained
                state[name] = _of_fixed_size(value)
                continue
            state[name], has_changed = value, True
    return has_changed


def _of_fixed_size(value: Tensor) -> Tensor:
    """Return a tensor in an attribute of a module as a copy has it.

    Its sizes are the model's, as those of a buffer are: Dynamo would take them for sizes of a batch. One that was
    computed from weights may be a value of tokens that is kept: in its place stands a trained tensor of one element.
    """
    found = value
    if not value.is_leaf:
        found = torch.empty((), dtype=value.dtype, device=value.device).expand(value.shape).requires_grad_()
    torch._dynamo.mark_static(found)
    return found


class Buffers:
    """Update changed buffers of a copy from the original.

    Args:
        pairs: Modules and their copies.
    """

    def __init__(self, pairs: Sequence[tuple[nn.Module, nn.Module]]) -> None:
        self._pairs = [(module, copied, name) for module, copied in pairs for name in module._buffers]
        self._seen = {i: self._state(i) for i in range(len(self._pairs))}

    def refresh(self) -> None:
        """Copy the values that have changed."""
        for i, (module, copied, name) in enumerate(self._pairs):
            state = self._state(i)
            if state is not None and state != self._seen[i]:
                copied._buffers[name].copy_(module._buffers[name].detach())  # type: ignore[union-attr]
                self._seen[i] = state

    def _state(self, number: int) -> Any:
        module, copied, name = self._pairs[number]
        ours, buffer = copied._buffers.get(name), module._buffers.get(name)
        if ours is None or buffer is None or ours.shape != buffer.shape:
            return None
        return id(buffer), object() if buffer.is_inference() else buffer._version


class _Copy:
    """Make one copy; modules and weights that occur twice do so in the copy."""

    def __init__(self) -> None:
        self._modules: dict[int, nn.Module] = {}
        self._tensors: dict[int, Tensor] = {}

    def of(self, module: nn.Module) -> nn.Module:
        if id(module) in self._modules:
            return self._modules[id(module)]
        inner = wrapped_in(module)
        if inner is not None:
            self._modules[id(module)] = self.of(inner)
            return self._modules[id(module)]
        made = object.__new__(_class_of(module))
        self._modules[id(module)] = made
        state = {name: value for name, value in module.__dict__.items() if name not in _OF_SHARDING}
        state |= {name: type(state[name])() for name in _HOOKS}
        state["_parameters"] = {name: self._parameter(p) for name, p in module._parameters.items()}
        state["_buffers"] = {name: self._buffer(x) for name, x in module._buffers.items()}
        state["_modules"] = {name: None if x is None else self.of(x) for name, x in module._modules.items()}
        state["_compiled_call_impl"] = None
        if "gradient_checkpointing" in state:  # which changes no value
            state["gradient_checkpointing"] = False
        state |= {name: _of_fixed_size(x) for name, x in state.items() if isinstance(x, Tensor)}
        made.__dict__.update(state)
        _bind_methods(module, made)
        return made

    def _parameter(self, parameter: Any) -> Any:
        if parameter is None:
            return None
        if id(parameter) not in self._tensors:
            shape = getattr(parameter, "ds_shape", parameter.shape)  # DeepSpeed's stage 3 leaves an empty shape
            data = torch.empty(tuple(shape), dtype=parameter.dtype, device="cpu")
            self._tensors[id(parameter)] = nn.Parameter(data, requires_grad=parameter.requires_grad)
        return self._tensors[id(parameter)]

    def _buffer(self, buffer: Any) -> Any:
        if buffer is None:
            return None
        if id(buffer) not in self._tensors:
            self._tensors[id(buffer)] = buffer.detach().to("cpu", copy=True)
        return self._tensors[id(buffer)]


def _class_of(module: nn.Module) -> type[nn.Module]:
    """Return the original class: ``fully_shard`` inserts a subclass."""
    found = type(module)
    index = getattr(found, "_orig_cls_mro_index", None)
    if index is None and found.__name__.startswith("FSDP") and len(found.__mro__) > 2:
        index = 2 if found.__mro__[1].__name__ == "FSDPModule" else None
    return found if index is None else found.__mro__[index]


def _bind_methods(module: nn.Module, made: nn.Module) -> None:
    """Bind methods that were put on the original to the copy, without accelerate's wrappers."""
    if UNWRAPPED in made.__dict__:
        made.__dict__["forward"] = made.__dict__[UNWRAPPED]
    for name, value in made.__dict__.items():
        if isinstance(value, types.MethodType) and value.__self__ is module:
            made.__dict__[name] = types.MethodType(original_of(value) or value.__func__, made)
    forward = made.__dict__.get("forward")
    if isinstance(forward, types.MethodType) and forward.__func__ is type(made).forward:
        del made.__dict__["forward"]  # a trace would name modules by the way through it
