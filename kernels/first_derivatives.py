"""Refuse second derivatives of functions whose backward autograd does not record."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from treefx.errors import UnsupportedError

__all__ = ["once_differentiable", "refuse_derivative"]

_CODE = "TFX210"
_TEXT = (
    "{} has a first derivative only, but a second one was taken (create_graph=True): run the model uncompiled and "
    "unconverted for that"
)


def once_differentiable(what: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorate the backward of an ``autograd.Function`` to refuse derivatives of its results.

    PyTorch's decorator of this name lets them pass, as zero, if no incoming gradient requires a gradient (that of a
    sum) or if ``torch.autograd.grad`` names its inputs. Here the results depend on all that the function saved.

    Args:
        what: Names the function in the error.
    """

    def decorate(backward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(backward)
        def call(ctx: Any, *grads: Any) -> Any:
            with torch.no_grad():
                results = backward(ctx, *grads)
            if not torch.is_grad_enabled():  # no backward will differentiate them
                return results
            given, text = (*grads, *ctx.saved_tensors), _TEXT.format(what)
            several = isinstance(results, tuple)
            found = tuple(refuse_derivative(x, given, text) for x in (results if several else (results,)))
            return found if several else found[0]

        return call

    return decorate


def refuse_derivative(x: Any, given: Sequence[Any], text: str) -> Any:
    """Return a gradient that depends on ``given`` for autograd, and raises when autograd differentiates it."""
    learned = [item for item in given if isinstance(item, Tensor) and item.requires_grad]
    return _Refuse.apply(text, x, *learned) if isinstance(x, Tensor) and learned else x  # type: ignore[no-untyped-call]


class _Refuse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, text: str, x: Tensor, *given: Tensor) -> Tensor:
        ctx.text = text
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise UnsupportedError(ctx.text, _CODE)
