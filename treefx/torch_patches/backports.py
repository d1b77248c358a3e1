"""Backport behaviour of PyTorch 2.13 to 2.11, the oldest supported version."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch._dynamo.guards import GuardBuilder, install_guard
from torch._dynamo.variables import functions
from torch._dynamo.variables.functions import UserMethodVariable
from torch._dynamo.variables.misc import AutogradFunctionVariable
from torch._dynamo.variables.user_defined import UserDefinedObjectVariable
from torch._inductor.codegen.cpp import CppVecKernel
from torch.torch_version import TorchVersion

from treefx.torch_patches.patch import is_ours

__all__ = [
    "IS_OLDER",
    "apply_functions_kept_by_modules",
    "spread_conditions_of_indices",
    "take_objects_for_constants",
]

IS_OLDER = TorchVersion(torch.__version__) < "2.13"


class _Itself:
    """An argument of a function that Dynamo runs instead of tracing it."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def is_tensor(self) -> bool:
        return False

    def as_python_constant(self) -> Any:
        return self.value


def take_objects_for_constants() -> None:
    """Pass modules to functions with ``assume_constant_result``.

    Version 2.11 refuses them with an internal error.
    """
    if not IS_OLDER:
        return
    original = functions.invoke_and_store_as_constant

    def taken(x: Any) -> Any:
        x = x.realize()
        if not isinstance(x, UserDefinedObjectVariable):
            return x
        if x.source is not None:
            install_guard(x.source.make_guard(GuardBuilder.ID_MATCH))
        return _Itself(x.value)

    @functools.wraps(original)
    def invoke(tx: Any, fn: Any, name: str, args: Any, kwargs: Any) -> Any:
        if is_ours(tx):
            args, kwargs = [taken(x) for x in args], {key: taken(x) for key, x in kwargs.items()}
        return original(tx, fn, name, args, kwargs)

    functions.invoke_and_store_as_constant = invoke


def apply_functions_kept_by_modules() -> None:
    """Trace ``self.function(x)`` with the ``apply`` of an ``autograd.Function`` in a module.

    2.11 takes that for an ordinary method, walks into PyTorch's own code and cuts the graph there.
    """
    if not IS_OLDER:
        return
    original = UserMethodVariable.call_function

    @functools.wraps(original)
    def call_function(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        applied = self.fn is getattr(torch.autograd.Function.apply, "__func__", None)
        if is_ours(tx) and applied and isinstance(self.obj, AutogradFunctionVariable):
            return self.obj.call_method(tx, "apply", list(args), kwargs)
        return original(self, tx, args, kwargs)

    UserMethodVariable.call_function = call_function  # type: ignore[method-assign]


def spread_conditions_of_indices() -> None:
    """Write a lane-uniform condition of a checked index as a mask of lanes, as 2.13 does.

    2.11 calls a constructor that there is not: angles that are looked up behind a ``cat``, on the CPU, do not compile.
    """
    if not IS_OLDER:
        return
    original: Any = CppVecKernel.indirect_assert

    @functools.wraps(original)
    def indirect_assert(self: Any, var: Any, lower: Any, upper: Any, mask: Any = None) -> Any:
        line = original(self, var, lower, upper, mask)
        if mask is None or mask.is_vec or not var.is_vec:
            return line
        lanes = self._get_mask_type(var.dtype)
        return line.replace(f"~({lanes}({mask}))", f"~({lanes}::from({mask}))")

    CppVecKernel.indirect_assert = indirect_assert  # type: ignore[method-assign]
