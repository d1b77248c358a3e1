"""Run a foreign function in bounded time: a chat template is a program and may loop.

A thread that exists only while such functions run raises an exception in the thread of the one that is late, at its
next step in Python. So the limit holds in any thread, and needs no signal; a single long call of C ends first.
"""

import ctypes
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

__all__ = ["run_within"]

T = TypeVar("T")
_PERIOD_SECONDS = 0.1
_IDLE_PERIODS = 10
"""The watching thread ends when nothing ran at so many looks."""
_STEPS = 100
"""In so many turns of a loop, Python looks for exceptions that other threads sent (one suffices today)."""


class _TooLate(BaseException):
    """Ends a function that is late; no template catches it."""


@dataclass(eq=False)
class _Run:
    """A function that runs, its thread, and whether its thread was told to stop."""

    thread: int
    deadline: float
    is_stopped: bool = False


@dataclass(eq=False)
class _Watch:
    """The functions that run, and the thread that looks at them now and then."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    runs: set[_Run] = field(default_factory=set)
    thread: threading.Thread | None = None

    def add(self, run: _Run) -> None:
        """Watch a function from now on."""
        with self.lock:
            self.runs.add(run)
            if self.thread is None:
                thread = threading.Thread(target=self._look, name="treefx-template-limit", daemon=True)
                thread.start()
                self.thread = thread

    def remove(self, run: _Run) -> None:
        """Leave a function alone; a pending exception is raised in its thread now.

        Taken back instead, it would leave the interpreter looking for it at every step from then on, and Python 3.11
        would never begin the next call under ``sys.setprofile``, a debugger or a coverage tool.
        """
        with self.lock:
            self.runs.discard(run)
        if run.is_stopped:
            for _ in range(_STEPS):
                pass

    def _look(self) -> None:
        idle = 0
        while True:
            time.sleep(_PERIOD_SECONDS)
            with self.lock:
                idle = 0 if self.runs else idle + 1
                if idle == _IDLE_PERIODS:
                    self.thread = None
                    return
                now = time.monotonic()
                for run in [run for run in self.runs if run.deadline <= now]:
                    self.runs.discard(run)
                    run.is_stopped = True
                    _raise_in(run.thread, _TooLate)


def _raise_in(thread: int, error: type[BaseException]) -> None:
    given: Any = ctypes.py_object(error)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), given)


_watch = _Watch()


def _forget() -> None:
    """A forked process has no such thread, and its lock may be held for ever."""
    global _watch
    _watch = _Watch()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


def run_within(seconds: float | None, function: Callable[[], T]) -> T:
    """Run a function and return its result, or raise its exception.

    Args:
        seconds: how long it may take; None sets no limit.
        function: takes no arguments.

    Raises:
        TimeoutError: the time is over.
    """
    if seconds is None:
        return function()
    run = _Run(threading.get_ident(), time.monotonic() + seconds)
    try:
        try:
            _watch.add(run)
            return function()
        finally:
            _watch.remove(run)
    except _TooLate:
        raise TimeoutError(f"{seconds:g} seconds are over") from None
