"""Hand over every ``autograd.Function`` that a block of code applies."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

__all__ = ["applied_by"]

_here = threading.local()
_installing = threading.Lock()
_installed = 0


@contextlib.contextmanager
def applied_by(call: Callable[..., Any]) -> Iterator[None]:
    """Within, and in this thread, ``function.apply(...)`` is ``call(function, ...)``; what that applies is PyTorch's.

    Args:
        call: Gets the class of the ``autograd.Function``, and the arguments of its ``apply``.
    """
    before = getattr(_here, "call", None)
    _install(1)
    _here.call = call
    try:
        yield
    finally:
        _here.call = before
        _install(-1)


_original: Any = torch.autograd.Function.__dict__["apply"]


def _install(change: int) -> None:
    """Replace the method while any thread needs it: Dynamo compares it, and others call it often."""
    global _installed
    with _installing:
        _installed += change
        method: Any = classmethod(_apply) if _installed else _original
        torch.autograd.Function.apply = method  # type: ignore[method-assign]


def _apply(function: Any, *args: Any, **kwargs: Any) -> Any:
    call = getattr(_here, "call", None)
    if call is None:
        return _original.__func__(function, *args, **kwargs)
    _here.call = None
    try:
        return call(function, *args, **kwargs)
    finally:
        _here.call = call
