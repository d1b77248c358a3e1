"""Run pieces of work in separate processes, restarted after a crash or a hang.

A kernel that reads where it must not leaves a device that refuses everything, and one whose warps wait for each other
never returns: neither may cost the pieces that come after.
"""

import multiprocessing
import time
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection, wait
from typing import Any

__all__ = ["Failure", "Note", "Partial", "each_apart"]

Note = Callable[[str | dict[str, Any]], None]
"""Reports to the parent: the name of the step that begins, or a record that is complete before the piece ends.

The time limit of a step starts again at each report.
"""


class Failure(str):
    """Why a piece gave no result, in words."""


class Partial(dict[str, Any]):
    """A record that a piece reported before it ended."""


def each_apart(
    work: Callable[[Any, Note], tuple[Any, bool]],
    pieces: Iterable[Any],
    *,
    seconds: float,
    method: str = "spawn",
    jobs: int = 1,
    deadline: float = float("inf"),
) -> Iterator[tuple[Any, Any]]:
    """Do the pieces; they begin in order.

    Args:
        work: a function of a module, called with a piece; returns its result, and whether the process is still good.
            What it keeps in its module stays for the next piece.
        pieces: picklable; may be a generator that decides on the next piece by what became of the one before.
        seconds: time that one step may take before the process is ended.
        method: how a process starts. A fork would share the state of a device.
        jobs: how many at once; where it is more than one, none finds what another has left in memory.
        deadline: by ``time.monotonic``: processes that still run are ended then, and no piece begins after it.

    Yields:
        Each piece with its result, or with a :class:`Failure`, as it ends; before that, each record that it reported,
        as a :class:`Partial`.
    """
    left = iter(pieces)
    busy: list[_Worker] = []
    rested: list[_Worker] = []
    try:
        while True:
            while len(busy) < jobs and _in_time(deadline) and (piece := next(left, _NO_MORE)) is not _NO_MORE:
                worker = rested.pop() if rested else _Worker(work, method)
                worker.begin(piece, seconds)
                busy.append(worker)
            if not busy:
                return
            worker = _first_to_report(busy, deadline)
            yield from ((worker.piece, Partial(record)) for record in worker.take_partial())
            if not worker.done:
                continue
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


def _in_time(deadline: float) -> bool:
    return time.monotonic() < deadline


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
        self.good = self.done = False
        self._partial: list[dict[str, Any]] = []
        self._note("the start")
        try:
            self.connection.send(piece)
        except OSError:
            pass  # it is dead, which the next look at it finds

    def has_report(self, deadline: float) -> bool:
        """Read the messages of the process and the clock; True if there is a result or a record."""
        if not self.done:
            self.done = self._ended(deadline)
        return self.done or bool(self._partial)

    def take_partial(self) -> list[dict[str, Any]]:
        """Records that were reported since the last call."""
        taken, self._partial = self._partial, []
        return taken

    def _ended(self, deadline: float) -> bool:
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
        if not _in_time(deadline):
            self.result = Failure(f"the deadline passed in {self.step}")
        elif not _in_time(self.until):
            self.result = Failure(f"nothing came back from {self.step} within {self.seconds:g} seconds")
        return self.result is not None

    def end(self) -> None:
        self.connection.close()
        self.process.join(0.5)
        if self.process.is_alive():
            self.process.kill()
            self.process.join(10)

    def _note(self, report: str | dict[str, Any]) -> None:
        if isinstance(report, dict):
            self._partial.append(report)
        else:
            self.step = report
        self.until = time.monotonic() + self.seconds


def _first_to_report(busy: list[_Worker], deadline: float) -> _Worker:
    while True:
        for worker in busy:
            if worker.has_report(deadline):
                return worker
        until = min(deadline, *(worker.until for worker in busy))
        wait([worker.connection for worker in busy], max(0.0, until - time.monotonic()))


def _serve(connection: Connection, work: Callable[[Any, Note], tuple[Any, bool]]) -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    while True:
        # A fork holds the parent's end of the pipe too, so the pipe does not end with the parent.
        if connection not in wait([connection, parent.sentinel]):
            return
        try:
            piece = connection.recv()
        except EOFError:
            return
        result, good = work(piece, lambda step: connection.send(("note", step)))
        connection.send(("result", result, good))
