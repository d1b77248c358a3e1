"""Time a CPU training step against inductor on one padded batch: ``treefx bench step``."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from treefx.data import Batch
from treefx.errors import TreefxError
from treefx.tools.bench.job.models import make_config, make_model
from treefx.tools.bench.job.synthetic import shared_prefix_batch
from treefx.tools.bench.job.training import TrainingRun, gradient_error

__all__ = ["CASES", "StepCase", "WrongResultError", "run"]


class WrongResultError(TreefxError):
    """The two backends disagree, so no time is reported."""


@dataclass(frozen=True)
class StepCase:
    """Rows of ``prefix`` shared and ``suffix`` own tokens."""

    name: str
    prefix: int
    suffix: int


CASES = (
    StepCase("prefix 448 of 512", 448, 64),
    StepCase("prefix 384 of 512", 384, 128),
    StepCase("nothing shared", 0, 512),
)
_LOSS_TOLERANCE = 1e-5
_GRADIENT_TOLERANCE = 1e-4


def run(
    *,
    model: str = "llama",
    hidden_size: int = 512,
    layers: int = 4,
    rows: int = 8,
    vocab_size: int = 32000,
    repeats: int = 5,
    backend: str = "treefx",
    baseline: str = "inductor",
    cases: Sequence[StepCase] = CASES,
) -> list[dict[str, object]]:
    """Time forward and backward (no optimizer) in float32, repeats of both backends in turn.

    Args:
        model: An architecture of transformers.
        hidden_size: Width of the model.
        layers: Number of its blocks.
        rows: Rows of the batch.
        vocab_size: Number of token ids; a large vocabulary makes the LM head the largest part of the step.
        repeats: Timed steps of each backend; the median counts.
        backend: The backend under test.
        baseline: What it is compared with.
        cases: Shapes of sharing.

    Returns:
        One record per case: medians in seconds, ``speed_up``, ``token_bound`` (raw / distinct tokens) and
        ``share_of_bound`` (speed-up / bound).

    Raises:
        WrongResultError: Loss or gradients of the two differ by more than rounding.
    """
    records = []
    for case in cases:
        # Every case recompiles: kernels for sizes that an earlier case made symbolic would be slower.
        torch._dynamo.reset()
        sizes = {"vocab_size": vocab_size, "hidden_size": hidden_size, "layers": layers}
        config = make_config(model, **sizes, max_positions=case.prefix + case.suffix)
        # Both runs copy the model: three sets of weights are alive, no more.
        causal_lm = make_model(config)
        runs = [TrainingRun(causal_lm, name) for name in (baseline, backend)]
        batch = shared_prefix_batch(rows, case.prefix, case.suffix, vocab_size)
        tokens = case.prefix + rows * case.suffix
        loss_error, error = _check(runs, batch)
        figures = _figures(runs, _time(runs, batch, repeats), batch.raw_tokens / tokens)
        records.append(
            {
                "case": case.name,
                "raw_tokens": batch.raw_tokens,
                "tokens": tokens,
                **figures,
                "loss_error": loss_error,
                "gradient_error": error,
            }
        )
    return records


def _figures(runs: Sequence[TrainingRun], seconds: Sequence[float], bound: float) -> dict[str, object]:
    base, own = seconds
    return {
        "baseline_seconds": base,
        "seconds": own,
        "speed_up": base / own,
        "token_bound": bound,
        "share_of_bound": base / own / bound,
        "compile_seconds": runs[1].compile_seconds,
        "baseline_compile_seconds": runs[0].compile_seconds,
    }


def _check(runs: Sequence[TrainingRun], batch: Batch) -> tuple[float, float]:
    """Compile both, then compare losses and gradients; the errors."""
    for each in runs:
        each.compile_for(batch)
    base_loss, own_loss = (each.forward_backward(batch) for each in runs)
    for each in runs:
        each.optimizer.zero_grad()
    loss_error = abs(own_loss - base_loss) / abs(base_loss)
    error, parameter = gradient_error(runs[1].first_gradients, runs[0].first_gradients)
    if not (loss_error <= _LOSS_TOLERANCE and error <= _GRADIENT_TOLERANCE):
        raise WrongResultError(
            f"{runs[1].backend} and {runs[0].backend} disagree, so no time is reported: "
            f"loss by {loss_error:.1e} (allowed {_LOSS_TOLERANCE}), "
            f"gradient of {parameter} by {error:.1e} (allowed {_GRADIENT_TOLERANCE})"
        )
    return loss_error, error


def _time(runs: Sequence[TrainingRun], batch: Batch, repeats: int) -> list[float]:
    """Median seconds of forward and backward of every run, their repeats interleaved."""
    seconds: list[list[float]] = [[] for _ in runs]
    for _ in range(repeats):
        for each, own in zip(runs, seconds):
            own.append(each.time_forward_backward(batch))
    return [statistics.median(own) for own in seconds]
