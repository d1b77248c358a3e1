"""Find code that reads values inside the backbone, which has one per distinct token.

Two kinds are found on the model itself: hooks below the module that takes the ids, and attributes of modules that a
call has changed. ``kept_values`` finds those in a trace.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.nn.modules import module as nn_module
from torch.utils._pytree import tree_leaves

__all__ = ["Attributes", "changed_names", "find_hook", "replaced"]

_HOOKS = {
    "_forward_hooks": "forward hook",
    "_forward_pre_hooks": "forward pre-hook",
    "_backward_hooks": "backward hook",
    "_backward_pre_hooks": "backward pre-hook",
}
_HARMLESS = (
    "accelerate.", "deepspeed.", "peft.utils.", "torch.distributed.", "torch.nn.utils.", "torch.utils.",
    "transformers.integrations.deepspeed", "transformers.integrations.tensor_parallel", "transformers.modeling_utils",
    "transformers.utils.output_capturing", "treefx.",
)  # fmt: skip
"""Libraries with hooks that move weights, shard, or collect the model's results."""
_OWN = {"_parameters", "_buffers", "_modules", "_compiled_call_impl", "training", *_HOOKS}
_CONTAINERS = (list, dict, set, deque)


# Hooks --------------------------------------------------------------------------------------------------------------


def find_hook(modules: Sequence[nn.Module]) -> str | None:
    """Name a hook that would read or change values of distinct tokens; None if there is none.

    Args:
        modules: The module that takes the ids, with hooks on rows, and all modules below it.
    """
    for attribute, kind in _HOOKS.items():
        for hook in tuple(getattr(nn_module, f"_global{attribute}", {}).values()):
            if not _is_harmless(hook):
                return f"the {kind} {_name_of(hook)} is registered for all modules"
    for module in modules[1:]:
        state = module.__dict__
        for attribute, kind in _HOOKS.items():
            for hook in tuple(state[attribute].values()) if state[attribute] else ():
                if not _is_harmless(hook):
                    return f"{_path(modules[0], module)} has the {kind} {_name_of(hook)}"
        hook = state.get("_hf_hook")
        if hook is not None and not _is_harmless(hook):
            return f"{_path(modules[0], module)} has accelerate's hook {_name_of(hook)}"
    return None


def _plain(hook: Any) -> Any:
    """The function of a hook, or the object that is called."""
    while isinstance(hook, functools.partial):
        hook = hook.func
    return getattr(hook, "__func__", hook)


def _is_harmless(hook: Any) -> bool:
    found = _plain(hook)
    origin = getattr(found, "__module__", None) or type(found).__module__
    return f"{origin}.".startswith(_HARMLESS)


def _name_of(hook: Any) -> str:
    found = _plain(hook)
    code = getattr(found, "__code__", None)
    name = getattr(found, "__qualname__", type(found).__qualname__)
    return name if code is None else f"{name} ({code.co_filename}:{code.co_firstlineno})"


def _path(owner: nn.Module, module: nn.Module) -> str:
    name = next((name for name, item in owner.named_modules() if item is module), "")
    return f"{type(owner).__name__}.{name} ({type(module).__name__})"


# Attributes ---------------------------------------------------------------------------------------------------------


class Attributes:
    """Hold attributes and buffers of modules at one moment, to find later changes.

    Args:
        owner: The root of the modules.
    """

    def __init__(self, owner: nn.Module) -> None:
        self._before = [
            (name, module, {key: (value, _copied(value)) for key, value in _attributes(module)})
            for name, module in owner.named_modules()
        ]

    def changed(self) -> Iterator[str]:
        """Yield names of attributes with other tensors, and of buffers changed in place."""
        for name, module, before in self._before:
            for key, value in _attributes(module):
                known, copied = before.get(key, (None, None))
                if (known is not value or _identity(copied) != _identity(_copied(value))) and _holds_tensor(value):
                    yield f"{name}.{key}" if name else key

    def restore(self) -> None:
        """Give lists, dictionaries and sets the items that they had."""
        for _, _, before in self._before:
            for value, copied in before.values():
                if type(value) in _CONTAINERS and _identity(value) != _identity(copied):
                    value.clear()
                    (value.extend if isinstance(value, list | deque) else value.update)(copied)


@contextmanager
def replaced(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Within, the module has another forward."""
    before = module.__dict__.get("forward")
    module.__dict__["forward"] = forward
    try:
        yield
    finally:
        del module.__dict__["forward"]
        if before is not None:
            module.__dict__["forward"] = before


def changed_names(module: nn.Module) -> Callable[[], Iterator[str]]:
    """Return what yields the names of attributes and buffers that were changed since, with tensors or without."""
    before = dict(_attributes(module))
    return lambda: (name for name, value in _attributes(module) if before.get(name) is not value)


def _attributes(module: nn.Module) -> Iterator[tuple[str, Any]]:
    yield from ((name, value) for name, value in module.__dict__.items() if name not in _OWN)
    yield from module._buffers.items()


def _copied(value: Any) -> Any:
    """A container with the same items, or how often a tensor was changed in place."""
    if type(value) in _CONTAINERS:
        return value.copy()
    return value._version if isinstance(value, Tensor) and not value.is_inference() else None


def _identity(copied: Any) -> Any:
    """The items of a container by identity; they may have no equality."""
    if isinstance(copied, dict):
        return [(id(key), id(item)) for key, item in copied.items()]
    return sorted(map(id, copied)) if type(copied) in _CONTAINERS else copied if isinstance(copied, int) else None


def _holds_tensor(value: Any) -> bool:
    items = list(value) if isinstance(value, set | deque) else value
    return any(isinstance(x, Tensor) for x in tree_leaves(items))
