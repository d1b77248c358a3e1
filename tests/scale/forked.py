"""``python -m MODULE ARGUMENTS`` without a new interpreter: a fork of ranks.py runs it as ``__main__``."""

import io
import os
import runpy
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.scale.ranks import run_ranks
from treefx.tools.bench.job import ways

__all__ = ["fork_ways", "worker"]


def fork_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every way of a bench run in a fork, which has compiled nothing either."""
    monkeypatch.setattr(ways, "subprocess", SimpleNamespace(run=_run))


def _run(command: Sequence[str], env: Mapping[str, str], **_: Any) -> "subprocess.CompletedProcess[str]":
    python, m, *arguments = command
    assert (python, m) == (sys.executable, "-m")
    with tempfile.TemporaryDirectory() as folder:
        (found,) = run_ranks(__name__, Path(folder), arguments, dict(env), seconds=300, world=1)
    return subprocess.CompletedProcess(list(command), *found)


def worker(rank: int, port: int, folder: str, arguments: list[str], environment: dict[str, str]) -> None:
    """Write the exit status, and what was printed and complained about."""
    os.environ.update(environment)
    sys.argv, status = arguments, 0
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as errors:
        try:
            runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
        except BaseException:
            traceback.print_exc()
            status = 1
    torch.save((status, out.getvalue(), errors.getvalue()), Path(folder) / f"{rank}.pt")
