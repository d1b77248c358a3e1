"""Measure treefx's cost without sharing, on the zoo: ``treefx bench unshared``.

Such a batch runs the graph that the inner compiler makes without treefx; on top come building the trie and looking up
what was compiled. Both sides are timed in turn in one process, every step on a batch that neither has seen before.
"""

from __future__ import annotations

import copy
import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import treefx
from treefx.data import Batch
from treefx.tools.bench.job.synthetic import shared_prefix_batch
from treefx.tools.bench.zoo.models import VOCABULARY
from treefx.tools.bench.zoo.run import choose

__all__ = ["geometric_mean", "run"]

_TOLERANCE = 1e-4


def run(
    names: Sequence[str] = (),
    *,
    rows: int = 128,
    length: int = 64,
    repeats: int = 5,
    inner: str = "inductor",
    changing: bool = False,
    on_start: Callable[[str], None] = print,
) -> list[dict[str, Any]]:
    """Time forward and backward in float32, of treefx and its inner compiler alone.

    Args:
        names: Models of the zoo; none for all.
        rows: Rows of the batch, all different in their first token.
        length: Tokens of each row, at most 64.
        repeats: Timed steps of each backend; the median counts.
        inner: Inner compiler of treefx, and the backend it is compared with.
        changing: Every batch has other numbers of rows and columns, half of the given ones and more.
        on_start: Told the model that is being timed.

    Returns:
        One record per model: ``baseline_seconds`` and ``seconds``, medians of the batches; ``ratio``, the median of
        what a batch took of them (above 1: treefx is slower); what treefx ``ran``; in ``note`` why there are no times,
        if there are none.

    Raises:
        InputError: A name is not in the zoo, or there are too many rows for its vocabulary.
    """
    batches = _batches(rows, length, repeats, changing)
    records = []
    for model in choose(names):
        on_start(model.name)
        # Every model recompiles: sizes that an earlier one made symbolic would be slower.
        torch.compiler.reset()
        torch.manual_seed(0)
        try:
            records.append({"model": model.name, **_time(model.build(), batches, inner, repeats)})
        except Exception as error:  # one model must not end the table; its row says what happened
            first_line = next(iter(str(error).splitlines()), "")
            records.append({"model": model.name, "note": f"{type(error).__name__}: {first_line}"})
    return records


def geometric_mean(records: Sequence[dict[str, Any]]) -> float:
    """Of the ratios of all models that were timed; NaN if none was."""
    ratios = [record["ratio"] for record in records if "ratio" in record]
    return statistics.geometric_mean(ratios) if ratios else float("nan")


def _batches(rows: int, length: int, repeats: int, changing: bool) -> list[Batch]:
    """Make batches: those that compile, one to settle, and the timed ones.

    A trie seen before would be looked up, not built.
    """
    draw, sizes = random.Random(0), [(rows, length)] * (repeats + 2)
    if changing:
        sizes = [(draw.randint((rows + 1) // 2, rows), draw.randint(length // 2, length)) for _ in range(repeats + 3)]
    return [shared_prefix_batch(b, 0, t, VOCABULARY, seed=seed) for seed, (b, t) in enumerate(sizes)]


def _time(model: nn.Module, batches: Sequence[Batch], inner: str, repeats: int) -> dict[str, Any]:
    twins = [copy.deepcopy(model) for _ in range(2)]
    steps: list[Any] = [
        torch.compile(twins[0], backend=inner),
        torch.compile(twins[1], backend="treefx", options={"inner": inner}),
    ]
    losses = [_first_loss(step, batches[0]) for step in steps]
    if not abs(losses[1] - losses[0]) <= _TOLERANCE * abs(losses[0]):
        return {"note": f"losses differ, so no time is reported: {losses[0]} and {losses[1]}"}
    seconds: list[list[float]] = [[], []]
    for number, batch in enumerate(batches[1:]):
        for side in (0, 1) if number % 2 else (1, 0):  # the second run finds the batch in the cache
            seconds[side].append(_step(steps[side], batch)[0])
    baseline, ours = (found[-repeats:] for found in seconds)
    ran = treefx.inspect(steps[1]).stats["ran"]
    medians = {"baseline_seconds": statistics.median(baseline), "seconds": statistics.median(ours)}
    ratio = statistics.median(mine / other for mine, other in zip(ours, baseline, strict=True))
    return {**medians, "ratio": ratio, "ran": ran}


def _first_loss(compiled: Any, batch: Batch) -> float:
    """The loss of the step that compiles; dropout draws the same on both sides."""
    torch.manual_seed(0)
    return _step(compiled, batch)[1]


def _step(compiled: Any, batch: Batch) -> tuple[float, float]:
    """Time one forward and backward; return the loss; gradients add up on both sides."""
    started = time.perf_counter()
    out = compiled(**batch.model_inputs())
    loss = out if isinstance(out, Tensor) else out.loss
    loss.backward()
    return time.perf_counter() - started, float(loss.detach())
