"""Check numbers that callers pass, or raise with the expected and the actual value."""

import math
import sys
from numbers import Integral, Real
from typing import Any

import numpy as np
import torch
from torch import Tensor

from treefx.errors import InputError, shorten

__all__ = ["check_number", "check_whole", "is_whole", "read_tensor"]


def check_number(
    value: Any,
    name: str,
    expected: str,
    *,
    least: float = -math.inf,
    above: float = -math.inf,
    below: float = math.inf,
    most: float = math.inf,
    infinite: bool = False,
) -> float:
    """Return a number that lies within bounds.

    Args:
        value: number of Python or numpy, or a tensor of one element; no bool.
        name: name of the argument.
        expected: text behind "must be".
        least: it is at least that.
        above: it is greater than that.
        below: it is less than that.
        most: it is at most that.
        infinite: whether it may be infinite, within the bounds.

    Raises:
        InputError: it is no real number, NaN, or out of bounds.
    """
    number = _as_number(value)
    inside = (
        least <= number <= most and (above == -math.inf or number > above) and (below == math.inf or number < below)
    )
    if not inside or (math.isinf(number) and not infinite):
        raise InputError(f"{name} must be {expected}, got {shorten(repr(value), 80)}")
    return number


def check_whole(value: Any, name: str, *, least: int = 0, or_none: str = "") -> int:
    """Return a whole number; floats and truth values are none.

    Args:
        value: the argument.
        name: name of the argument.
        least: the smallest that makes sense.
        or_none: meaning of None, for the message.

    Raises:
        InputError: it is no whole number, or is too small.
    """
    if not is_whole(value, least):
        alternative = f", or None for {or_none}" if or_none else ""
        of = "" if isinstance(value, Integral) else "a whole number of "
        got = shorten(repr(value), 80)
        raise InputError(f"{name} must be {of}at least {least}{alternative}, got {got}")
    return int(value)


def is_whole(value: Any, least: int = 0) -> bool:
    """Whether a value is a whole number of at least so much; truth values are none."""
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= least


def read_tensor(values: Any) -> Tensor:
    """Convert values to a tensor; Python floats become float64.

    Raises:
        TypeError, ValueError, RuntimeError: of torch, where these are no numbers.
    """
    read = torch.as_tensor(values)
    given = isinstance(values, Tensor | np.ndarray)
    return read if given or not read.is_floating_point() else torch.as_tensor(values, dtype=torch.float64)


def _as_number(value: Any) -> float:
    """Convert to a float; NaN for anything that is no number."""
    if type(value) in (int, float):
        return float(min(max(value, -sys.float_info.max), sys.float_info.max)) if type(value) is int else value
    if isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex():
        value = value.item()
    if not isinstance(value, Real) or isinstance(value, bool | np.bool_):
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf  # type: ignore[operator]
