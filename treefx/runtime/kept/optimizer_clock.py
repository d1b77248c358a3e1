"""When optimizers step: one hook on all optimizers of PyTorch.

Some fused optimizers write weights without counting a version of the tensor, so versions alone do not tell.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.weak import WeakIdKeyDictionary

__all__ = ["now", "stepped_since", "steps_taken"]


@dataclass
class _Steps:
    number: int = 0
    last: int = 0


_clock = itertools.count(1)
_of_optimizer: MutableMapping[Optimizer, _Steps] = weakref.WeakKeyDictionary()
_of_parameter: MutableMapping[Tensor, _Steps] = WeakIdKeyDictionary()
"""The steps of the optimizer that a parameter was in at its first step."""


def now() -> int:
    """Return a time, counted in steps and questions, later than all earlier steps."""
    return next(_clock)


def steps_taken(parameter: Tensor) -> int:
    """How many steps the optimizer of a parameter has taken."""
    found = _of_parameter.get(parameter)
    return 0 if found is None else found.number


def stepped_since(time: int) -> set[int]:
    """The parameters, by ``id``, of all optimizers that stepped after a time."""
    later = [optimizer for optimizer, steps in list(_of_optimizer.items()) if steps.last > time]
    return {id(x) for optimizer in later for group in optimizer.param_groups for x in group["params"]}


def _count_step(optimizer: Optimizer, *_: Any) -> None:
    if torch.compiler.is_compiling():  # it would be traced into the user's graph, which counts versions anyway
        return
    if optimizer not in _of_optimizer:
        steps = _of_optimizer[optimizer] = _Steps()
        _of_parameter.update((x, steps) for group in optimizer.param_groups for x in group["params"])
    steps = _of_optimizer[optimizer]
    steps.number, steps.last = steps.number + 1, next(_clock)


register_optimizer_step_post_hook(_count_step)
