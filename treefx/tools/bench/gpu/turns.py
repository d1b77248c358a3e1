"""Give the device to one process at a time; all compile side by side."""

import fcntl
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch._inductor.output_code import CompiledFxGraph

__all__ = ["Turn", "mark_compiled", "patiently"]

_TRIES, _PAUSE_S, _LOOK_S, _CROWDED = 30, 5.0, 0.2, 0.1
_Found = TypeVar("_Found")


def patiently(call: Callable[[], _Found], give: Callable[[], object] = lambda: None) -> _Found:
    """Call, and retry after a while if other processes fill the device's memory.

    Args:
        call: what needs room.
        give: gives back what a call has left.

    Raises:
        torch.OutOfMemoryError: there is no room although other processes are small or gone, or one is still there.
    """
    for _ in range(_TRIES):
        try:
            return call()
        except torch.OutOfMemoryError:
            pass  # what it has left is in the traceback's hands
        give()
        _forget()
        if not _crowded():
            break
        time.sleep(_PAUSE_S)
    return call()


def _crowded() -> bool:
    """Whether others hold so much of the device that it matters."""
    if not torch.cuda.is_available():
        return False
    free, total = torch.cuda.mem_get_info()
    return total - free - torch.cuda.memory_reserved() > _CROWDED * total


def _forget() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def mark_compiled(path: Path) -> None:
    """Note next to the file of turns that one more process has compiled, or ended."""
    with _compiled(path).open("ab") as file:
        file.write(b".")


def _compiled(path: Path) -> Path:
    return path.with_suffix(".compiled")


class Turn:
    """A process's claim to the device.

    Attributes:
        taken: whether this process has the device.
        compiled_at: by ``time.perf_counter``: when the first graph was compiled; None before.

    Args:
        path: a file that all processes know; ``None`` where there is no other.
        model: its parameters leave the device while the process waits.
        together: the first turn begins when so many processes have compiled: concurrent compilers slow a step down.
        compiled_by: by ``time.time``: the first turn begins then at the latest.
    """

    def __init__(
        self,
        path: Path | None,
        model: torch.nn.Module,
        together: int = 0,
        compiled_by: float = float("inf"),
    ) -> None:
        self._path = path
        self._file: Any = None if path is None else path.open("a")
        self._model = model
        self._devices = [parameter.device for parameter in model.parameters()]
        self._together, self._compiled_by = together, compiled_by
        self.taken = self._away = False
        self.compiled_at: float | None = None

    def take(self) -> None:
        """Wait until no other process has the device; nothing happens if this one has it."""
        if self.taken or self._file is None:
            return
        self._move(["cpu"] * len(self._devices))
        self._wait_for_compilers()
        fcntl.flock(self._file, fcntl.LOCK_EX)
        self.taken, self._away = True, False
        self._move(self._devices)

    def _wait_for_compilers(self) -> None:
        if self._path is None or self.compiled_at is not None:
            return
        self.compiled_at = time.perf_counter()
        mark_compiled(self._path)
        marks = _compiled(self._path)
        while marks.stat().st_size < self._together and time.time() < self._compiled_by:
            time.sleep(_LOOK_S)

    def give(self) -> None:
        """Let the next one have it, and the memory of gradients."""
        self._model.zero_grad(set_to_none=True)
        if not self.taken:
            return
        self._move(["cpu"] * len(self._devices))
        fcntl.flock(self._file, fcntl.LOCK_UN)
        self.taken, self._away = False, True

    def take_again(self) -> None:
        """Take the device if it was given: nothing is compiled for parameters that are elsewhere."""
        if self._away:
            self.take()

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

    def _move(self, places: Sequence[torch.device | str]) -> None:
        for parameter, place in zip(self._model.parameters(), places, strict=True):
            parameter.data = parameter.data.to(place)  # the same parameter: compiled code has it in its hands
        _forget()
