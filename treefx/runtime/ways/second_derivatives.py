"""Refuse second derivatives through a user's ``autograd.Function`` in a Dynamo graph.

Dynamo's operator for such functions takes their saved values as constants, so a gradient of a gradient silently lacks
the terms through them. AOTAutograd refuses all second derivatives; here they are refused for such graphs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves

from treefx.kernels.first_derivatives import refuse_derivative

__all__ = ["has_custom_functions", "refuse_second_derivatives"]

_APPLY = torch.ops.higher_order.autograd_function_apply


def has_custom_functions(gm: fx.GraphModule) -> bool:
    """Whether a graph of Dynamo, or a body inside of it, calls an ``autograd.Function``."""
    bodies = [module for module in gm.modules() if isinstance(module, fx.GraphModule)]
    return any(node.target is _APPLY for body in bodies for node in body.graph.nodes)


def refuse_second_derivatives(run: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a call to allow gradients and refuse gradients of gradients."""

    @functools.wraps(run)
    def call(*args: Any) -> Any:
        results = run(*args)
        given = [x for x in args if isinstance(x, Tensor) and x.requires_grad]
        for x in tree_leaves(results):
            if isinstance(x, Tensor) and x.grad_fn is not None and not any(x is item for item in given):
                x.register_hook(functools.partial(_marked, given))  # type: ignore[no-untyped-call]
        return results

    return call


def _marked(given: Sequence[Tensor], grad: Tensor) -> Tensor:
    """Return an incoming gradient that depends on all that its own gradient may be asked for."""
    if not torch.is_grad_enabled():  # no backward will differentiate it
        return grad
    marked: Tensor = refuse_derivative(grad, (grad, *given), _TEXT)
    return marked


_TEXT = (
    "a second derivative (create_graph=True) through an autograd.Function in a compiled model: what the "
    "function saved is a constant to torch.compile; run the model uncompiled for that, or write the function "
    "as plain operators"
)
