"""Predict the effect of treefx on an observed call by a dry run at the end of training."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

import torch
from torch import nn

from treefx.inspection.explain import explain
from treefx.inspection.observation.records import ObservedStep, Prediction
from treefx.inspection.report.report import Report
from treefx.runtime.observed.tokens import ObservedCall

__all__ = ["predict"]


def predict(
    model: nn.Module | None, calls: Sequence[ObservedCall], steps: Sequence[ObservedStep]
) -> tuple[Prediction | None, str]:
    """Explain the largest call of the last step.

    Returns None and the reason where the model cannot be read.

    Args:
        model: The model itself, not its wrapper; None where it is gone.
        calls: Of one step.
        steps: The last steps, for their seconds.
    """
    if model is None:
        return None, "the model is gone; call treefx.observed(model) while it is there"
    if not calls:
        return None, "no call with gradients had token ids"
    call = max(calls, key=lambda item: item.copies.tensors["ids"].numel())
    try:
        with torch.enable_grad():
            report = explain(model, _arguments(model, call))
    except Exception as error:  # of any code of the model, which runs on fake tensors here
        first_line = next(iter(str(error).splitlines()), "")
        return None, f"treefx.explain of its largest call failed: {type(error).__name__}: {first_line}"
    return _prediction(report, steps), ""


def _arguments(model: nn.Module, call: ObservedCall) -> dict[str, Any]:
    """Of the call, on the model's device."""
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    given = {name: value for name, value in call.settings.items() if value is not None}
    return given | {name: tensor.to(device) for name, tensor in call.tensors.items()}


def _prediction(report: Report, steps: Sequence[ObservedStep]) -> Prediction:
    verdict, memory = report.verdict, report.memory
    measured = [step.seconds for step in steps if step.seconds is not None]
    seconds = median(measured[1:] or measured) if measured else None  # the first step warms up
    is_packed = verdict.ran == "packed" and verdict.flops_before > 0
    after = verdict.flops_after if is_packed else verdict.flops_before
    packed = seconds * after / verdict.flops_before if seconds is not None and is_packed else seconds
    last = steps[-1] if steps else None
    together = None
    if packed is not None and last is not None and last.call_tokens and is_packed:
        together = packed * last.step_tokens / last.call_tokens
    return Prediction(
        verdict.sentence, verdict.flops_before, after, seconds, packed, together,
        memory.bytes_on_rows if is_packed else 0, memory.bytes if is_packed else 0,
    )  # fmt: skip
