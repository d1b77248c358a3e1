"""Run a few parts of a forest step by step, and measure seconds and added bytes."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from treefx.errors import InputError
from treefx.forests.forest import Forest
from treefx.planning.cost.memory import quick_collections, track_peak
from treefx.planning.cost.model import CostModel, Size
from treefx.planning.cost.states import PerRun
from treefx.planning.execution.execute import Executor, LogProbs, Model
from treefx.planning.execution.gradients import Gradients
from treefx.planning.search.part import Part, Schedule, Step, StepKind, boundary, edge_ids, outgoing

__all__ = ["Sample", "measure_steps", "probe_schedules"]

_REPEATS = 3
_LONGEST_BOUNDARY = 8
"""Tokens above the part with the longest boundary, in lengths of the longest part."""
_NO_STATES = dict.fromkeys(PerRun._fields, 0.0)


@dataclass(frozen=True)
class Sample:
    """One measured step.

    Attributes:
        kind: "forward", "backward" or "kv".
        size: of the part.
        bytes: the peak above the memory in use when the step began.
        left_bytes: memory in use when it ended, above the same.
        seconds: median of several runs.
    """

    kind: StepKind
    size: Size
    bytes: int
    left_bytes: int
    seconds: float

    def predicted_bytes(self, cost: CostModel) -> float:
        """Predict the most bytes that the step adds to the memory in use when it began."""
        size = self.size
        shape = size.tokens, size.boundary, size.edges
        more = _NO_STATES if cost.states is None else cost.states.run_bytes(size)
        if self.kind == "backward":
            run = cost.backward(*shape) - cost.saved(*shape) + more["backward"] - more["saved"]
            return float(run + cost.kv_tangent_bytes_per_token * size.outgoing)
        run = (cost.kv if self.kind == "kv" else cost.forward)(*shape) + more[self.kind]
        return float(run + self._handed(cost))

    def predicted_left(self, cost: CostModel) -> float:
        """Predict the bytes that a forward leaves: saved bytes, and K/V of outgoing tokens."""
        size = self.size
        more = 0.0 if cost.states is None else cost.states.run_bytes(size)["saved"]
        return float(cost.saved(size.tokens, size.boundary, size.edges) + more + self._handed(cost))

    def _handed(self, cost: CostModel) -> float:
        states = 0.0 if cost.states is None else cost.states.handed_bytes(self.size)
        return float(cost.kv_bytes_per_token * self.size.outgoing + states)

    def to_dict(self) -> dict[str, Any]:
        """All figures, for JSON."""
        return {
            "kind": self.kind,
            "size": list(self.size),
            "bytes": self.bytes,
            "left_bytes": self.left_bytes,
            "seconds": self.seconds,
        }


def probe_schedules(forest: Forest, lengths: Sequence[int]) -> list[Schedule]:
    """Make pairs of parts along the longest row, one above the other.

    One for every pair of lengths that the row has room for.

    The upper part is recomputed, so that all kinds of steps run. They are parts of the forest itself, so they run the
    code that its plan will run. Some more have a part below a long one that only hands out its K/V: with many more
    tokens above a part than in it, or in parts longer than `lengths`, attention's workspaces are the peak.

    Raises:
        InputError: no row has two tokens.
    """
    path = forest.token_of[int(forest.row_lengths.argmax())].cpu()
    if len(path) < 2:
        raise InputError("profile needs a forest with a row of at least 2 tokens, to cut it")
    pairs = [(a, b) for a in lengths for b in lengths if a + b <= len(path)] or [(len(path) // 2, len(path))]
    deepest = min(_LONGEST_BOUNDARY * max(lengths), len(path) - min(lengths))
    far = [(above, min(lengths)) for above in (deepest // 2, deepest) if above > max(lengths)]
    if len(path) > 3 * max(lengths):
        far += [(len(path) - below, below) for below in (max(lengths), min(2 * max(lengths), len(path) // 2))]
    both = _BELOW + _ABOVE
    return [_pair(path, *pair, both) for pair in pairs] + [_pair(path, *pair, _BELOW) for pair in far]


_BELOW: tuple[Step, ...] = (Step("kv", 0), Step("forward", 1), Step("backward", 1))
_ABOVE: tuple[Step, ...] = (Step("forward", 0), Step("backward", 0))


def _pair(path: torch.Tensor, above: int, below: int, steps: tuple[Step, ...]) -> Schedule:
    upper = Part(0, path[:above], None, (), (1,), "recompute")
    lower = Part(1, path[above : above + below], 0, (0,), (), "keep")
    return Schedule((upper, lower), steps)


def measure_steps(
    compiled: Any,
    forest: Forest,
    schedule: Schedule,
    kwargs: Mapping[str, Any],
    logprobs: LogProbs,
    gradients: Gradients,
) -> list[Sample]:
    """Run a schedule several times, without the first, which may compile.

    Gradients are summed and dropped.
    """
    model = Model(compiled, kwargs, logprobs)
    with torch.enable_grad():
        _executor(model, forest, schedule, gradients).run(schedule.steps)
    with quick_collections():
        runs = [_run(_executor(model, forest, schedule, gradients), forest, schedule) for _ in range(_REPEATS)]
    sizes = [_size(forest, schedule.parts, part) for part in schedule.parts]
    samples = []
    for place, step in enumerate(schedule.steps):
        seconds = sorted(run[place][0] for run in runs)[_REPEATS // 2]
        most, left = max(run[place][1] for run in runs), max(run[place][2] for run in runs)
        samples.append(Sample(step.kind, sizes[step.part], most, left, seconds))
    return samples


def _executor(model: Model, forest: Forest, schedule: Schedule, gradients: Gradients) -> Executor:
    """The loss is the sum of the log-probabilities."""
    return Executor(model, forest, schedule, lambda logp, _: logp.sum(), gradients.backward)


def _run(executor: Executor, forest: Forest, schedule: Schedule) -> list[tuple[float, int, int]]:
    """Seconds, peak and rest of every step."""
    result = []
    for step in schedule.steps:
        _wait_for(forest.device)
        on_cuda = forest.device.type == "cuda"
        before = torch.cuda.memory_allocated(forest.device) if on_cuda else 0
        with torch.enable_grad(), track_peak(forest.device, curve=not on_cuda) as peak:
            started = time.perf_counter()
            executor.run([step])
            _wait_for(forest.device)
            seconds = time.perf_counter() - started
        left = torch.cuda.memory_allocated(forest.device) - before if on_cuda else _last(peak.curve)
        result.append((seconds, peak.bytes, left))
    return result


def _last(curve: list[tuple[float, int]]) -> int:
    return curve[-1][1] if curve else 0


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _size(forest: Forest, parts: Sequence[Part], part: Part) -> Size:
    return Size(
        tokens=len(part),
        boundary=len(boundary(forest, parts, part)),
        edges=len(edge_ids(forest, part)),
        outgoing=len(outgoing(forest, part)) if part.children else 0,
        pairs=int((forest.depth.cpu()[part.tokens] + 1).sum()),
        entering=int(part.parent is not None),
        leaving=int(bool(part.children)),
    )
