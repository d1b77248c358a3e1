"""Keep modules that compute token by token whole: one operator for all of them.

Mixtures of experts loop over the experts that some token chose, and select tokens by values, which no graph can hold.
``treefx::token_module`` stands for the call of such a module ``f`` on hidden states ``x [..., D]``::

    y[n] = f(x[n]; w)        for every token n, whatever the other tokens are

so that it runs once per distinct token. ``treefx.runtime.whole.token_modules`` finds the modules, and proves the law.
The module itself runs, uncompiled; the backward runs its forward a second time.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import register_flop_formula

from treefx.kernels.common import autograd_enabled, owned
from treefx.kernels.cuda_graphs import NOT_CAPTURED

__all__ = ["ModuleResult", "TokenModule", "call_module", "register_module", "token_module", "token_module_of"]


@dataclass(frozen=True)
class ModuleResult:
    """One result of a module.

    Attributes:
        in_line: whether it is [tokens, ...] where the hidden states are [rows, columns, D].
        features: its last dimensions.
        dtype: of its elements.
    """

    in_line: bool
    features: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, eq=False)
class TokenModule:
    """Hold a module that computes token by token, and the form of its results.

    Attributes:
        module: the module itself, weakly.
        names: of its parameters and buffers, in the order in which the operator takes them.
        results: its results in order.
        one: whether it returns a tensor, not a tuple of tensors.
        autocast: the dtype of autocast around it; None without autocast.
        flops: floating-point operations of a forward per token.
    """

    module: weakref.ref[nn.Module]
    names: tuple[str, ...]
    results: tuple[ModuleResult, ...]
    one: bool
    autocast: torch.dtype | None
    flops: float

    def run(self, hidden: Tensor, held: Sequence[Tensor]) -> list[Tensor]:
        """Call the module with these parameters and buffers."""
        module = self.module()
        if module is None:
            raise RuntimeError("a compiled graph was called after the model that it was compiled for was deleted")
        found = call_module(module, dict(zip(self.names, held, strict=True)), hidden, self.autocast)
        return [found] if self.one else list(found)


def call_module(module: nn.Module, held: Mapping[str, Tensor], hidden: Tensor, autocast: torch.dtype | None) -> Any:
    """Return a module's result for hidden states [..., D] with these parameters and buffers."""
    with torch.autocast(hidden.device.type, autocast, enabled=autocast is not None):
        return torch.func.functional_call(module, dict(held), (hidden,))


_MODULES: weakref.WeakValueDictionary[str, TokenModule] = weakref.WeakValueDictionary()
"""By key, as long as the proof of the module is kept."""


def register_module(key: str, found: TokenModule) -> None:
    """Register a module for graphs under a key of this process."""
    _MODULES[key] = found


def token_module_of(key: str) -> TokenModule:
    """Return the module that an operator stands for."""
    return _MODULES[key]


@torch.library.custom_op("treefx::token_module", mutates_args=(), tags=NOT_CAPTURED)
def token_module(tensors: list[Tensor], key: str) -> list[Tensor]:
    """Return a module's results for hidden states; its parameters and buffers stand behind these."""
    found = _MODULES[key].run(tensors[0], tensors[1:])
    return [owned(x).clone() if any(x is item for item in tensors) else owned(x) for x in found]


@token_module.register_fake
def _(tensors: list[Tensor], key: str) -> list[Tensor]:
    hidden, *front = tensors[0], *tensors[0].shape[:-1]
    results = _MODULES[key].results
    return [
        hidden.new_empty([*([math.prod(front)] if of.in_line else front), *of.features], dtype=of.dtype)
        for of in results
    ]


@torch.library.custom_op("treefx::token_module_backward", mutates_args=(), tags=NOT_CAPTURED)
def token_module_backward(grads: list[Tensor], tensors: list[Tensor], wanted: list[bool], key: str) -> list[Tensor]:
    """Return the gradients of the wanted tensors in order; rerun the forward."""
    leaves = [x.detach().requires_grad_(needed) for x, needed in zip(tensors, wanted, strict=True)]
    learned = [x for x in leaves if x.requires_grad]
    with autograd_enabled():
        results = _MODULES[key].run(leaves[0], leaves[1:])
        pairs = [(x, grad) for x, grad in zip(results, grads, strict=True) if x.requires_grad]
        found = torch.autograd.grad([x for x, _ in pairs], learned, [grad for _, grad in pairs], allow_unused=True)
    return [torch.zeros_like(x) if of is None else owned(of) for of, x in zip(found, learned, strict=True)]


@token_module_backward.register_fake
def _(grads: list[Tensor], tensors: list[Tensor], wanted: list[bool], key: str) -> list[Tensor]:
    learned = [x for x, needed in zip(tensors, wanted, strict=True) if needed]
    return [torch.empty_like(x, memory_format=torch.contiguous_format) for x in learned]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    tensors, ctx.key = inputs
    ctx.save_for_backward(*tensors)
    ctx.wanted = [x.requires_grad for x in tensors]


def _backward(ctx: Any, grads: list[Tensor]) -> tuple[list[Tensor | None], None]:
    tensors = list(ctx.saved_tensors)
    found = iter(torch.ops.treefx.token_module_backward(list(grads), tensors, ctx.wanted, ctx.key))
    return [next(found) if needed else None for needed in ctx.wanted], None


token_module.register_autograd(_backward, setup_context=_setup_context)


@register_flop_formula(torch.ops.treefx.token_module)
def _flops(shapes: Any, key: str, *_: Any, **__: Any) -> int:
    """Count a forward's operations, as measured by the proof."""
    tokens: int = math.prod(shapes[0][:-1])
    return round(token_module_of(key).flops * tokens)
