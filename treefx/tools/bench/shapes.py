"""Measure batches that never repeat a shape, with compilations: ``treefx bench shapes``.

Trainers feed batches as they come: other rows, other lengths in every step. Every way to compile runs all of them in a
separate process with empty caches, then all of them again, when nothing is left to compile. ``python -m
treefx.tools.bench.shapes CASE`` is one such process, its case given as JSON.
"""

import json
import math
import random
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from treefx.errors import TreefxError
from treefx.output import watch
from treefx.tools.bench.job.ways import check_same, empty_caches, in_process

__all__ = ["CASES", "SERIES", "ShapesCase", "ShapesError", "measure", "run"]

SERIES = {"near": ((3, 15), (270, 330)), "wide": ((3, 15), (64, 1024))}
"""Least and most rows and columns of the batches of a series."""


class ShapesError(TreefxError):
    """A process failed, or what the processes computed differs."""


@dataclass(frozen=True, kw_only=True)
class ShapesCase:
    """Describe one way to compile one model for random batches that share two thirds."""

    name: str
    backend: str = "treefx"
    options: tuple[tuple[str, Any], ...] = ()
    """Of the backend, as pairs."""
    dynamic: bool | None = None
    model: str = "llama"
    layers: int = 2
    hidden_size: int = 256
    vocab_size: int = 1000
    batches: int = 14
    rows: tuple[int, int] = (3, 15)
    columns: tuple[int, int] = (270, 330)


CASES = (
    ShapesCase(name="inductor", backend="inductor"),
    ShapesCase(name="treefx"),
    ShapesCase(name="treefx, dynamic=True", dynamic=True),
)


def run(
    *,
    series: str = "near",
    batches: int = 14,
    model: str = "llama",
    layers: int = 2,
    hidden_size: int = 256,
    cases: Sequence[ShapesCase] = CASES,
    json_output: bool = False,
) -> list[dict[str, Any]]:
    """Train on batches of random shapes in every way.

    Args:
        series: Which rows and columns: a name in ``SERIES``.
        batches: How many, no two of one shape.
        model: An architecture of transformers.
        layers: Number of its blocks.
        hidden_size: Its width, a multiple of 64.
        cases: The ways; their model and batches are replaced.
        json_output: A program reads the result, so no progress bar is shown.

    Returns:
        One record per way: ``whole_seconds`` of the first round with its compilations, ``steps_seconds`` of the second;
        ``compiles`` (of treefx's graphs, or Dynamo's) in both; ``whole`` and ``steps``, the first way's seconds over
        its own; ``bound``, raw tokens over distinct ones, and ``of_bound``, ``steps`` over it.

    Raises:
        ShapesError: A process failed, or losses or gradients differ.
    """
    rows, columns = SERIES[series]
    sizes: dict[str, Any] = {"model": model, "layers": layers, "hidden_size": hidden_size}
    records: list[dict[str, Any]] = []
    for case in watch(cases, "training, a process each", quiet=json_output):
        records.append(_start(replace(case, **sizes, batches=batches, rows=rows, columns=columns)))
        check_same(records[-1], records[0], ShapesError)
    return [_compared(record, records[0]) for record in records]


def _start(case: ShapesCase) -> dict[str, Any]:
    with empty_caches() as environment:
        return {"way": case.name, **in_process("treefx.tools.bench.shapes", case, environment, ShapesError)}


def _compared(record: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    shown = {name: value for name, value in record.items() if name != "numbers"}
    steps = other["steps_seconds"] / record["steps_seconds"]
    whole = other["whole_seconds"] / record["whole_seconds"]
    return {**shown, "whole": whole, "steps": steps, "of_bound": steps / record["bound"]}


def measure(case: ShapesCase) -> dict[str, Any]:
    """Train on the batches of one case, twice, in this process."""
    import torch

    from treefx.tools.bench.job.models import make_config, make_model

    torch.manual_seed(0)
    torch.set_num_threads(1)
    sizes = {"vocab_size": case.vocab_size, "hidden_size": case.hidden_size, "layers": case.layers}
    causal_lm = make_model(make_config(case.model, **sizes, max_positions=case.columns[1]))
    compiled: Any = torch.compile(
        causal_lm, backend=case.backend, options=dict(case.options) or None, dynamic=case.dynamic
    )
    batches = _batches(case)
    first, numbers = _round(compiled, causal_lm, batches)
    second, _ = _round(compiled, causal_lm, batches)
    found = {"compiles": _compiles(compiled, case), "whole_seconds": first, "steps_seconds": second}
    return {**found, "bound": _bound(batches), "numbers": numbers}


def _round(compiled: Any, causal_lm: Any, batches: Sequence[Any]) -> tuple[float, list[float]]:
    """Time a step of every batch, without an optimizer; return losses and norms too."""
    numbers: list[float] = []
    started = time.perf_counter()
    for batch in batches:
        causal_lm.zero_grad(set_to_none=True)
        loss = compiled(**batch.model_inputs(), use_cache=False).loss
        loss.backward()
        norms = [float(x.grad.norm()) for x in causal_lm.parameters() if x.grad is not None]
        numbers += [float(loss.detach()), math.hypot(*norms)]
    return time.perf_counter() - started, numbers


def _bound(batches: Sequence[Any]) -> float:
    """Raw tokens over distinct ones of all batches."""
    shapes = [batch.input_ids.shape for batch in batches]
    raw = sum(rows * columns for rows, columns in shapes)
    return float(raw / (raw - sum((rows - 1) * _shared(columns) for rows, columns in shapes)))


def _shared(columns: int) -> int:
    return 2 * columns // 3


def _batches(case: ShapesCase) -> list[Any]:
    from treefx.tools.bench.job.synthetic import shared_prefix_batch

    draw = random.Random(0)
    shapes: dict[tuple[int, int], None] = {}
    while len(shapes) < case.batches:
        shapes[draw.randint(*case.rows), draw.randint(*case.columns)] = None
    return [
        shared_prefix_batch(rows, _shared(columns), columns - _shared(columns), case.vocab_size, seed=seed)
        for seed, (rows, columns) in enumerate(shapes)
    ]


def _compiles(compiled: Any, case: ShapesCase) -> int:
    if case.backend != "treefx":
        from torch._dynamo.utils import counters

        return int(counters["stats"]["unique_graphs"])
    import treefx

    return int(treefx.inspect(compiled).stats["compiles"])


if __name__ == "__main__":
    print(json.dumps(measure(ShapesCase(**json.loads(sys.argv[1])))))
