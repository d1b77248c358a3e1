"""Find the modules behind the result of ``torch.compile``."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

__all__ = ["is_compiled", "modules_of"]


def is_compiled(compiled: Any) -> bool:
    """Whether a model (or a part of it) or a function went through ``torch.compile``."""
    if isinstance(compiled, nn.Module):
        return any(
            hasattr(module, "_orig_mod") or module._compiled_call_impl is not None for module in compiled.modules()
        )
    return hasattr(compiled, "_torchdynamo_orig_callable")


def modules_of(value: Any) -> list[nn.Module]:
    """List the modules of a compiled object.

    These are itself, or modules that its function is bound to, closes over or names.
    """
    found: list[nn.Module] = []
    seen: set[int] = set()
    waiting = [value]
    while waiting:
        item = waiting.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, nn.Module):
            found.append(item)
        elif isinstance(item, functools.partial):
            waiting += [item.func, *item.args, *item.keywords.values()]
        elif callable(item):
            waiting += _used_by(getattr(item, "_torchdynamo_orig_callable", item))
    return found


def _used_by(function: Callable[..., Any]) -> Iterator[Any]:
    owner = getattr(function, "__self__", None)
    yield owner
    yield from (item for item in getattr(owner, "__dict__", {}).values() if isinstance(item, nn.Module))
    for cell in getattr(function, "__closure__", None) or ():
        try:
            yield cell.cell_contents
        except ValueError:  # a variable that was never assigned
            continue
    names = getattr(getattr(function, "__code__", None), "co_names", ())
    known = getattr(function, "__globals__", {})
    yield from (known[name] for name in names if isinstance(known.get(name), nn.Module))
