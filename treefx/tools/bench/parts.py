"""Run plans under limits on random forests, and measure their peaks."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch

import treefx
from treefx.forests.forest import Forest
from treefx.output import watch
from treefx.planning.cost.memory import install_allocator, track_peak
from treefx.planning.execution.profile import Profile
from treefx.planning.search.blocks import Counts
from treefx.planning.search.infeasible import smallest_requirement
from treefx.planning.search.plan import Plan
from treefx.tools.bench.job.models import make_config, make_model

__all__ = ["LIMITS", "Measured", "Runner", "Trial", "measure_peaks", "random_forest", "run_under_limits"]

LIMITS = (2, 4, 8)
"""Limits are what the uncut forest takes, over these."""
_VOCABULARY = 256
_LONGEST = 2000
_PLENTY = 1e15


@dataclass(frozen=True)
class Measured:
    """What plans took, run one after the other.

    Attributes:
        bytes: measured peak, with the model's own bytes, those of the forest and of the parts' lists of tokens.
        seconds: time of the processor, all threads.
        loss: the sum of the values.
    """

    bytes: int
    seconds: float
    loss: float


@dataclass(frozen=True)
class Trial:
    """A forest under one limit.

    Attributes:
        share: the limit is what the forest takes uncut over this, or the least possible where that is more.
        plan: what ran.
        measured: what it took.
        loss_error: difference of the loss to that of the uncut forest, relative.
    """

    share: int
    plan: Plan
    measured: Measured
    loss_error: float

    @property
    def predicted_per_measured(self) -> float:
        """The predicted peak over the measured one."""
        return self.plan.peak_bytes / self.measured.bytes


class Runner:
    """Make a small llama, compiled and profiled, for plans under a counting allocator.

    Args:
        inner: inner compiler.
        layers, hidden_size: of the model.
        forest: whose depth the profile is for; forests up to the next power of two run the same code.
        lengths: of the parts that are profiled.
    """

    def __init__(
        self, inner: str, layers: int, hidden_size: int, forest: Forest, lengths: Sequence[int] = (128, 512)
    ) -> None:
        install_allocator()  # before the model, whose gradients are counted when they are freed
        config = make_config("llama", vocab_size=_VOCABULARY, hidden_size=hidden_size, layers=layers)
        self.model = make_model(config)
        self.compiled = torch.compile(self.model, backend="treefx", options={"inner": inner})
        self.profile: Profile = treefx.profile(self.compiled, forest, lengths=lengths)
        held = [*self.model.parameters(), *self.model.buffers()]
        self.model_bytes = sum(tensor.numel() * tensor.element_size() for tensor in held)

    def uncut_bytes(self, forest: Forest) -> int:
        """Predicted peak of the whole forest at once."""
        return treefx.plan(forest, self.profile, _PLENTY).peak_bytes

    def run(self, plans: Sequence[Plan]) -> Measured:
        """Run plans from no gradients on."""
        self.model.zero_grad(set_to_none=True)
        loss = 0.0
        with track_peak() as peak:
            started = time.process_time()
            for plan in plans:
                loss += float(treefx.backward(self.compiled, plan, treefx.losses.sft))
            seconds = time.process_time() - started
        described = max(_described_bytes(plan) for plan in plans)  # these were there before
        return Measured(peak.bytes + self.model_bytes + described, seconds, loss)


def _described_bytes(plan: Plan) -> int:
    """The forest's tensors, and the parts' tokens."""
    values = [getattr(plan.forest, item.name) for item in fields(plan.forest)]
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    return sum(tensor.numel() * tensor.element_size() for tensor in [*tensors, *(part.tokens for part in plan.parts)])


def random_forest(seed: int) -> Forest:
    """Make 8 to 16 rows of up to 2,000 tokens that fork anywhere; the first has 1,200."""
    random = np.random.default_rng(seed)
    rows: list[list[int]] = []
    for _ in range(int(random.integers(8, 17))):
        source = rows[int(random.integers(len(rows)))] if rows and random.random() < 0.9 else []
        kept = source[: int(random.integers(1, len(source) + 1))] if source else []
        fresh = int(random.integers(100, 1200)) if rows else 1200
        rows.append((kept + random.integers(0, _VOCABULARY, fresh).tolist())[:_LONGEST])
    return Forest.from_sequences(rows)


def measure_peaks(forests: int, inner: str, *, json: bool = False) -> list[dict[str, Any]]:
    """Run random forests under three limits each.

    Args:
        forests: how many.
        inner: inner compiler.
        json: a program reads the result, so no progress bar is shown.

    Returns:
        One record per limit: `limit` (of the uncut peak), `forests`, `over` (peaks above the limit), `of_limit` (the
        largest measured peak per limit), `predicted_least`, `predicted_most` (predicted per measured peak),
        `parts_most`, `recomputed_most` (per distinct token), `loss_error` (largest relative difference to uncut).
    """
    runner = Runner(inner, 2, 64, random_forest(0))
    trials: list[Trial] = []
    for seed in watch(range(forests), "random forests", quiet=json):
        trials += run_under_limits(runner, random_forest(seed))
    return [_summary([trial for trial in trials if trial.share == share]) for share in LIMITS]


def run_under_limits(runner: Runner, forest: Forest) -> Iterator[Trial]:
    """Plan and run a forest under each limit."""
    cost = runner.profile.cost.for_forest(forest)
    least = smallest_requirement(Counts(forest), cost).limit_bytes
    whole = runner.uncut_bytes(forest)
    truth = runner.run([treefx.plan(forest, runner.profile, _PLENTY)]).loss
    for share in LIMITS:
        plan = treefx.plan(forest, runner.profile, max(whole // share, least))
        measured = runner.run([plan])
        yield Trial(share, plan, measured, abs(measured.loss - truth) / abs(truth))


def _summary(trials: list[Trial]) -> dict[str, Any]:
    of_limit = [trial.measured.bytes / trial.plan.memory_limit_bytes for trial in trials]
    return {
        "limit": f"1/{trials[0].share} of uncut",
        "forests": len(trials),
        "over": sum(share > 1 for share in of_limit),
        "of_limit": max(of_limit),
        "predicted_least": min(trial.predicted_per_measured for trial in trials),
        "predicted_most": max(trial.predicted_per_measured for trial in trials),
        "parts_most": max(len(trial.plan.parts) for trial in trials),
        "recomputed_most": max(trial.plan.tokens_per_forward - 1 for trial in trials),
        "loss_error": max(trial.loss_error for trial in trials),
    }
