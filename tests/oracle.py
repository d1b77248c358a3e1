"""The oracle of the backend: eager training on the padded batch, or every row alone, and the comparison."""

import copy
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import treefx
from tests.batches import Batch

__all__ = [
    "Checked",
    "Outcome",
    "compare",
    "compile_with",
    "eager_step",
    "loss_of",
    "refused",
    "relative_errors",
    "separate_rows",
    "stats_of",
    "zero_gradients",
]

FLOAT32, FLOAT64 = 1e-5, 1e-10
"""Largest relative error of a loss or of a gradient, by the dtype of the weights."""
SMALL_GRADIENT = 1e-4
"""Gradients below this share of the model's largest are judged against it."""
ZERO_GRADIENT, NO_GRADIENT = 1e-2, 1e-6
"""A gradient that is zero in exact arithmetic is judged against the first share of the model's largest.

Such are those of key biases without rotary positions, which shift all scores of a query alike. With FLOAT32 the
tolerance there is 1e-7 of the largest gradient, about the spacing of float32 numbers at it. A gradient counts as zero
below the second share of the largest when the step runs eagerly in float64.
"""

Step = Callable[[nn.Module], Tensor]
"""Runs a model, returns the loss."""


@dataclass(frozen=True)
class Outcome:
    """Loss (scalar) and gradients by parameter name; None where the parameter got none."""

    loss: Tensor
    gradients: dict[str, Tensor | None]


@dataclass(frozen=True)
class Checked:
    """A compiled model that has passed a comparison."""

    compiled: nn.Module
    model: nn.Module
    errors: dict[str, float]

    @property
    def stats(self) -> dict[str, Any]:
        """Statistics of the last call."""
        return stats_of(self.compiled)


def compile_with(model: nn.Module, **options: Any) -> Any:
    """Compiles with treefx, packing every batch, on the inner compiler that compiles fastest."""
    settings = {"inner": "aot_eager", "min_sharing": 1.0, **options}
    return torch.compile(model, backend="treefx", options=settings)


def stats_of(compiled: Any) -> dict[str, Any]:
    """The inspector's statistics of a compiled model."""
    return dict(treefx.inspect(compiled).stats)


def loss_of(batch: Batch, **more: Any) -> Step:
    """The ordinary step: the model computes the loss from the labels."""
    return lambda model: model(**batch.inputs(), **more).loss


def outcome(model: nn.Module, step: Callable[[], Tensor]) -> Outcome:
    """Runs one step and collects loss and gradients of all parameters of `model`."""
    model.zero_grad(set_to_none=True)
    loss = step()
    loss.backward()
    gradients = {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
    return Outcome(loss.detach().clone(), gradients)


def eager_step(model: nn.Module, batch: Batch, dtype: torch.dtype | None = None) -> Outcome:
    """Loss and gradients of a copy of the model, eager on the padded batch, in `dtype` where given."""
    twin = copy.deepcopy(model)
    twin = twin if dtype is None else twin.to(dtype)
    return outcome(twin, lambda: loss_of(batch)(twin))


def separate_rows(model: nn.Module, rows: Sequence[Sequence[int]], weights: Sequence[Sequence[float]]) -> Outcome:
    """Weighted sum of -log p over the tokens of every row, each row a separate batch, in float64.

    Args:
        model: called with input_ids [1, T] only.
        rows: token ids.
        weights: per row and token, the weight of predicting it; the first token's is not used.
    """
    twin = copy.deepcopy(model).double()

    def total() -> Tensor:
        loss = torch.zeros((), dtype=torch.float64)
        for row, weight in zip(rows, weights, strict=True):
            ids = torch.tensor(row)[None]
            logp = twin(input_ids=ids).logits[0, :-1].double().log_softmax(-1)
            picked = logp.gather(-1, ids[0, 1:, None])[:, 0]
            loss = loss - (picked * torch.tensor(weight[1:], dtype=torch.float64)).sum()
        return loss

    return outcome(twin, total)


def relative_errors(got: Outcome, expected: Outcome, zeros: Collection[str] = ()) -> dict[str, float]:
    """Largest absolute difference over the largest absolute value, for "loss" and each parameter by name.

    A gradient that is there on one side only is an infinite error, as is NaN. `zeros` are the parameters whose
    gradient is zero in exact arithmetic.
    """
    largest = max(float(g.abs().max()) for g in expected.gradients.values() if g is not None)
    errors = {"loss": _relative(got.loss, expected.loss, 0.0)}
    for name, right in expected.gradients.items():
        left = got.gradients[name]
        if left is None or right is None:
            errors[name] = 0.0 if left is None and right is None else float("inf")
        else:
            floor = ZERO_GRADIENT if name in zeros else SMALL_GRADIENT
            errors[name] = _relative(left, right, floor * largest)
    return errors


def _relative(got: Tensor, expected: Tensor, floor: float) -> float:
    assert got.shape == expected.shape, f"shape {tuple(got.shape)} instead of {tuple(expected.shape)}"
    got, expected = got.double(), expected.double()
    scale = max(float(expected.abs().max()), floor)
    difference = float((got - expected).abs().max())
    if scale == 0.0:
        return 0.0 if difference == 0.0 else float("inf")
    return difference / scale if difference == difference else float("inf")


def zero_gradients(model: nn.Module, step: Step) -> set[str]:
    """The parameters whose gradient is zero but for rounding, by an eager step in float64."""
    twin = copy.deepcopy(model).double()
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)  # xglm makes a tensor of finfo(its scores' dtype).min
    try:
        exact = outcome(twin, lambda: step(twin)).gradients
    finally:
        torch.set_default_dtype(before)
    largest = max(float(g.abs().max()) for g in exact.values() if g is not None)
    return {name for name, g in exact.items() if g is not None and float(g.abs().max()) <= NO_GRADIENT * largest}


def assert_close(
    got: Outcome, expected: Outcome, tolerance: float, zeros: Callable[[], Collection[str]] = tuple
) -> dict[str, float]:
    """Fails with the names and errors of everything beyond the tolerance, worst first.

    `zeros` finds the parameters without a gradient in exact arithmetic; it is asked only where something differs.
    """
    errors = relative_errors(got, expected)
    if not all(error <= tolerance for error in errors.values()):
        errors = relative_errors(got, expected, zeros())
    wrong = sorted(((e, name) for name, e in errors.items() if not e <= tolerance), reverse=True)
    listed = "; ".join(f"{name}: {error:.2e}" for error, name in wrong[:8])
    assert not wrong, f"{len(wrong)} of {len(errors)} differ by more than {tolerance:.0e} relative: {listed}"
    return errors


def compare(model: nn.Module, step: Step | Batch, tolerance: float | None = None, **options: Any) -> Checked:
    """Runs a step eagerly and compiled, on copies of the model, and asserts equal loss and gradients.

    Args:
        model: unchanged.
        step: maps a model to a loss; a batch means the model's own loss on it.
        tolerance: relative; by default FLOAT32 or FLOAT64, by the dtype of the weights.
        options: of the backend.
    """
    run = loss_of(step) if isinstance(step, Batch) else step
    if tolerance is None:
        tolerance = FLOAT64 if next(model.parameters()).dtype == torch.float64 else FLOAT32
    reference, twin = copy.deepcopy(model), copy.deepcopy(model)
    compiled = compile_with(twin, **options)
    expected = outcome(reference, lambda: run(reference))
    got = outcome(twin, lambda: run(compiled))
    return Checked(compiled, twin, assert_close(got, expected, tolerance, lambda: zero_gradients(model, run)))


@contextmanager
def refused(*words: str) -> Iterator[None]:
    """Expects a TreefxError, alone or wrapped by Dynamo, whose text contains all the words."""
    with pytest.raises(Exception) as caught:  # noqa: PT011
        yield
    error: BaseException | None = caught.value
    while error is not None and not isinstance(error, treefx.TreefxError):
        error = getattr(error, "inner_exception", None) or error.__cause__
    assert error is not None, f"expected a TreefxError, got {caught.value!r}"
    missing = [word for word in words if word not in str(error)]
    assert not missing, f"the message does not say {missing}: {error}"
