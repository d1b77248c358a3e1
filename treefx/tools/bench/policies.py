"""Run one large forest under an eighth of its memory, by all policies."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

import treefx
from treefx.errors import TreefxError
from treefx.forests.forest import Forest
from treefx.planning.cost.graph_cost import Flops
from treefx.planning.search.plan import Plan
from treefx.planning.search.policies import Outcome, compare_policies, plan_policy
from treefx.tools.bench.parts import Runner

__all__ = ["count_flops", "large_forest", "measure_policies", "run_policies"]

_ROUNDS = 4
"""Each policy in turn; the first round does not count."""
_CLOSE = 1e-4
"""How far losses and gradients may be apart in float32, relative."""


@dataclass
class _Result:
    """The best time of a policy, and what its runs gave."""

    seconds: float
    bytes: int
    loss: float
    gradients: list[torch.Tensor]


def large_forest() -> Forest:
    """Make agents' rows: a prompt, 4 tasks, 4 trials of 512 tokens with two endings."""
    random = np.random.default_rng(0)
    rows: list[list[int]] = [[]]
    for children, tokens in ((1, 256), (4, 256), (4, 512), (2, 256)):
        rows = [row + random.integers(0, 256, tokens).tolist() for row in rows for _ in range(children)]
    return Forest.from_sequences(rows)


def count_flops(plans: list[Plan], flops: dict[str, Flops]) -> float:
    """Count products of matrices and visible attention pairs of all steps."""
    total = 0.0
    for plan in plans:
        for step in plan.steps:
            if step.kind in flops:
                size, run = plan.sizes[step.part], flops[step.kind]
                total += run.token * size.tokens + run.pair * size.pairs
    return total


def measure_policies(inner: str) -> list[dict[str, Any]]:
    """`run_policies` on a large forest, with a llama of 4 layers."""
    forest = large_forest()
    return run_policies(Runner(inner, 4, 64, forest), forest)


def run_policies(runner: Runner, forest: Forest, share: int = 8) -> list[dict[str, Any]]:
    """Train a forest under a share of what it takes uncut, by each policy.

    Args:
        runner: a model, profiled for forests of this depth.
        forest: the forest.
        share: the limit is the uncut peak over this.

    Returns:
        One record per policy: `policy`, `parts`, `tokens_forward`, `per_distinct`, `gflop` and `flop_ratio` (over that
        of uncut), `predicted_time` (over that of uncut), `predicted_mib`, `fits`, `measured_mib`, `cpu_s` (all threads,
        best of three, policies in turn), `cpu_ratio` (over that of uncut), `loss`, and `gradient_error` (the largest
        difference to uncut of any parameter's gradient, over the largest entry).

    Raises:
        TreefxError: a policy's loss or gradients are not those of the uncut forest.
    """
    plan = treefx.plan(forest, runner.profile, runner.uncut_bytes(forest) // share)
    outcomes = compare_policies(plan)
    plans = {item.policy: plan_policy(plan, item.policy) for item in outcomes}
    results: dict[str, _Result] = {}
    for number in range(_ROUNDS):
        for policy, chosen in plans.items():
            _run(runner, chosen, policy, results, best=number > 1)
    flops = {policy: count_flops(chosen, runner.profile.flops) for policy, chosen in plans.items()}
    return [_record(item, outcomes, results, flops) for item in outcomes]


def _run(runner: Runner, plans: list[Plan], policy: str, results: dict[str, _Result], *, best: bool) -> None:
    measured = runner.run(plans)
    known = results[policy].seconds if best else float("inf")
    gradients = [p.grad.clone() for p in runner.model.parameters() if p.grad is not None]
    results[policy] = _Result(min(known, measured.seconds), measured.bytes, measured.loss, gradients)


def _record(
    item: Outcome, outcomes: list[Outcome], results: dict[str, _Result], flops: dict[str, float]
) -> dict[str, Any]:
    found, truth = results[item.policy], results["uncut"]
    whole = next(other for other in outcomes if other.policy == "uncut")
    error = max(
        float((got - wanted).abs().max() / wanted.abs().max())
        for got, wanted in zip(found.gradients, truth.gradients, strict=True)
    )
    if max(error, abs(found.loss - truth.loss) / abs(truth.loss)) > _CLOSE:
        raise TreefxError(
            f"{item.policy}: loss {found.loss:.9g} where the uncut forest has {truth.loss:.9g}, gradients apart by "
            f"{error:.1e} where {_CLOSE:.0e} is allowed, so nothing is reported"
        )
    return {
        "policy": item.policy,
        "parts": item.parts,
        "tokens_forward": item.forward_tokens,
        "per_distinct": item.forward_ratio,
        "gflop": flops[item.policy] / 1e9,
        "flop_ratio": flops[item.policy] / flops["uncut"],
        "predicted_time": item.seconds / whole.seconds,
        "predicted_mib": item.peak_bytes / 2**20,
        "fits": item.fits,
        "measured_mib": found.bytes / 2**20,
        "cpu_s": found.seconds,
        "cpu_ratio": found.seconds / truth.seconds,
        "loss": found.loss,
        "gradient_error": error,
    }
