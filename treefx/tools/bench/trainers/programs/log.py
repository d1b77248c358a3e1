"""The log of a run, as transformers' trainer saves it."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import treefx
from treefx.errors import InputError
from treefx.integrations.metrics import metrics_of

__all__ = ["step_entry", "write_log"]


def step_entry(model: nn.Module) -> dict[str, float]:
    """Return the norm of a model's gradients, and treefx's figures of the step."""
    norms = [parameter.grad.norm() for parameter in model.parameters() if isinstance(parameter.grad, Tensor)]
    entry = {"grad_norm": float(torch.stack(norms).norm())}
    try:
        return entry | metrics_of(treefx.inspect(model).stats)
    except InputError:  # not compiled, or by another
        return entry


def write_log(folder: Path, entries: Sequence[Mapping[str, Any]]) -> None:
    """Write one entry per optimizer step, with ``loss`` and ``grad_norm``; make folders."""
    state = folder / "trainer_state.json"
    state.parent.mkdir(parents=True, exist_ok=True)
    state.write_text(json.dumps({"log_history": list(entries)}), encoding="utf-8")
