"""Run measurements of a GPU in separate processes, so that a failure costs one of them."""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from treefx.errors import UnsupportedError
from treefx.tools.bench.attention import cuda as bench_attention_cuda
from treefx.tools.bench.attention.settings import SETTINGS, Setting
from treefx.tools.bench.job.processes import Failure, Note, each_apart

__all__ = ["Task", "run"]

_STEP_SECONDS = 150.0
"""A step compiles a dozen kernels at most, one after the other."""


@dataclass(frozen=True)
class Task:
    """One setting.

    Attributes:
        setting: the measured case.
        device: where.
        path: the form of the kernels, or ``None`` for the best one.
    """

    setting: Setting
    device: str
    path: str | None


def run(
    settings: Sequence[Setting] = SETTINGS,
    *,
    minutes: float = 7.5,
    device: str = "cuda",
    seconds: float = _STEP_SECONDS,
    work: Callable[[Task, Note], tuple[dict[str, Any], bool]] | None = None,
    method: str = "spawn",
) -> Iterator[dict[str, Any]]:
    """Measure as ``attention.cuda.run`` does, and go on after a crash or a hang.

    After the first of them the same setting is measured again with the plain kernels alone, and so are all others.

    Args:
        settings: what to measure.
        minutes: no new setting starts after this time.
        device: where.
        seconds: time of one step, after which it counts as hanging.
        work: measures one setting; returns its record, and whether the device still answers.
        method: how processes start.

    Yields:
        The records; those that were measured with the plain kernels alone have ``path``.

    Raises:
        UnsupportedError: there is no such device.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise UnsupportedError("this benchmark must run on a CUDA device, and there is none: use --device cpu")
    start = time.perf_counter()
    path: str | None = None
    lost, begun = False, 0

    def tasks() -> Iterator[Task]:
        nonlocal path, begun
        for setting in settings:
            if time.perf_counter() - start > 60 * minutes:
                return
            begun += 1
            yield Task(setting, device, path)
            if lost and path is None:
                path = "plain"
                yield Task(setting, device, path)

    for task, found in each_apart(work or _work, tasks(), seconds=seconds, method=method):
        record = {"wrong": [str(found)], "lost": True} if isinstance(found, Failure) else dict(found)
        lost = bool(record.get("lost"))
        record |= {"case": task.setting.name, "total_s": round(time.perf_counter() - start, 1)}
        yield record if task.path is None else {**record, "path": task.path}
    for setting in settings[begun:]:
        yield {"case": setting.name, "wrong": [f"not measured: the {minutes:g} minutes are up"]}


def _work(task: Task, note: Note) -> tuple[dict[str, Any], bool]:
    if task.path is not None:
        os.environ["TREEFX_KERNEL_PATH"] = task.path
    note("the start of the device")
    record = next(bench_attention_cuda.run([task.setting], minutes=float("inf"), device=task.device, note=note))
    if record["wrong"] and not _answers(task.device):
        return {**record, "lost": True}, False
    return record, True


def _answers(device: str) -> bool:
    """Return whether the device still works: after an illegal access it refuses everything."""
    try:
        torch.ones(1, device=device).sum().item()
    except RuntimeError:
        return False
    return True
