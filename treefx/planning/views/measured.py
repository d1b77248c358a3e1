"""Measure a running plan: the seconds of its steps, and its peak in bytes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from treefx.errors import InputError
from treefx.planning.cost.memory import track_peak
from treefx.planning.execution.execute import ENDINGS
from treefx.planning.search.part import Step
from treefx.planning.search.plan import Plan

__all__ = ["measure_plan"]


def measure_plan(plan: Plan, run: Callable[[], Any]) -> dict[str, Any]:
    """Call ``run`` once and measure it.

    Args:
        plan: The plan of the step.
        run: A training step by this plan, without the optimizer step.

    Returns:
        ``seconds`` of all steps; ``added_bytes``, the peak above the bytes allocated before the call; ``source`` of
        that figure; ``steps``: ``kind``, ``part`` and ``seconds`` of each, the device's work included. Where a loss
        is called on all edges at once, the forward for its log-probabilities counts to the first step.

    Raises:
        InputError: The call did not run the steps of this plan.
    """
    endings: list[tuple[Step, float]] = []
    cuda: Any = torch.cuda
    token = ENDINGS.set(endings)
    try:
        with track_peak("cuda" if cuda.is_initialized() else "cpu") as peak:
            began = time.perf_counter()
            run()
    finally:
        ENDINGS.reset(token)
    if [step for step, _ in endings] != list(plan.steps):
        raise InputError(
            f"run should take one step by this plan (treefx.forward_backward(model, plan, loss)), which has "
            f"{len(plan.steps)} steps; {len(endings)} ran"
        )
    starts = [began, *(ended for _, ended in endings)]
    steps = [
        {"kind": step.kind, "part": step.part, "seconds": ended - start}
        for (step, ended), start in zip(endings, starts)
    ]
    seconds = endings[-1][1] - began
    return {"seconds": seconds, "added_bytes": peak.bytes, "source": peak.source, "steps": steps}
