"""Install one read-only hook in front of the model: ``treefx.observe(model)``."""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Iterator, MutableMapping
from typing import Any

import torch
from torch import Tensor, nn

from treefx.errors import ConfigError
from treefx.runtime.observed.observer import Observer, observer_of
from treefx.runtime.observed.tokens import takes_ids

__all__ = ["observe", "unobserve"]

_WRAPPED = ("module", "_orig_mod")
"""Attributes in which DDP and ``torch.compile`` keep the model they wrap."""


def observe(model: nn.Module) -> nn.Module:
    """Count the shared tokens of a model's calls, and leave the calls unchanged.

    Nothing is compiled and no number changes: before each call with gradients, a hook copies the token ids to the
    host. ``treefx.observed(model)`` gives the figures at any time. Of a model in a wrapper (DistributedDataParallel,
    LightningModule), the outermost module that is called with token ids counts. Observe the result of
    ``torch.compile``, not its argument.

    Args:
        model: Any model; twice is allowed.

    Returns:
        The model itself.

    Raises:
        ConfigError: It is no model.

    Example:
        >>> treefx.observe(model)
        >>> train(model)
        >>> print(treefx.observed(model).summary())
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"treefx.observe expects a model, got {type(model).__name__}")
    if any(module in _handles for module in model.modules()):
        return model
    hook = _Hook()
    compiled = getattr(model, "_compiled_call_impl", None)
    if compiled is not None:  # in place: a hook would be traced into its graph
        model._compiled_call_impl = functools.partial(_call_compiled, hook, weakref.ref(model), compiled)
        _handles[model] = _Compiled(model, compiled)
        return model
    for module in _called(model):
        _handles[module] = module.register_forward_pre_hook(hook, with_kwargs=True)
    return model


def unobserve(model: nn.Module) -> nn.Module:
    """Undo ``observe``; the figures stay until the process ends.

    Args:
        model: A model, observed or not.

    Returns:
        The model itself.
    """
    for module in model.modules():
        handle = _handles.pop(module, None)
        if handle is not None:
            handle.remove()
    return model


_handles: MutableMapping[nn.Module, Any] = weakref.WeakKeyDictionary()
"""Of the hooks, by observed module."""


class _Compiled:
    """Puts the compiled call of a model back."""

    def __init__(self, model: nn.Module, compiled: Any) -> None:
        self._model, self._compiled = weakref.ref(model), compiled

    def remove(self) -> None:
        """As a hook's handle does."""
        model = self._model()
        if model is not None:
            model._compiled_call_impl = self._compiled


def _call_compiled(hook: _Hook, model: Any, compiled: Any, *args: Any, **kwargs: Any) -> Any:
    hook(model(), args, kwargs)
    return compiled(*args, **kwargs)


def _ignore(*_: Any) -> None:
    """The hook of a copy of an observed model: copies are not observed."""


def _make_ignore() -> Any:
    return _ignore


class _Hook:
    """Notes the arguments of each call of the outermost module that is called with token ids."""

    def __init__(self) -> None:
        self._at: weakref.ref[nn.Module] | None = None
        """The observed module, known from the first call with ids on."""
        self._names: list[str] = []
        self._parameters: list[weakref.ref[Tensor]] = []
        self._observer: Observer | None = None

    def __call__(self, module: Any, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling():  # traced into a graph: no operation
            return
        if self._at is None and not self._begin(module, args, kwargs):
            return
        observer, counted = self._observer, None if self._at is None else self._at()
        if observer is not None and counted is not None and counted is module:
            observer.note(dict(zip(self._names, args)) | kwargs, self._living(counted))

    def _begin(self, module: nn.Module, args: Any, kwargs: Any) -> bool:
        """Whether a module is called with token ids: then its calls count from now on."""
        inner = _unwrapped(module)
        try:
            names = _positional(inner)
            if not takes_ids(dict(zip(names, args)) | kwargs):
                return False
        except Exception:  # arguments of any kind: the call itself must run as if there were no hook
            return False
        self._at, self._names = weakref.ref(module), names
        parameters = self._living(module)
        self._observer = observer_of(parameters[0] if parameters else None, type(inner).__name__, inner)
        return True

    def _living(self, module: nn.Module) -> list[Tensor]:
        """The parameters; sharding replaces them after the hook was registered."""
        known = [parameter for reference in self._parameters if (parameter := reference()) is not None]
        if not known or len(known) < len(self._parameters):
            known = [*module.parameters()]
            self._parameters = [weakref.ref(parameter) for parameter in known]
        return known

    def __deepcopy__(self, memo: Any) -> Any:
        return _ignore

    def __reduce__(self) -> Any:
        return _make_ignore, ()


def _called(model: nn.Module) -> Iterator[nn.Module]:
    """Yield a model and the modules it wraps, while the inner one has all the parameters.

    Modules below ``torch.compile`` are left out: their hooks would be traced.
    """
    count = len([*model.parameters()])
    yield model
    while not hasattr(model, "_orig_mod"):
        inner = next((child for child in model.children() if len([*child.parameters()]) == count), None)
        if inner is None or inner._compiled_call_impl is not None or not count:
            return
        model = inner
        yield model


def _positional(module: nn.Module) -> list[str]:
    given = [*inspect.signature(type(module).forward).parameters.values()][1:]
    return [item.name for item in given if item.kind in (item.POSITIONAL_ONLY, item.POSITIONAL_OR_KEYWORD)]


def _unwrapped(model: nn.Module) -> nn.Module:
    """The model in DDP and in ``torch.compile``."""
    is_wrapper = type(model).__module__.startswith("torch.")
    inner = (x for name in _WRAPPED if is_wrapper and isinstance(x := getattr(model, name, None), nn.Module))
    found = next(inner, None)
    return model if found is None else _unwrapped(found)
