"""A step of a model in float64 throughout: what two float32 results are judged by where they differ."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

__all__ = ["in_float64"]

_T = TypeVar("_T")


class _Wider(TorchFunctionMode):
    """Reads float64 where a model asks for float32 by name, as norms, softmax and losses of transformers do."""

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func == torch.Tensor.float:
            return args[0].double()
        wide = tuple(torch.float64 if item is torch.float32 else item for item in args)
        named = {name: torch.float64 if item is torch.float32 else item for name, item in (kwargs or {}).items()}
        return func(*wide, **named)


def in_float64(model: nn.Module, step: Callable[[nn.Module], _T]) -> _T:
    """Run a step on a float64 copy of a model, its casts to float32 lifted.

    Raises:
        RuntimeError: An operator of the model has no float64 form.
    """
    twin = copy.deepcopy(model).double()
    choose_experts: Any = getattr(twin, "set_experts_implementation", None)
    if choose_experts is not None:
        choose_experts("eager")  # the grouped product of experts has no float64
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)  # of numbers that a model makes, such as the least one of its dtype
    try:
        with _Wider():
            return step(twin)
    finally:
        torch.set_default_dtype(before)
