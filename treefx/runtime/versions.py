"""Where supported versions of PyTorch and transformers differ: what newer ones do, had from the oldest as well.

GPU machines have older versions than a development machine. What differs between them is named here, with what the
older one does, and nowhere else.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
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
    _keep_backward_of_experts_whole()


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


def _keep_backward_of_experts_whole() -> None:
    """Make one operator of the backward of transformers' grouped product, as later versions than 5.17 do themselves.

    5.17 loops over the values of the offsets there, which no graph of a backward knows.
    """
    module = sys.modules.get("transformers.integrations.moe")
    backward = getattr(module, "_grouped_mm_fallback_backward", None)
    if backward is None or hasattr(module, "_grouped_mm_fallback_backward_fake"):
        return
    name, schema = "treefx::grouped_mm_backward", "(Tensor x, Tensor weight, Tensor offsets, Tensor g) -> (Tensor, Tensor)"
    operator = torch.library.custom_op(name, _eager_of(backward), mutates_args=(), schema=schema)
    operator.register_fake(lambda x, weight, offsets, g: (torch.empty_like(x), torch.empty_like(weight)))

    def whole(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor, None]:
        return *operator(*ctx.saved_tensors, ctx.offs, g), None

    setup = module._grouped_mm_fallback_setup_context  # type: ignore[union-attr]
    torch.library.register_autograd("transformers::grouped_mm_fallback", whole, setup_context=setup)


def _eager_of(backward: Callable[..., Any]) -> Callable[..., tuple[Tensor, Tensor]]:
    """transformers' own loop, as a function of tensors."""

    def loop(x: Tensor, weight: Tensor, offsets: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        return backward(SimpleNamespace(saved_tensors=(x, weight), offs=offsets), g)[:2]  # type: ignore[no-any-return]

    return loop
