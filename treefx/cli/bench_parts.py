"""Run plans and measure them: peaks against limits on random forests, and one large forest under an eighth."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import Progress

import treefx
from treefx.cli.models import make_config, make_model
from treefx.forest import Forest
from treefx.planning.blocks import Counts
from treefx.planning.infeasible import smallest_requirement
from treefx.planning.memory import install_allocator, track_peak
from treefx.planning.plan import Plan
from treefx.planning.policies import compare_policies
from treefx.planning.profile import Profile

__all__ = ["LIMITS", "Runner", "large_forest", "measure_peaks", "measure_policies", "random_forest", "run_under_limits"]

LIMITS = (2, 4, 8)
"""Limits are what the uncut forest takes, over these."""
_VOCABULARY = 256
_LONGEST = 2000
_PLENTY = 1e15


@dataclass(frozen=True)
class Measured:
    """One plan and what it took.

    Attributes:
        plan: the plan.
        bytes: measured peak, the model's own bytes included.
        seconds: time of the processor, all threads.
        loss: the value.
    """

    plan: Plan
    bytes: int
    seconds: float
    loss: float


class Runner:
    """A small llama, compiled and profiled, that runs plans on the CPU under a counting allocator.

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

    def run(self, plan: Plan) -> Measured:
        """Run a plan from no gradients on."""
        self.model.zero_grad(set_to_none=True)
        with track_peak() as peak:
            started = time.process_time()
            loss = treefx.backward(self.compiled, plan, treefx.losses.sft)
            seconds = time.process_time() - started
        return Measured(plan, peak.bytes + self.model_bytes, seconds, float(loss))


def random_forest(seed: int) -> Forest:
    """8 to 16 rows of up to 2,000 tokens that branch off earlier ones anywhere; the first has 1,200."""
    random = np.random.default_rng(seed)
    rows: list[list[int]] = []
    for _ in range(int(random.integers(8, 17))):
        source = rows[int(random.integers(len(rows)))] if rows and random.random() < 0.9 else []
        kept = source[: int(random.integers(1, len(source) + 1))] if source else []
        fresh = int(random.integers(100, 1200)) if rows else 1200
        rows.append((kept + random.integers(0, _VOCABULARY, fresh).tolist())[:_LONGEST])
    return Forest.from_sequences(rows)


def large_forest() -> Forest:
    """Agents: a prompt of 256 tokens, 4 tasks of 256, 4 trials of 512 each with two endings of 256."""
    random = np.random.default_rng(0)
    rows: list[list[int]] = [[]]
    for children, tokens in ((1, 256), (4, 256), (4, 512), (2, 256)):
        rows = [row + random.integers(0, _VOCABULARY, tokens).tolist() for row in rows for _ in range(children)]
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
    found: dict[int, list[tuple[Measured, float]]] = {share: [] for share in LIMITS}
    with Progress(console=Console(stderr=True), transient=True, disable=json) as progress:
        for seed in progress.track(range(forests), description="random forests"):
            for share, measured, error in run_under_limits(runner, random_forest(seed)):
                found[share].append((measured, error))
    return [_summary(share, results) for share, results in found.items() if results]


def run_under_limits(runner: Runner, forest: Forest) -> Iterator[tuple[int, Measured, float]]:
    """Each limit, its plan, run, and the relative error of the loss; limits are raised to the least possible."""
    cost = runner.profile.cost.for_forest(forest)
    least = smallest_requirement(Counts(forest), cost).limit_bytes
    whole = runner.uncut_bytes(forest)
    truth = runner.run(treefx.plan(forest, runner.profile, _PLENTY)).loss
    for share in LIMITS:
        measured = runner.run(treefx.plan(forest, runner.profile, max(whole // share, least)))
        yield share, measured, abs(measured.loss - truth) / abs(truth)


def _summary(share: int, results: list[tuple[Measured, float]]) -> dict[str, Any]:
    measured = [item for item, _ in results]
    predicted = [item.plan.peak_bytes / item.bytes for item in measured]
    return {
        "limit": f"1/{share} of uncut",
        "forests": len(measured),
        "over": sum(item.bytes > item.plan.memory_limit_bytes for item in measured),
        "of_limit": max(item.bytes / item.plan.memory_limit_bytes for item in measured),
        "predicted_least": min(predicted),
        "predicted_most": max(predicted),
        "parts_most": max(len(item.plan.parts) for item in measured),
        "recomputed_most": max(item.plan.tokens_per_forward - 1 for item in measured),
        "loss_error": max(error for _, error in results),
    }


def measure_policies(inner: str) -> list[dict[str, Any]]:
    """Train a large forest under an eighth of what it takes uncut.

    Returns:
        One record per policy: `policy`, `parts`, `tokens_forward`, `per_distinct`, `predicted_time` (over that of
        uncut), `predicted_mib`, `fits`; of the plan and of the uncut forest also `measured_mib`, `cpu_s` (best of
        three, after one that compiles) and `loss`.
    """
    forest = large_forest()
    runner = Runner(inner, 4, 64, forest)
    limit = runner.uncut_bytes(forest) // 8
    plans = {
        "treefx": treefx.plan(forest, runner.profile, limit),
        "uncut": treefx.plan(forest, runner.profile, _PLENTY),
    }
    runs = [{name: runner.run(plan) for name, plan in plans.items()} for _ in range(4)][1:]
    measured = {name: min((run[name] for run in runs), key=lambda item: item.seconds) for name in plans}
    outcomes = compare_policies(plans["treefx"])
    whole = next(item.seconds for item in outcomes if item.policy == "uncut")
    records = []
    for item in outcomes:
        run = measured.get(item.policy)
        records.append(
            {
                "policy": item.policy,
                "parts": item.parts,
                "tokens_forward": item.forward_tokens,
                "per_distinct": item.forward_ratio,
                "predicted_time": item.seconds / whole,
                "predicted_mib": item.peak_bytes / 2**20,
                "fits": item.fits,
                "measured_mib": None if run is None else run.bytes / 2**20,
                "cpu_s": None if run is None else run.seconds,
                "loss": None if run is None else run.loss,
            }
        )
    return records
