"""What ``treefx run`` writes when a process ends, however it ends: tables on standard error, files in a folder.

Files are written when Python exits (also after an exception or Ctrl-C) and on SIGTERM, by which launchers end the
other ranks of a run that failed. Against SIGKILL, observations are also written after 1, 2, 4, 8, ... steps.
"""

from __future__ import annotations

import atexit
import functools
import os
import signal
import sys
import threading
from pathlib import Path
from types import FrameType

from treefx.inspection.observation.observed import account
from treefx.runtime.observed.observer import Observer, observers

__all__ = ["report_at_end", "write_all"]

_folder: Path | None = None
_process = os.getpid()
"""Forked processes, such as workers of a data loader, report nothing."""


@functools.cache
def report_at_end(folder: str | None) -> None:
    """Write when the process ends, and print; once, and after PyTorch was imported, which takes itself down at exit.

    Args:
        folder: For the files; None for none.
    """
    global _folder
    atexit.register(write_all)
    if folder is None:
        return
    _folder = Path(folder)
    Observer.on_step = _write_now_and_then
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _end)


def _end(number: int, frame: FrameType | None) -> None:
    """Write, then end as if there had been no handler."""
    signal.signal(number, signal.SIG_DFL)
    write_all(is_end=False)
    os.kill(os.getpid(), number)


def _write_now_and_then(observer: Observer) -> None:
    steps = observer.totals.steps
    if not steps & (steps - 1):
        write_all(is_end=False)


def write_all(*, is_end: bool = True) -> None:
    """Write the record of every observed model of the process.

    Args:
        is_end: Whether Python exits: then rank 0 prints its table, and time and memory are predicted, which takes
            seconds, unless an exception ends the run.
    """
    if os.getpid() != _process:
        return
    rank = os.environ.get("RANK", "0")
    found = [observer for observer in observers() if observer.until_now()[0].steps]
    for number, observer in enumerate(found):
        observation = account(observer, predicts=is_end and not hasattr(sys, "last_type"))
        if _folder is not None:
            _write(_folder / f"observation-{_name(rank, number)}.json", observation.to_json())
        if is_end and rank == "0":
            print(observation.summary(), file=sys.stderr, flush=True)


def _name(rank: str, number: int) -> str:
    """Of a model: by rank, and by process where launchers name no ranks."""
    process = f"rank{rank}" if "RANK" in os.environ else f"rank0-process{_process}"
    return process if not number else f"{process}-model{number}"


def _write(path: Path, text: str) -> None:
    """Write a file that is whole at any time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)
