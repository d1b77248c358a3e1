"""Write the records of ``treefx run`` when a process ends: tables and files.

Tables go to standard error, files into a folder.

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
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from treefx.inspection.inspector import Inspection
from treefx.inspection.observation.observed import Observation, account
from treefx.inspection.report.report import Report
from treefx.runtime.observed.observer import Observer, observers
from treefx.runtime.records import models_of_the_run
from treefx.runtime.run_record import RECORD

__all__ = ["report_at_end", "whatever_happens", "write_all"]

_folder: Path | None = None
_process = os.getpid()
"""Forked processes, such as workers of a data loader, report nothing."""


@functools.cache
def report_at_end(folder: str | None) -> None:
    """Print and write when the process ends, once.

    Call it after PyTorch was imported, which registers its own exit handlers.

    Args:
        folder: For the files; None for none.
    """
    global _folder
    atexit.register(write_all)
    if folder is None:
        return
    _folder, RECORD.is_on = Path(folder), True
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
    """Write the record of every model that treefx observed, compiled or converted.

    Args:
        is_end: Whether the process ends by itself: then rank 0 prints, and time and memory of observed models are
            predicted, which takes seconds, unless an exception ends the run.
    """
    if os.getpid() != _process:
        return
    rank = os.environ.get("RANK", "0")
    for number, observer in enumerate([observer for observer in observers() if observer.until_now()[0].steps]):
        with whatever_happens(observer.name):
            observation = account(observer, predicts=is_end and not hasattr(sys, "last_type"))
            _finish(f"observation-{_name(rank, number)}", observation, prints=is_end and rank == "0")
    for number, (name, runs) in enumerate(models_of_the_run()):
        with whatever_happens(name):
            report = Inspection(runs, name)
            _finish(f"report-{_name(rank, number)}", report, prints=is_end and rank == "0")
    _restore_exit_status()


def _finish(name: str, record: Observation | Report, *, prints: bool) -> None:
    """Write one record, and print it."""
    if _folder is not None:
        _write(_folder / f"{name}.json", record.to_json())
    if _folder is not None and isinstance(record, Report):
        record.to_html(_folder / f"{name}.html")
    if prints:
        where = "" if _folder is None else f"\n{'written to':<22}{_folder / name}.json"
        print(_text(record) + where, file=sys.stderr, flush=True)


def _text(record: Observation | Report) -> str:
    return record.summary() if isinstance(record, Observation) else f"{record.verdict.sentence}\n{record.summary()}"


@contextmanager
def whatever_happens(name: str) -> Iterator[None]:
    """A record that cannot be made must not change how the run ends."""
    try:
        yield
    except Exception as error:
        first_line = next(iter(str(error).splitlines()), "")
        print(f"treefx cannot report {name}: {type(error).__name__}: {first_line}", file=sys.stderr, flush=True)


def _restore_exit_status() -> None:
    """Restore the exit by SIGINT after Ctrl-C.

    Python ends that way only if no code compiled from text has run since, and libraries run such code.
    """
    if getattr(sys, "last_type", None) is KeyboardInterrupt:
        with suppress(KeyboardInterrupt):
            exec("raise KeyboardInterrupt")


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
