"""What Dynamo traces in place of TRL's LM head without logits, where treefx compiles: one operator.

All trainers of TRL 1.16 score tokens with one ``autograd.Function``, which walks over tiles in place; Dynamo cannot
trace it and cuts the graph in front of it. On a GPU TRL hands it the positions that have a label, a number that only
the labels tell, which cuts the graph as well: all positions are handed over here, and the operator leaves those out
that are set to zero behind it.
"""

from __future__ import annotations

import functools
import inspect
from types import FunctionType
from typing import Any, cast

import torch
from torch._dynamo.variables import ConstantVariable, UserFunctionVariable
from torch._dynamo.variables.misc import AutogradFunctionVariable
from torch._dynamo.variables.tensor import SymNodeVariable

from treefx.passes.trace.heads import Head, register_head
from treefx.runtime.whole.flash import trace_instead

__all__ = ["keep_heads_whole", "setting_of"]

_MODULE, _NAME = "trl.kernels.chunked_logprob", "ChunkedLogProbFunction"
_TENSORS = ("hidden", "weight", "bias", "targets")


def keep_heads_whole() -> None:
    """Let Dynamo trace ``treefx::head`` in place of TRL's function, where treefx compiles it."""
    trace_instead((_MODULE, "_use_triton"), _scores_all)
    original = AutogradFunctionVariable.call_apply

    @functools.wraps(original)
    def call_apply(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        ours = getattr(tx.output.compiler_fn, "compiler_name", None) == "treefx"
        if not ours or kwargs or not _is_head(self.fn_cls):
            return original(self, tx, args, kwargs)
        hidden = args[0].as_proxy().node.meta["example_value"]
        device = hidden.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        settings = tuple(map(setting_of, args[len(_TENSORS) :]))
        made = Head(self.fn_cls, settings, dtype)
        there = [None if x is None else x.requires_grad for x in made.example(hidden.dtype)]
        given = [*args[: len(_TENSORS)], *map(ConstantVariable.create, (register_head(made), tuple(there)))]
        return UserFunctionVariable(cast(FunctionType, _score)).call_function(tx, given, {})

    AutogradFunctionVariable.call_apply = call_apply  # type: ignore[method-assign]


def setting_of(item: Any) -> Any:
    """A setting; with ``dynamic=True`` Dynamo passes floats as symbols, which are asked for their values here."""
    return item.evaluate_expr() if isinstance(item, SymNodeVariable) else item.guard_as_python_constant()


def _is_head(function: Any) -> bool:
    if (function.__module__, function.__name__) != (_MODULE, _NAME):
        return False
    return tuple(inspect.signature(function.forward).parameters)[1 : len(_TENSORS) + 1] == _TENSORS


def _scores_all(*_: Any) -> bool:
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
