"""Run one compiled step of one model, with its gradient error against eager.

A name is a model of the zoo, any other causal LM of transformers, or the path of a ``config.json``.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from treefx.data import Batch
from treefx.errors import InputError
from treefx.tools.bench.job.models import (
    close_matches,
    make_config,
    make_model,
    read_configurations,
    require_transformers,
)
from treefx.tools.bench.job.training import gradient_error
from treefx.tools.bench.zoo.exact import in_float64, take_step
from treefx.tools.bench.zoo.models import LONGEST, VOCABULARY, ZooModel, zoo_models

__all__ = ["GradientCheck", "SingleRun", "build_model", "run_single"]

_SMALLEST_ERROR = 1e-4
"""Below it a relative error of float32 gradients is rounding, whatever eager's own error is."""
_MUCH_FURTHER = 3.0
"""How many times eager's own error against float64 treefx may be off: gradients near zero round differently."""
_NOT_COMPARABLE = 1e-2
"""An error of eager float32 against float64 above which the model draws random numbers, others for each dtype."""


@dataclass(frozen=True)
class GradientCheck:
    """Float32 gradients against eager float64 on the same rows."""

    error: float | None = None
    """Largest relative error of any gradient of treefx."""
    parameter: str | None = None
    """The parameter with that error."""
    eager_error: float | None = None
    """The same of eager float32."""
    reference: str = "eager float64"
    """What the gradients are compared with."""
    failure: str | None = None
    """Why there is no comparison."""

    @property
    def is_wrong(self) -> bool:
        """True if treefx is further off than rounding explains."""
        if self.error is None or self.eager_error is None:
            return False
        return not self.error <= max(_SMALLEST_ERROR, _MUCH_FURTHER * self.eager_error)

    def __str__(self) -> str:
        if self.failure is not None:
            return f"gradients not compared: {self.failure}"
        eager = "" if self.eager_error is None else f", of eager float32 {self.eager_error:.1e}"
        return f"gradients against {self.reference}: largest relative error {self.error:.1e} ({self.parameter}){eager}"


@dataclass(frozen=True)
class SingleRun:
    """A model after one compiled step."""

    model: nn.Module
    """The model before compilation."""
    compiled: Any
    """Its compiled copy."""
    batch: Batch
    gradients: dict[str, torch.Tensor]
    """Gradients of the compiled copy, by parameter name."""

    def check_gradients(self) -> GradientCheck:
        """Compare with eager float64; failure of the eager model there is a result."""
        try:
            _, exact = in_float64(self.model, lambda twin: take_step(twin, twin, self.batch))
            _, plain = take_step(self.model, self.model, self.batch)
        except Exception as failure:  # the model's own code, which treefx does not run here
            reason = (str(failure).strip().splitlines() or [""])[0]
            return GradientCheck(failure=f"eager execution in float64 raises {type(failure).__name__}: {reason}")
        eager_error, _ = gradient_error(plain, exact)
        error = self._error(exact)
        if eager_error <= _NOT_COMPARABLE or error[0] <= _SMALLEST_ERROR:  # gradients that all but cancel in eager
            return GradientCheck(*error, eager_error)
        return GradientCheck(*self._error(plain), reference="eager float32, which draws the same random numbers")

    def _error(self, reference: dict[str, torch.Tensor]) -> tuple[float, str]:
        missing = sorted(set(reference) - set(self.gradients))
        return (math.inf, missing[0]) if missing else gradient_error(self.gradients, reference)


def build_model(name: str, longest: int) -> nn.Module:
    """Make the model of a name, on the CPU and in training mode.

    Args:
        name: A model of the zoo, an architecture of transformers, or the path of a config.json.
        longest: Number of positions it has to take.

    Raises:
        InputError: There is no such model, its library is missing, or it takes fewer positions.
    """
    others = {model.name: model for model in zoo_models() if model.library != "transformers"}
    if name in others:
        return _build_other(others[name], longest)
    is_file = name.endswith(".json") or Path(name).is_file()
    mapping, table = require_transformers().CONFIG_MAPPING, read_configurations()["models"]
    if not is_file and name not in mapping and name not in table:
        known = [*mapping, *table, *others]
        raise InputError(
            "expected an architecture of transformers, a model of `treefx doctor --zoo`, or the path of a config.json; "
            f"got {name!r}; {close_matches(name, known, 'for example llama, qwen3, gemma2 or gpt2')}"
        )
    return make_model(make_config(name, vocab_size=VOCABULARY, max_positions=max(256, longest)))


def _build_other(model: ZooModel, longest: int) -> nn.Module:
    if longest > LONGEST:
        raise InputError(f"{model.name} takes rows of at most {LONGEST} tokens, got {longest}")
    try:
        return model.build().train()
    except ImportError as error:
        reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise InputError(
            f"{model.name} needs the library {model.library!r}, which cannot be imported: {reason}"
        ) from error


def run_single(model: nn.Module, batch: Batch, inner: str) -> SingleRun:
    """Compile a copy of a model and run forward and backward once; every call packs."""
    twin = copy.deepcopy(model)
    options = {"inner": inner, "min_sharing": 1.0}
    compiled = torch.compile(twin, backend="treefx", options=options)  # type: ignore[arg-type]
    _, gradients = take_step(twin, compiled, batch)
    return SingleRun(model, compiled, batch, gradients)
