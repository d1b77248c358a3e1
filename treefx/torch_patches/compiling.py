"""One thread of the process compiles at a time: tracing changes state that all of them see."""

from __future__ import annotations

import torch
from torch._dynamo.convert_frame import compile_lock

__all__ = ["compiling"]


class _Compiling:
    """Holds Dynamo's own lock, which its threads hold too while they trace: a second one could meet it in both orders.

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
