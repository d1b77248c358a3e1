"""Patch transformers, if a process has loaded it."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.exc import RestartAnalysis

__all__ = ["install_hooks_first", "keep_backward_of_experts_whole"]


def install_hooks_first() -> None:
    """Install transformers' hooks for router logits and hidden states before Dynamo traces.

    transformers installs them in the first call that requests them, under a lock that would break the graph permanently
    in front of head and loss. Here the hooks are hung for real, and Dynamo starts the trace of the model over.
    """
    module = sys.modules.get("transformers.utils.output_capturing")
    original = getattr(module, "maybe_install_capturing_hooks", None)
    if original is None or hasattr(original, "_dynamo_marked_constant"):
        return

    @torch._dynamo.assume_constant_result  # type: ignore[untyped-decorator]
    @functools.wraps(original)
    def install(model: Any) -> None:
        hung = getattr(model, "_output_capturing_hooks_installed", False)
        original(model)
        if not hung and torch._guards.TracingContext.try_get() is not None:
            raise RestartAnalysis(restart_reason="hooks were hung on the model")

    setattr(module, "maybe_install_capturing_hooks", install)


def keep_backward_of_experts_whole() -> None:
    """Make one operator of the backward of transformers' grouped product.

    Later versions than 5.17 do so themselves.

    5.17 loops over the values of the offsets there, which no graph of a backward knows.
    """
    module = sys.modules.get("transformers.integrations.moe")
    backward = getattr(module, "_grouped_mm_fallback_backward", None)
    if module is None or backward is None or hasattr(module, "_grouped_mm_fallback_backward_fake"):
        return
    schema = "(Tensor x, Tensor weight, Tensor offsets, Tensor g) -> (Tensor, Tensor)"
    name, loop = "transformers::grouped_mm_fallback_backward", _eager_of(backward)
    operator = torch.library.custom_op(name, loop, mutates_args=(), schema=schema)
    operator.register_fake(lambda x, weight, offsets, g: (torch.empty_like(x), torch.empty_like(weight)))

    def whole(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor, None]:
        return *operator(*ctx.saved_tensors, ctx.offs, g), None

    setup = module._grouped_mm_fallback_setup_context
    torch.library.register_autograd("transformers::grouped_mm_fallback", whole, setup_context=setup)


def _eager_of(backward: Callable[..., Any]) -> Callable[..., tuple[Tensor, Tensor]]:
    """transformers' own loop, as a function of tensors."""

    def loop(x: Tensor, weight: Tensor, offsets: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        return backward(SimpleNamespace(saved_tensors=(x, weight), offs=offsets), g)[:2]  # type: ignore[no-any-return]

    return loop
