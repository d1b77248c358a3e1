"""The device for one process alone: many compile side by side, one at a time takes memory and measures."""

import fcntl
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch._inductor.output_code import CompiledFxGraph

__all__ = ["Turn"]


class Turn:
    """A process's claim to the device.

    Attributes:
        taken: whether this process has the device.

    Args:
        path: a file that all processes know; ``None`` where there is no other.
        model: its parameters leave the device while the process waits.
    """

    def __init__(self, path: Path | None, model: torch.nn.Module) -> None:
        self._file: Any = None if path is None else path.open("a")
        self._model = model
        self.taken = False

    def take(self) -> None:
        """Wait until no other process has the device; nothing happens if this one has it."""
        if self.taken or self._file is None:
            return
        devices = [parameter.device for parameter in self._model.parameters()]
        self._move("cpu" for _ in devices)
        fcntl.flock(self._file, fcntl.LOCK_EX)
        self.taken = True
        self._move(devices)

    def give(self) -> None:
        """Let the next one have it."""
        if not self.taken:
            return
        self._model.zero_grad(set_to_none=True)
        self._move("cpu" for _ in self._model.parameters())
        fcntl.flock(self._file, fcntl.LOCK_UN)
        self.taken = False

    @contextmanager
    def taken_when_compiled(self) -> Iterator[None]:
        """Take the device when for the first time something runs that inductor has compiled."""
        compiled: Any = CompiledFxGraph
        call = compiled.__call__

        def in_turn(graph: CompiledFxGraph, inputs: Any) -> Any:
            self.take()
            return call(graph, inputs)

        compiled.__call__ = in_turn
        try:
            yield
        finally:
            compiled.__call__ = call

    def _move(self, places: Any) -> None:
        for parameter, place in zip(self._model.parameters(), places, strict=True):
            parameter.data = parameter.data.to(place)  # the same parameter: compiled code has it in its hands
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
