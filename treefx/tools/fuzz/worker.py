"""Judge programs in a process that is replaced after a crash, a hang or too much memory."""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
import signal
from multiprocessing.connection import Connection
from typing import Any

from treefx.tools.fuzz.program import Program
from treefx.tools.fuzz.samples.sample import Sample
from treefx.tools.fuzz.samples.verdict import judge_sample
from treefx.tools.fuzz.truth import Outcome, judge

__all__ = ["Worker"]

_PROGRAMS = 150
"""Programs after which a process is replaced: what Dynamo keeps of each never goes."""
_SECONDS_TO_END = 5.0


class Worker:
    """Judge programs in a separate process, which is replaced when it ends or hangs.

    Args:
        limit_s: Seconds that a program may take.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._process: Any = None
        self._connection: Connection | None = None
        self._done: list[int] = []

    @property
    def done(self) -> list[int]:
        """The programs that the process has judged, by their numbers."""
        return list(self._done)

    def run(self, program: Program | Sample) -> Outcome:
        """What became of the program."""
        if self._connection is None or len(self._done) >= _PROGRAMS:
            self.restart()
        assert self._connection is not None
        self._done.append(program.seed)
        try:
            self._connection.send(program)
            if not self._connection.poll(self._limit_s):
                self._process.kill()
                self.close()
                return Outcome("hung", f"not done after {self._limit_s:g} s", seconds=self._limit_s)
            return Outcome(**self._connection.recv())
        except (EOFError, OSError):
            return Outcome("crashed", self._epitaph())

    def _epitaph(self) -> str:
        self._process.join(10)
        code = self._process.exitcode
        self.close()
        return f"the process ended: {signal.Signals(-code).name if code is not None and code < 0 else f'status {code}'}"

    def restart(self) -> None:
        """A fresh process, in which nothing was compiled before."""
        self.close()
        context = _context()
        self._connection, other = context.Pipe()
        self._process = context.Process(target=_serve, args=(other,), daemon=True)
        self._process.start()
        other.close()
        self._done = []

    def close(self) -> None:
        """End the process: it ends by itself while idle, and returns its semaphores."""
        if self._connection is not None:
            self._connection.close()
        if self._process is not None:
            self._process.join(_SECONDS_TO_END)
            self._process.kill()
            self._process.join()
        self._process = self._connection = None


def _context() -> Any:
    """Return a context that forks preloaded processes; without fork, fresh ones."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["treefx.tools.fuzz.preloaded"])
    return context


def _serve(connection: Connection) -> None:
    import torch

    gc.set_threshold(100_000, 20, 20)  # compilers make many objects that stay: a seventh of the time went into looking
    torch.set_num_threads(1)
    torch._logging._internal.set_logs(all=logging.CRITICAL)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while True:
        try:
            program = connection.recv()
        except EOFError:
            return
        found = judge_sample(program) if isinstance(program, Sample) else judge(program)
        connection.send(found.to_dict())
