"""Trace one operator in place of TRL's LM head without logits.

All trainers of TRL 1.16 score tokens with one ``autograd.Function``, which walks over tiles in place; Dynamo cannot
trace it and cuts the graph in front of it. On a GPU TRL hands it the positions that have a label, a number that only
the labels tell, which cuts the graph as well: all positions are handed over here, and the operator leaves those out
that are set to zero behind it.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch._dynamo.variables import ConstantVariable
from torch._dynamo.variables.tensor import SymNodeVariable

from treefx.passes.trace.heads import Head, register_head

__all__ = ["LEAVES_OUT", "head_instead", "scores_all", "setting_of"]

_MODULE, _NAME = "trl.kernels.chunked_logprob", "ChunkedLogProbFunction"
LEAVES_OUT = (_MODULE, "_use_triton")
"""The function that says whether positions without a label are left out."""
_TENSORS = ("hidden", "weight", "bias", "targets")


def head_instead(function: Any, tx: Any, args: Any, kwargs: Any) -> tuple[Any, Any, Any] | None:
    """``treefx::head`` in place of TRL's function."""
    if kwargs or not _is_head(function):
        return None
    hidden = args[0].as_proxy().node.meta["example_value"]
    device = hidden.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    settings = tuple(map(setting_of, args[len(_TENSORS) :]))
    made = Head(function, settings, dtype)
    there = [None if x is None else x.requires_grad for x in made.example(hidden.dtype)]
    given = [*args[: len(_TENSORS)], *map(ConstantVariable.create, (register_head(made), tuple(there)))]
    return _score, given, {}


def setting_of(item: Any) -> Any:
    """Return a setting; with ``dynamic=True``, evaluate the symbols of floats."""
    return item.evaluate_expr() if isinstance(item, SymNodeVariable) else item.guard_as_python_constant()


def _is_head(function: Any) -> bool:
    if (function.__module__, function.__name__) != (_MODULE, _NAME):
        return False
    return tuple(inspect.signature(function.forward).parameters)[1 : len(_TENSORS) + 1] == _TENSORS


def scores_all(*_: Any) -> bool:
    """``_use_triton``, as far as it says whether positions without a label are left out."""
    return False


def _score(hidden: Any, weight: Any, bias: Any, targets: Any, key: str, there: tuple[bool | None, ...]) -> Any:
    """The function's results: None where it has none, without a gradient where it gives none."""
    found = torch.ops.treefx.head(hidden, targets, weight, bias, None, key)
    results: list[Any] = []
    number = 0
    for has_gradient in there:
        if has_gradient is None:
            results.append(None)
            continue
        results.append(found[number] if has_gradient else found[number].detach())
        number += 1
    return tuple(results)
