"""Compute values relative to their group: the one formula behind all advantages here.

    A_i = (v_i - mean of i's group) / (std of i's group + epsilon)

A group of one value, or of equal ones, gives 0: no value is better than another. Published texts say "std" and leave
open which; `Scale` names the choices.
"""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from treefx.arguments import check_number, read_tensor
from treefx.errors import InputError

__all__ = ["Numbers", "Scale", "group_relative", "read_numbers"]

Numbers = Tensor | Sequence[float]
Scale = Literal["sample_std", "population_std", "none"]
"""The divisor: the root of the squared deviations' sum over n - 1 (as `torch.std`; TRL, verl), over n, or 1."""

_ROUNDING = 1e-12
"""Values of a group that differ by less than this share of its largest are equal but for rounding."""


def group_relative(
    values: Tensor,
    group: Tensor,
    scale: Scale = "sample_std",
    epsilon: float = 0.0,
    weights: Tensor | None = None,
) -> Tensor:
    """Compute each value's deviation from its group's mean, in standard deviations.

    Args:
        values: float64 [n].
        group: int64 [n], the group of each; any numbers.
        scale: the divisor, see `Scale`.
        epsilon: added to the standard deviation, at least 0. TRL adds 1e-4, verl 1e-6, the formulas nothing.
        weights: float64 [n], at least 0: a value counts in mean and deviation as if it stood there that often.

    Returns:
        float64 [n]; exactly 0 in a group of equal values (up to rounding) and in a group of one.

    Raises:
        InputError: no such scale, or a negative epsilon.
    """
    if scale not in ("sample_std", "population_std", "none"):
        raise InputError(f"scale must be 'sample_std', 'population_std' or 'none', got {scale!r}")
    check_number(epsilon, "epsilon", "at least 0", least=0)
    weights = torch.ones_like(values) if weights is None else weights
    number = torch.unique(group, return_inverse=True)[1]
    count = torch.bincount(number, weights)
    mean = torch.bincount(number, weights * values) / count
    # Where no value has weight there is no mean; equal values differ from theirs by rounding at most.
    deviation = (values - mean[number]).where(mean.isfinite()[number] & ~_is_equal(values, number), 0.0)
    if scale == "none":
        return deviation
    freedom = (count - 1 if scale == "sample_std" else count).clamp(min=0)
    variance = torch.bincount(number, weights * deviation.square()) / freedom
    divisor = (variance.sqrt() + epsilon)[number]
    # Weights below 1 in all can leave no freedom; without a spread there is nothing to divide by.
    return torch.where((deviation != 0) & divisor.isfinite() & (divisor > 0), deviation / divisor, 0.0)


def read_numbers(values: Numbers, count: int, name: str, unit: str) -> Tensor:
    """Check that there is one finite number per `unit`; return float64 [count] on the CPU.

    Raises:
        InputError: another number of them, no numbers, or NaN or infinity.
    """
    try:
        read = read_tensor(values)
        if read.is_complex():
            raise TypeError(f"{read.dtype} are no real numbers")
        read = read.detach().to("cpu", torch.float64)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(f"{name} must be numbers, one per {unit}, got {type(values).__name__}: {error}") from error
    if read.shape != (count,):
        raise InputError(f"{name} must be one number per {unit}, [{count}], got {list(read.shape)}")
    if not bool(read.isfinite().all()):
        at = int((~read.isfinite()).nonzero()[0, 0])
        raise InputError(f"{name} must be finite, got {float(read[at])} for {unit} {at}; leave failed ones out")
    return read


def _is_equal(values: Tensor, number: Tensor) -> Tensor:
    """Return bool [n]: all values of the group are equal up to rounding.

    Dividing by the standard deviation would inflate rounding errors to 1.
    """

    def largest(x: Tensor) -> Tensor:
        return torch.zeros_like(x).scatter_reduce(0, number, x, "amax", include_self=False)[number]

    return largest(values) + largest(-values) <= _ROUNDING * largest(values.abs())
