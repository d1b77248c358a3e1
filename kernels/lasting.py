"""Make tensors outside of inference mode, which outlive the call that made them.

Autograd cannot save inference tensors.

Under ``torch.inference_mode`` every new tensor is one. Old log-probabilities come first, the training step on the same
batch second: caches of the first for the second (tries, tiles, edges, compiled code) are made in here.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property, wraps
from typing import Any, TypeVar

import torch

__all__ = ["lasting", "lasting_property"]

_T = TypeVar("_T")


@contextmanager
def lasting() -> Iterator[None]:
    """Make ordinary tensors inside of inference mode too; grad mode stays unchanged."""
    gradients = torch.is_grad_enabled()
    with torch.inference_mode(False), torch.set_grad_enabled(gradients):  # the first alone would turn gradients on
        yield


def lasting_property(function: Callable[[Any], _T]) -> "cached_property[_T]":
    """Cache a property whose tensors may be read in any mode later."""

    @wraps(function)
    def compute(self: Any) -> _T:
        with lasting():
            return function(self)

    return cached_property(compute)
