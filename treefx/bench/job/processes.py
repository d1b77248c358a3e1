"""One piece of work after another in a process of its own, and in a fresh one after a crash or a hang.

A kernel that reads where it must not leaves a device that refuses everything, and one whose warps wait for each other
never returns: neither may cost the pieces that come after.
"""

import multiprocessing
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection
from typing import Any

__all__ = ["Failure", "Note", "each_apart"]

Note = Callable[[str], None]
"""Tells the parent what begins now; the time of one step counts from there."""


class Failure(str):
    """What became of a piece that gave no result, in words."""


def each_apart(
    work: Callable[[Any, Note], tuple[Any, bool]], pieces: Iterable[Any], *, seconds: float, method: str = "spawn"
) -> Iterator[tuple[Any, Any]]:
    """Do the pieces in order.

    Args:
        work: a function of a module, called with a piece; returns its result, and whether the process is still good.
            What it keeps in its module stays for the next piece.
        pieces: picklable; may be a generator that decides on the next piece by what became of the one before.
        seconds: time that one step may take before the process is ended.
        method: how a process starts. A fork would share the state of a device.

    Yields:
        Each piece with its result, or with a :class:`Failure`.
    """
    worker: _Worker | None = None
    try:
        for piece in pieces:
            worker = worker or _Worker(work, method)
            result, good = worker.run(piece, seconds)
            if not good:
                worker.end()
                worker = None
            yield piece, result
    finally:
        if worker is not None:
            worker.end()


class _Worker:
    def __init__(self, work: Callable[[Any, Note], tuple[Any, bool]], method: str) -> None:
        context: Any = multiprocessing.get_context(method)
        self.connection, other = context.Pipe()
        self.process = context.Process(target=_serve, args=(other, work), daemon=True)
        self.process.start()
        other.close()

    def run(self, piece: Any, seconds: float) -> tuple[Any, bool]:
        step = "the start"
        try:
            self.connection.send(piece)
            while self.connection.poll(seconds):
                kind, *answer = self.connection.recv()
                if kind == "result":
                    return answer[0], answer[1]
                step = answer[0]
        except (EOFError, OSError):
            self.process.join(10)
            return Failure(f"its process died in {step}, exit code {self.process.exitcode}"), False
        return Failure(f"nothing came back from {step} within {seconds:g} seconds"), False

    def end(self) -> None:
        self.connection.close()
        self.process.join(0.5)
        if self.process.is_alive():
            self.process.kill()
            self.process.join(10)


def _serve(connection: Connection, work: Callable[[Any, Note], tuple[Any, bool]]) -> None:
    while True:
        try:
            piece = connection.recv()
        except EOFError:
            return
        result, good = work(piece, lambda step: connection.send(("note", step)))
        connection.send(("result", result, good))
