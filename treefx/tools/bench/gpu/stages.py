"""The stages in the order in which they are worth their time, and how one of them is run."""

import json
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from treefx.errors import InputError, UnsupportedError
from treefx.tools.bench import large as bench_large
from treefx.tools.bench.attention import cuda as bench_cuda
from treefx.tools.bench.attention.settings import SETTINGS, Setting
from treefx.tools.bench.attention.trees import Tree
from treefx.tools.bench.gpu import kernels, launches, steps
from treefx.tools.bench.gpu.batches import SHARING
from treefx.tools.bench.gpu.comparison import compare_steps
from treefx.tools.bench.gpu.scale import Scale
from treefx.tools.bench.gpu.turns import mark_compiled
from treefx.tools.bench.job.processes import Failure, Note, Partial, each_apart

__all__ = ["STAGES", "Stage", "count", "describe", "line", "run"]

_MINUTES, _TO_COMPILE = 7.5, 0.6
"""No case starts after so many minutes; of the time there is, the part after which nothing waits for compilers."""
_MIB = 2**20
_TINY_MODEL = {
    "model_type": "qwen3",
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
}
_MODEL = {"model_type": "qwen3", **bench_large.QWEN3_600M, "num_hidden_layers": 8}
"""Of Qwen3 0.6B's widths; its 28 layers would be compiled for longer than the stage may take."""


@dataclass(frozen=True)
class Stage:
    """One question to a GPU.

    Attributes:
        about: what it answers.
        cases: the measured cases, the most important first.
        measure: measures a case at a scale; its record has ``wrong``, the errors in words.
        rehearsed: makes a case so small that it runs on the CPU.
        environment: variables that are set before anything is imported.
        seconds: after which a case counts as hanging.
        jobs: cases at once: more than one where nothing is timed, or where they take turns.
        apart: whether each case gets a separate process although one runs at a time.
        compare: further records that the newest of all records completes.
        chosen: keeps of a case the batches of these names, or returns None.
    """

    about: str
    cases: Sequence[Any]
    measure: Callable[[Scale, Any], dict[str, Any]]
    rehearsed: Callable[[Any], Any]
    environment: dict[str, str] = field(default_factory=dict)
    seconds: float = 150.0
    jobs: int = 1
    apart: bool = False
    compare: Callable[[Scale, Sequence[dict[str, Any]]], Iterable[dict[str, Any]]] = lambda scale, records: ()
    chosen: Callable[[Any, Sequence[str]], Any] | None = None


@dataclass(frozen=True)
class _Large:
    """A tree of spans of so many tokens under a limit: by default what the device has free."""

    tokens: int
    limit: int | None = None

    @property
    def name(self) -> str:
        return f"85 spans of {self.tokens} tokens"


def _attention(scale: Scale, case: Setting) -> dict[str, Any]:
    timer = scale.milliseconds if scale.rehearsal else None
    options: dict[str, Any] = {"device": scale.device, "dtype": scale.dtype, "with_flex": not scale.rehearsal}
    return next(bench_cuda.run([case], minutes=float("inf"), timer=timer, **options))


def _small_setting(case: Setting) -> Setting:
    nodes = tuple((parent, min(length, 30)) for parent, length in case.tree.nodes[:4])
    group = case.heads // case.kv_heads
    return Setting(Tree(case.tree.name, nodes), head_dim=16, heads=2 * group, kv_heads=2)


def _large(scale: Scale, case: _Large) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "config.json")
        path.write_text(json.dumps(_TINY_MODEL if scale.rehearsal else _MODEL))
        records = bench_large.run(
            model=str(path),
            device=scale.device,
            tokens=case.tokens,
            memory_limit_bytes=case.limit,
            inner="aot_eager" if scale.rehearsal else "inductor",
        )
    parts, rows, uncut = records
    wrong = []
    if parts["limit_mib"] is not None and parts["peak_mib"] > parts["limit_mib"]:
        wrong.append(f"the peak must keep the limit of {parts['limit_mib']:.0f} MiB, got {parts['peak_mib']:.0f}")
    return {"parts": parts, "row_by_row": rows, "uncut": uncut, "wrong": wrong}


def _first(scale: Scale, case: steps.Run) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        os.environ.update(TORCHINDUCTOR_CACHE_DIR=folder, TRITON_CACHE_DIR=str(Path(folder, "triton")))
        return steps.first_step(scale, case)


def _small_tree(case: _Large) -> _Large:
    return replace(case, tokens=24, limit=5 * _MIB)


_UNSEEN = ("norms", "kernels", "model", "way", "batch")
"""What only a file shows, or the name of the case says."""
_INTERPRETED = ("sanitize", "correct", "prologue", "rates")
"""Stages that run generated kernels: in rehearsal in Triton's interpreter."""
STAGES: dict[str, Stage] = {
    "sanitize": Stage(
        "nothing is overwritten while it is read, by Triton's concurrency sanitizer",
        kernels.SANITIZE,
        kernels.sanitize,
        kernels.rehearsed,
        {"TRITON_INSTRUMENTATION_MODE": "consan"},
        seconds=400.0,
        jobs=3,
    ),
    "correct": Stage(
        "all forms are as right as SDPA on separate rows", kernels.CORRECT, kernels.correct, kernels.rehearsed
    ),
    "prologue": Stage("what a program costs without a tile", launches.PROLOGUE, launches.prologue, launches.rehearsed),
    "rates": Stage(
        "what a program and a tile cost in every configuration", launches.RATES, launches.rates, launches.rehearsed
    ),
    "attention": Stage("tree attention against FlexAttention and rows", SETTINGS, _attention, _small_setting),
    "step": Stage(
        "whole steps against inductor on padded and on packed rows",
        steps.STEP,
        steps.step,
        steps.rehearsed,
        {"TORCHINDUCTOR_COMPILE_THREADS": "2"},
        seconds=400.0,
        jobs=16,
        compare=compare_steps,
        chosen=steps.chosen,
    ),
    "first": Stage(
        "a first step, one process at a time, nothing cached",
        steps.FIRST,
        _first,
        steps.rehearsed,
        seconds=240.0,
        apart=True,
    ),
    "large": Stage("a tree larger than memory", (_Large(768), _Large(1536)), _large, _small_tree, seconds=400.0),
}


def run(
    name: str,
    *,
    rehearsal: bool = False,
    minutes: float = _MINUTES,
    cases: int | None = None,
    only: str = "",
    batches: Sequence[str] = (),
    deadline: float = float("inf"),
    layers: int | None = None,
    method: str = "spawn",
) -> Iterator[dict[str, Any]]:
    """Measure the cases of a stage, each in a process that may die alone.

    Args:
        name: one of `STAGES`.
        rehearsal: on the CPU and tiny: shows that every line runs, and no figure.
        minutes: no new case starts after this time.
        cases: how many at most; all by default.
        only: text that the name of a case must contain.
        batches: names of batches; all by default.
        deadline: seconds after which the processes that still run are ended.
        layers: of the models of whole steps: compilers take as long as there are layers; all by default.
        method: how processes start.

    Yields:
        Records as they come: one per batch where a case has several, one per case, and comparisons as soon as a pair
        is complete. Each has ``case`` and ``wrong`` (in words; empty if nothing is).

    Raises:
        InputError: there is no such stage, case or batch.
        UnsupportedError: there is no CUDA device, and this is no rehearsal.
    """
    chosen = _choose(name, cases, only, batches)
    if not rehearsal and not torch.cuda.is_available():
        raise UnsupportedError("this stage must run on a CUDA device, and there is none: try --rehearse on the CPU")
    stage, start, before = STAGES[name], time.perf_counter(), dict(os.environ)
    os.environ.update(_environment(name, rehearsal))
    left, jobs = list(chosen), min(stage.jobs, 2 if rehearsal else 16)
    with tempfile.TemporaryDirectory() as folder:
        turn = Path(folder, "turn")
        scale = Scale(rehearsal, turn, min(jobs, len(left)), _last_wait(minutes, deadline), layers)

        def pieces() -> Iterator[tuple[str, Any, Scale]]:
            while left and time.perf_counter() - start <= 60 * minutes:
                yield name, left.pop(0), scale

        how: dict[str, Any] = {"seconds": stage.seconds, "method": method, "jobs": jobs}
        records: list[dict[str, Any]] = []
        try:
            for (_, case, _), found in each_apart(_work, pieces(), deadline=time.monotonic() + deadline, **how):
                if not isinstance(found, Partial):
                    mark_compiled(turn)  # no process waits for one that has ended
                record = {"wrong": [str(found)]} if isinstance(found, Failure) else found
                records.append({"case": case.name, **record})
                yield records[-1]
                yield from stage.compare(scale, records)
        finally:
            os.environ.clear()
            os.environ.update(before)
    yield from ({"case": case.name, "wrong": ["not measured: the time is up"]} for case in left)


def _last_wait(minutes: float, deadline: float) -> float:
    """By ``time.time``: when nothing waits for compilers any more."""
    return time.time() + _TO_COMPILE * min(deadline, 60 * minutes)


def count(name: str, cases: int | None = None, only: str = "", batches: Sequence[str] = ()) -> int:
    """Return how many cases `run` would measure."""
    return len(_choose(name, cases, only, batches))


def _choose(name: str, cases: int | None, only: str, batches: Sequence[str]) -> list[Any]:
    if name not in STAGES:
        raise InputError(f"--stage must be one of {', '.join(STAGES)}, got {name!r}")
    stage, found = STAGES[name], list(STAGES[name].cases)
    if batches and stage.chosen is None:
        raise InputError(f"--batches is for stages whose cases have several batches; {name} has none")
    if unknown := [batch for batch in batches if batch not in SHARING]:
        raise InputError(f"--batches must be of {', '.join(SHARING)}; got {', '.join(unknown)}")
    if batches and stage.chosen is not None:
        found = [case for case in (stage.chosen(case, batches) for case in found) if case is not None]
    if only and not any(only in case.name for case in found):
        raise InputError(f"--only must be part of the name of a case, such as {found[0].name!r}; got {only!r}")
    return [case for case in found if only in case.name][:cases]


def describe(name: str, rehearsal: bool, records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Read a stage's part of a results file: records, date, device, versions."""
    from importlib.metadata import PackageNotFoundError, version

    versions: dict[str, str | None] = {}
    for package in ("torch", "triton", "transformers", "treefx"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = None
    device = torch.cuda.get_device_name() if not rehearsal and torch.cuda.is_available() else "cpu"
    return {
        "stage": name,
        "rehearsal": rehearsal,
        "device": device,
        "date": datetime.now(timezone.utc).isoformat(timespec="minutes"),
        "versions": versions,
        "records": list(records),
    }


def line(record: dict[str, Any]) -> str:
    """Return one line: what was measured in words, and whether anything is wrong."""
    known = {name: value for name, value in record.items() if name not in ("case", "wrong", *_UNSEEN)}
    found = "; ".join(f"{name.replace('_', ' ')} {_brief(value)}" for name, value in known.items())
    case = f"{record['batch']}, {record['way']}" if "batch" in record else record["case"]
    return f"{case}: {found or '-'}: {'; '.join(record['wrong']) or 'right'}"


def _brief(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name}: {_brief(item)}" for name, item in value.items() if name not in _UNSEEN) + "}"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _environment(name: str, rehearsal: bool) -> dict[str, str]:
    if not rehearsal:
        return STAGES[name].environment
    return {"TRITON_INTERPRET": "1"} if name in _INTERPRETED else {}


def _work(piece: tuple[str, Any, Scale], note: Note) -> tuple[dict[str, Any], bool]:
    name, case, scale = piece
    stage = STAGES[name]
    note(case.name)
    began = time.perf_counter()
    try:
        measured = stage.rehearsed(case) if scale.rehearsal else case
        record, good = stage.measure(replace(scale, report=note), measured), not stage.apart
    except Exception as reason:  # of many types, of the device too: the other cases are worth having
        record, good = {"wrong": [f"{type(reason).__name__}: {str(reason)[:300]}"]}, scale.rehearsal
    return {**record, "seconds": round(time.perf_counter() - began, 2)}, good
