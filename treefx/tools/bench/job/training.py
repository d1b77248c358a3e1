"""Train the same model on the same batches with several backends, and compare.

Every ``TrainingRun`` starts from a deep copy of one model, so weights are identical at the start; the first
forward and backward of each shape compiles, is timed apart and changes nothing but leaves its gradients for
the comparison with float64.
"""

import copy
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from treefx.data import Batch
from treefx.forests.forest import Forest

__all__ = ["StepRecord", "TrainingRun", "compare_training", "gradient_error", "reference_gradients"]

Gradients = dict[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One training step on all backends."""

    step: int
    rows: int
    length: int
    """Padded length of the rows."""
    raw_tokens: int
    """Tokens that are not padding."""
    tokens: int
    """Distinct tokens."""
    seconds: dict[str, float]
    """Forward, backward and optimizer step, by backend; compilation is not in it."""
    losses: dict[str, float]

    @property
    def sharing_ratio(self) -> float:
        """Raw over distinct tokens."""
        return self.raw_tokens / self.tokens


@dataclass
class TrainingRun:
    """One model in training on one backend."""

    model: torch.nn.Module
    """Copied; the caller's model stays unchanged."""
    backend: str
    """Name of a ``torch.compile`` backend, or ``"none"`` for eager execution."""
    learning_rate: float = 3e-4
    options: dict[str, Any] | None = None
    """Options of the backend."""
    compile_seconds: float = 0.0
    """First forward and backward of every shape, summed."""
    first_gradients: Gradients = field(default_factory=dict)
    """Of the first batch seen, at the weights of the start."""

    def __post_init__(self) -> None:
        self.model = copy.deepcopy(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=self.learning_rate)
        self.compiled: Callable[..., Any] = self.model
        if self.backend != "none":
            self.compiled = torch.compile(self.model, backend=self.backend, options=self.options)
        self._shapes: set[tuple[int, int]] = set()

    def forward_backward(self, batch: Batch) -> float:
        """One forward and backward, gradients added to ``.grad``; the loss."""
        loss = self.compiled(**batch.model_inputs(), use_cache=False).loss
        loss.backward()
        return float(loss.detach())

    def compile_for(self, batch: Batch) -> None:
        """Compile for the shape of a batch unless that was done before; weights stay as they are."""
        if batch.shape in self._shapes:
            return
        start = time.perf_counter()
        self.forward_backward(batch)
        self.compile_seconds += time.perf_counter() - start
        if not self._shapes:
            self.first_gradients = _named_gradients(self.model)
        self._shapes.add(batch.shape)
        self.optimizer.zero_grad()

    def time_forward_backward(self, batch: Batch) -> float:
        """Time one forward and backward; gradients are dropped, weights stay unchanged."""
        start = time.perf_counter()
        self.forward_backward(batch)
        seconds = time.perf_counter() - start
        self.optimizer.zero_grad()
        return seconds

    def step(self, batch: Batch) -> tuple[float, float]:
        """One training step on a shape compiled before; seconds and loss."""
        start = time.perf_counter()
        loss = self.forward_backward(batch)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return time.perf_counter() - start, loss


def compare_training(
    runs: Sequence[TrainingRun], batches: Iterable[Batch], on_progress: Callable[[str], None] = lambda _: None
) -> list[StepRecord]:
    """Train all runs on the same batches, in turns, so that a busy machine disturbs all.

    Args:
        runs: One per backend.
        batches: In order; each is one step.
        on_progress: Told after every piece of work what was done.
    """
    records = []
    for step, batch in enumerate(batches):
        seconds, losses = {}, {}
        for run in runs:
            run.compile_for(batch)
            on_progress(f"step {step + 1}, {run.backend} compiled")
        for run in runs:
            seconds[run.backend], losses[run.backend] = run.step(batch)
            on_progress(f"step {step + 1}, {run.backend} trained")
        rows, length = batch.shape
        tokens = Forest.from_padded(batch.input_ids, batch.attention_mask).num_tokens
        records.append(
            StepRecord(
                step=step,
                rows=rows,
                length=length,
                raw_tokens=batch.raw_tokens,
                tokens=tokens,
                seconds=seconds,
                losses=losses,
            )
        )
    return records


def reference_gradients(model: torch.nn.Module, batch: Batch) -> Gradients:
    """Gradients of an eager copy of the model in float64, every row computed separately."""
    reference = copy.deepcopy(model).double()
    choose_experts: Any = getattr(reference, "set_experts_implementation", None)
    if choose_experts is not None:
        choose_experts("eager")  # the grouped product of experts has no float64
    reference(**batch.model_inputs(), use_cache=False).loss.backward()
    return _named_gradients(reference)


def gradient_error(gradients: Gradients, reference: Gradients) -> tuple[float, str]:
    """Largest relative error of any parameter's gradient, and that parameter.

    The error of one parameter is max |g - r| / max |r|. Where r is zero but for rounding (below 1e-9 of the
    largest gradient of the model) there is nothing to be relative to, and the largest gradient takes its
    place.

    Raises:
        KeyError: A parameter of the reference has no gradient here.
    """
    sizes = {name: float(grad.abs().max()) for name, grad in reference.items()}
    largest = max(sizes.values())
    errors = {
        name: float((gradients[name].double() - grad).abs().max())
        / (sizes[name] if sizes[name] > 1e-9 * largest else largest)
        for name, grad in reference.items()
    }
    worst = max(errors, key=lambda name: math.inf if math.isnan(errors[name]) else errors[name])
    return errors[worst], worst


def _named_gradients(model: torch.nn.Module) -> Gradients:
    return {
        name: parameter.grad.detach().clone()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
