"""Measure a model's first step, and the next process's: ``treefx bench first-step``.

Every way to compile has an empty folder for the caches of inductor and two processes, one after the other: the first
compiles, the second finds what it left. Processor seconds tell Python (Dynamo, the passes, AOTAutograd, inductor) from
the C++ compilers it starts. ``python -m treefx.tools.bench.first_step CASE`` is one such process, its case given as
JSON.
"""

import json
import os
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from treefx.errors import TreefxError
from treefx.output import watch
from treefx.tools.bench.job.ways import ONE_COMPILER, check_same, empty_caches, in_process

__all__ = ["CASES", "FirstStepCase", "FirstStepError", "measure", "run"]

_STEPS = 7
"""Steps that are timed when nothing is left to compile."""


class FirstStepError(TreefxError):
    """A process failed, or what the processes computed differs."""


@dataclass(frozen=True, kw_only=True)
class FirstStepCase:
    """One way to compile one model, for 6 rows of 40 shared and 24 own tokens."""

    name: str
    backend: str = "treefx"
    regions: bool = False
    """Whether treefx compiles equal layers once."""
    model: str = "qwen3"
    layers: int = 8
    hidden_size: int = 256
    vocab_size: int = 1000


CASES = (
    FirstStepCase(name="inductor", backend="inductor"),
    FirstStepCase(name="treefx, regions=False"),
    FirstStepCase(name="treefx, regions=True", regions=True),
)


def run(
    *,
    model: str = "qwen3",
    layers: int = 8,
    hidden_size: int = 256,
    cases: Sequence[FirstStepCase] = CASES,
    json_output: bool = False,
) -> list[dict[str, Any]]:
    """Take the first step in every way, in two processes each.

    Args:
        model: An architecture of transformers.
        layers: Number of its blocks.
        hidden_size: Its width, a multiple of 64.
        cases: The ways; their model is replaced.
        json_output: A program reads the result, so no progress bar is shown.

    Returns:
        One record per way: seconds of the first step on the clock (``wall``), of the processor in Python (``python``)
        and in the compilers it started (``compilers``), the same of the second process behind ``second_``, seconds of
        each pass of treefx by name, ``step``, processor seconds of a later step; ``wall_of_first_way`` and
        ``python_of_first_way``, over the first way's; ``second_of_wall`` and ``second_of_python``, the second process
        over the first.

    Raises:
        FirstStepError: A process failed, or losses or gradients differ.
    """
    sizes: dict[str, Any] = {"model": model, "layers": layers, "hidden_size": hidden_size}
    records: list[dict[str, Any]] = []
    for case in watch(cases, "first steps, a process each", quiet=json_output):
        records.append(_start(replace(case, **sizes)))
        check_same(records[-1], records[0], FirstStepError)
    passes = dict.fromkeys((name for record in records for name in record["passes"]), 0.0)
    return [_compared({**record, "passes": passes | record["passes"]}, records[0]) for record in records]


def _start(case: FirstStepCase) -> dict[str, Any]:
    with empty_caches() as environment:
        given = {**environment, **ONE_COMPILER}
        first, second = (in_process("treefx.tools.bench.first_step", case, given, FirstStepError) for _ in range(2))
    later = {f"second_{name}": second[name] for name in ("wall", "python", "compilers")}
    return {"way": case.name, **first, **later, "numbers": first["numbers"] + second["numbers"]}


def _compared(record: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    shown = {name: value for name, value in record.items() if name not in ("numbers", "passes")}
    ratios = {f"{name}_of_first_way": record[name] / other[name] for name in ("wall", "python")}
    ratios |= {f"second_of_{name}": record[f"second_{name}"] / record[name] for name in ("wall", "python")}
    return {**shown, **ratios, **record["passes"]}


def measure(case: FirstStepCase) -> dict[str, Any]:
    """Take the first step of one case in this process, and some more."""
    import torch

    from treefx.tools.bench.job.models import make_config, make_model
    from treefx.tools.bench.job.synthetic import shared_prefix_batch

    torch.manual_seed(0)
    torch.set_num_threads(1)
    sizes = {"vocab_size": case.vocab_size, "hidden_size": case.hidden_size, "layers": case.layers}
    causal_lm = make_model(make_config(case.model, **sizes, max_positions=128))
    inputs = shared_prefix_batch(6, 40, 24, case.vocab_size).model_inputs()
    options: Any = {"regions": case.regions} if case.backend == "treefx" else None
    compiled: Any = torch.compile(causal_lm, backend=case.backend, options=options)

    def step() -> float:
        causal_lm.zero_grad(set_to_none=True)
        loss = compiled(**inputs, use_cache=False).loss
        loss.backward()
        return float(loss.detach())

    seconds, loss = _taken(step)
    numbers = [loss, *(float(x.grad.norm()) for x in causal_lm.parameters() if x.grad is not None)]
    later = statistics.median(_taken(step)[0]["python"] for _ in range(_STEPS))
    return {**seconds, "step": later, "passes": _passes(compiled, case), "numbers": numbers}


def _taken(step: Any) -> tuple[dict[str, float], float]:
    """Seconds of a step, and its loss."""
    before, started, worked = os.times(), time.perf_counter(), time.process_time()
    loss = step()
    wall, python, after = time.perf_counter() - started, time.process_time() - worked, os.times()
    compilers = after.children_user + after.children_system - before.children_user - before.children_system
    return {"wall": wall, "python": python, "compilers": compilers}, loss


def _passes(compiled: Any, case: FirstStepCase) -> dict[str, float]:
    if case.backend != "treefx":
        return {}
    import treefx

    stats = treefx.inspect(compiled).stats
    if stats["ran"] != "packed":
        raise FirstStepError(f"{case.name!r} should run packed, but ran {stats['ran']}: {stats['fallback']}")
    return dict(stats["seconds"])


if __name__ == "__main__":
    print(json.dumps(measure(FirstStepCase(**json.loads(sys.argv[1])))))
