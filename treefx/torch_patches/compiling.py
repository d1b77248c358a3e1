"""Compile on one thread of the process at a time: tracing changes shared state."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch._dynamo.convert_frame import compile_lock

__all__ = ["compiling", "keeping_no_casts", "running_eagerly"]


class _Compiling:
    """Hold Dynamo's own lock.

    Its threads hold it too while they trace: a second lock could deadlock with it.

    In there ``torch.compiler.is_compiling()`` is true, as where Dynamo calls a compiler: other threads may go on
    calling compiled functions, which PyTorch otherwise takes for parts of the trace.
    """

    def __init__(self) -> None:
        self._before: list[bool] = []

    def __enter__(self) -> None:
        compile_lock.acquire()
        self._before.append(torch.compiler._is_compiling_flag)
        torch.compiler._is_compiling_flag = True

    def __exit__(self, *error: object) -> None:
        torch.compiler._is_compiling_flag = self._before.pop()
        compile_lock.release()


compiling = _Compiling()
"""Held while graphs are traced and compiled; may be entered again by the thread that holds it."""


@contextlib.contextmanager
def running_eagerly() -> Iterator[None]:
    """Run a block in the middle of a trace with ``torch.compiler.is_compiling()`` false."""
    before = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = False
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before


@contextlib.contextmanager
def keeping_no_casts() -> Iterator[None]:
    """Run a block whose casts of weights, fake ones say, no later operator of an enclosing autocast gets."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)
