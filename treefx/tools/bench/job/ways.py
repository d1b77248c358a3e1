"""Compare ways of doing one piece of work, each in a fresh process without caches."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from treefx.errors import TreefxError
from treefx.tools.bench.job.failures import what_failed

__all__ = ["ONE_COMPILER", "check_same", "empty_caches", "in_process", "logged_sharing"]


ONE_COMPILER = {"TORCHINDUCTOR_COMPILE_THREADS": "1"}
"""Compilers that wait in a pool for more are no children that have ended, and their seconds would not be counted."""
_TOLERANCE = 1e-4
"""In float32, relative."""


@contextmanager
def empty_caches() -> Iterator[dict[str, str]]:
    """The environment of processes that find no compiled code but each other's."""
    with tempfile.TemporaryDirectory() as folder:
        yield {**os.environ, "TORCHINDUCTOR_CACHE_DIR": folder}


def in_process(module: str, case: Any, environment: Mapping[str, str], error: type[TreefxError]) -> dict[str, Any]:
    """Run ``python -m module CASE``.

    Args:
        module: Prints one line of JSON last, its record.
        case: A dataclass with a field ``name``, given as JSON.
        environment: Of the process.
        error: The error to raise where the process fails.

    Returns:
        The record.
    """
    command = [sys.executable, "-m", module, json.dumps(asdict(case))]
    done = subprocess.run(command, capture_output=True, text=True, env=dict(environment))
    if done.returncode != 0:
        raise error(f"{case.name!r} failed in its own process:\n{what_failed(done.stderr)}")
    record: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return record


def check_same(record: Mapping[str, Any], other: Mapping[str, Any], error: type[TreefxError]) -> float:
    """Raise ``error`` unless the ``numbers`` of two ways (losses, norms) agree.

    Returns:
        The largest relative difference.
    """
    pairs = list(zip(record["numbers"], other["numbers"], strict=True))
    errors = [abs(a - b) / max(abs(b), 1e-30) for a, b in pairs]
    if not all(each <= _TOLERANCE for each in errors):
        raise error(
            f"{record['way']} and {other['way']} should compute the same, but losses or norms of gradients differ by "
            f"{max(errors):.1e} (allowed {_TOLERANCE}), so no time is reported"
        )
    return max(errors, default=0.0)


def logged_sharing(log: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What treefx logged with a trainer's metrics, step by step.

    Returns:
        ``sharing`` and ``sharing_possible``, raw over distinct tokens, the least and the most of a step; ``compiles``;
        ``fallbacks``, steps that shared nothing for a reason. Empty where treefx logged nothing.
    """
    ours = [entry for entry in log if "treefx/sharing" in entry]
    if not ours:
        return {}

    def least_and_most(name: str) -> str:
        values = [entry[f"treefx/{name}"] for entry in ours]
        return f"{min(values):.2f} to {max(values):.2f}"

    return {
        **{name: least_and_most(name) for name in ("sharing", "sharing_possible")},
        "compiles": int(ours[-1]["treefx/compiles"]),
        "fallbacks": int(sum(entry["treefx/fallback"] for entry in ours)),
    }
