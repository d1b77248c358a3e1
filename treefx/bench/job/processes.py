"""Pieces of work in processes of their own, one after another or side by side; a fresh one after a crash or a hang.

A kernel that reads where it must not leaves a device that refuses everything, and one whose warps wait for each other
never returns: neither may cost the pieces that come after.
"""

import multiprocessing
import time
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection, wait
from typing import Any

__all__ = ["Failure", "Note", "each_apart"]

Note = Callable[[str], None]
"""Tells the parent what begins now; the time of one step counts from there."""


class Failure(str):
    """What became of a piece that gave no result, in words."""


def each_apart(
    work: Callable[[Any, Note], tuple[Any, bool]],
    pieces: Iterable[Any],
    *,
    seconds: float,
    method: str = "spawn",
    jobs: int = 1,
) -> Iterator[tuple[Any, Any]]:
    """Do the pieces; they begin in order.

    Args:
        work: a function of a module, called with a piece; returns its result, and whether the process is still good.
            What it keeps in its module stays for the next piece.
        pieces: picklable; may be a generator that decides on the next piece by what became of the one before.
        seconds: time that one step may take before the process is ended.
        method: how a process starts. A fork would share the state of a device.
        jobs: how many at once; where it is more than one, none finds what another has left in memory.

    Yields:
        Each piece with its result, or with a :class:`Failure`, as it ends.
    """
    left = iter(pieces)
    busy: list[_Worker] = []
    rested: list[_Worker] = []
    try:
        while True:
            while len(busy) < jobs and (piece := next(left, _NO_MORE)) is not _NO_MORE:
                worker = rested.pop() if rested else _Worker(work, method)
                worker.begin(piece, seconds)
                busy.append(worker)
            if not busy:
                return
            worker = _first_to_end(busy)
            busy.remove(worker)
            if worker.good and jobs == 1:
                rested.append(worker)
            else:
                worker.end()
            yield worker.piece, worker.result
    finally:
        for worker in busy + rested:
            worker.end()


_NO_MORE = object()


class _Worker:
    """A process and what it works on."""

    def __init__(self, work: Callable[[Any, Note], tuple[Any, bool]], method: str) -> None:
        context: Any = multiprocessing.get_context(method)
        self.connection, other = context.Pipe()
        self.process = context.Process(target=_serve, args=(other, work), daemon=True)
        self.process.start()
        other.close()

    def begin(self, piece: Any, seconds: float) -> None:
        self.piece, self.seconds = piece, seconds
        self.result: Any = None
        self.good = False
        self._note("the start")
        try:
            self.connection.send(piece)
        except OSError:
            pass  # it is dead, which the next look at it finds

    def ended(self) -> bool:
        """Whether there is a result, after reading what has come and looking at the clock."""
        try:
            while self.connection.poll():
                kind, *answer = self.connection.recv()
                if kind == "result":
                    self.result, self.good = answer
                    return True
                self._note(answer[0])
        except (EOFError, OSError):
            self.process.join(10)
            self.result = Failure(f"its process died in {self.step}, exit code {self.process.exitcode}")
            return True
        if time.monotonic() < self.until:
            return False
        self.result = Failure(f"nothing came back from {self.step} within {self.seconds:g} seconds")
        return True

    def end(self) -> None:
        self.connection.close()
        self.process.join(0.5)
        if self.process.is_alive():
            self.process.kill()
            self.process.join(10)

    def _note(self, step: str) -> None:
        self.step, self.until = step, time.monotonic() + self.seconds


def _first_to_end(busy: list[_Worker]) -> _Worker:
    while True:
        for worker in busy:
            if worker.ended():
                return worker
        until = min(worker.until for worker in busy)
        wait([worker.connection for worker in busy], max(0.0, until - time.monotonic()))


def _serve(connection: Connection, work: Callable[[Any, Note], tuple[Any, bool]]) -> None:
    while True:
        try:
            piece = connection.recv()
        except EOFError:
            return
        result, good = work(piece, lambda step: connection.send(("note", step)))
        connection.send(("result", result, good))
