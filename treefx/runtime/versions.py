"""Where supported versions of PyTorch differ: what 2.13 does, had from 2.11 as well.

GPU machines have older versions than a development machine. What differs between them is named here, with what the
older one does, and nowhere else.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch._dynamo.guards import GuardBuilder, install_guard
from torch._dynamo.variables import functions
from torch._dynamo.variables.functions import UserMethodVariable
from torch._dynamo.variables.misc import AutogradFunctionVariable
from torch._dynamo.variables.user_defined import UserDefinedObjectVariable
from torch.torch_version import TorchVersion

__all__ = ["mend_dynamo", "parameter_groups"]


def mend_dynamo() -> None:
    """Let an older Dynamo trace what 2.13 traces, where treefx compiles it."""
    if TorchVersion(torch.__version__) < "2.13":
        _take_objects_for_constants()
        _apply_functions_kept_by_modules()


def parameter_groups(state: Any) -> list[Any]:
    """What FSDP2 gathers at once, of one module's state: 2.11 has one such group of parameters or none."""
    several = getattr(state, "_fsdp_param_groups", None)
    if several is not None:
        return list(several)
    group = state._fsdp_param_group
    return [] if group is None else [group]


class _Itself:
    """An argument of a function that Dynamo runs instead of tracing it."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def is_tensor(self) -> bool:
        return False

    def as_python_constant(self) -> Any:
        return self.value


def _take_objects_for_constants() -> None:
    """Let functions with ``assume_constant_result`` be handed modules, which 2.11 refuses with an internal error."""
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
        if getattr(tx.output.compiler_fn, "compiler_name", None) == "treefx":
            args, kwargs = [taken(x) for x in args], {key: taken(x) for key, x in kwargs.items()}
        return original(tx, fn, name, args, kwargs)

    functions.invoke_and_store_as_constant = invoke


def _apply_functions_kept_by_modules() -> None:
    """Trace ``self.function(x)`` where a module keeps the ``apply`` of an ``autograd.Function``.

    2.11 takes that for an ordinary method, walks into PyTorch's own code and cuts the graph there.
    """
    original = UserMethodVariable.call_function

    @functools.wraps(original)
    def call_function(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        ours = getattr(tx.output.compiler_fn, "compiler_name", None) == "treefx"
        applied = self.fn is getattr(torch.autograd.Function.apply, "__func__", None)
        if ours and applied and isinstance(self.obj, AutogradFunctionVariable):
            return self.obj.call_method(tx, "apply", list(args), kwargs)
        return original(self, tx, args, kwargs)

    UserMethodVariable.call_function = call_function  # type: ignore[method-assign]
