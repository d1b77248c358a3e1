"""Pass tokens from one graph of a model to the next without the padding that neither needs.

Dynamo cuts a model with a vision tower into graphs. The layers return hidden states ``[B, T, D]`` to the model's own
code, which hands them to the graph of head and loss. That graph does not read padding, but the code in between could.
So a graph without a loss returns ``RowsBetween``: the graph behind takes the tokens that ran, and all other code gets
every position, by a second run::

    layers -> RowsBetween of 22 tokens -> head and loss        # 34 tokens in rows, 2 of padding
                        |
                        +-> hook, print, any operator          # runs the layers once more, now with padding

After one such read, later calls run every position at once. Dynamo takes such a tensor for a plain one.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from treefx.kernels.first_derivatives import once_differentiable
from treefx.kernels.memory import on_host
from treefx.passes.analysis import Analysis
from treefx.passes.labels.facts import Dims
from treefx.passes.packing.layout import expand_rows
from treefx.runtime.lazy import Deferred, LazyRows
from treefx.runtime.origins import copy_origin, guarded, note_tokens, origin_of
from treefx.runtime.output_keys import is_per_token

__all__ = [
    "SOURCES",
    "MissingTokens",
    "Packed",
    "RowsBetween",
    "hand_on_changes",
    "hands_on",
    "holed",
    "ran",
    "rows_between",
    "taken",
    "whole",
]

_LIBRARY = "transformers."
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class MissingTokens(Exception):
    """A call needs positions that did not run in the graph before."""


@dataclass(frozen=True)
class Packed:
    """Hold an output once per token.

    Attributes:
        value: [N, ...], with its gradient.
        dims: Of the output on rows.
        token_of: int64 [B, T], -1 where nothing ran.
    """

    value: Tensor
    dims: Dims
    token_of: Tensor

    @property
    def is_complete(self) -> bool:
        """Return whether all positions ran."""
        return not bool((self.token_of < 0).any())

    def rows(self) -> Tensor:
        """Return the output on rows without gradient, zero where nothing ran."""
        return expand_rows(self.value.detach(), self.dims, self.token_of)

    def contract(self, grad: Tensor) -> Tensor:
        """Return the gradient of the value for one on rows."""
        with torch.enable_grad():
            value = self.value.detach().requires_grad_()
            rows = expand_rows(value, self.dims, self.token_of)
        return torch.autograd.grad(rows, value, grad)[0]


class RowsBetween(LazyRows):
    """Stand for hidden states on rows."""

    is_plain_to_dynamo = True
    packed: Packed

    @staticmethod
    def __new__(cls, deferred: Deferred, packed: Packed) -> RowsBetween:
        return LazyRows.__new__(cls, deferred)  # type: ignore[return-value]

    def __init__(self, deferred: Deferred, packed: Packed) -> None:
        super().__init__(deferred)
        self.packed = packed


class _Attach(torch.autograd.Function):
    """Connect the rows with the value of tokens, and, for what another run gives, with the inputs of the call."""

    @staticmethod
    def forward(ctx: Any, deferred: Deferred, packed: Packed, value: Tensor, *inputs: Tensor) -> RowsBetween:
        ctx.deferred, ctx.packed = deferred, packed
        ctx.save_for_backward(*inputs)
        ctx.set_materialize_grads(False)
        return RowsBetween(deferred, packed)

    @staticmethod
    @once_differentiable("a value between two graphs of a model")
    def backward(ctx: Any, grad: Tensor | None) -> Any:
        inputs = ctx.saved_tensors  # raises if an input was changed in place since the forward
        none = (None,) * len(inputs)
        if grad is None:
            return None, None, None, *none
        grad = grad.rows if isinstance(grad, LazyRows) else grad
        if ctx.deferred.ready and not ctx.packed.is_complete:
            return None, None, None, *ctx.deferred.differentiate(grad)
        return None, None, ctx.packed.contract(grad), *none


def rows_between(deferred: Deferred, packed: Packed) -> Tensor:
    """Return the tensor that code behind a graph gets."""
    value = packed.value
    attached = torch.is_grad_enabled() and value.requires_grad
    made: Tensor = (
        _Attach.apply(deferred, packed, value, *deferred.inputs)  # type: ignore[no-untyped-call]
        if attached
        else RowsBetween(deferred, packed)
    )
    _note(made, packed)
    return made


def _note(x: Tensor, packed: Packed) -> None:
    token_of = packed.token_of
    note_tokens(x, [token_of], own=True, ran=on_host(token_of) >= 0)


SOURCES: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""What tensors of a call were taken from, for as long as these live."""


def taken(args: Sequence[Any]) -> Sequence[Any]:
    """Return the inputs of a graph with plain tensors of the tokens that ran.

    Where all positions are there, or gradients of each are wanted, these are all.
    """
    return [_take(x) if isinstance(x, RowsBetween) else x for x in args]


def _take(x: RowsBetween) -> Tensor:
    if x.deferred.ready or origin_of(x) is None:
        return _whole(x)
    rows = guarded(x, x.packed.rows())
    _note(rows, x.packed)
    SOURCES[rows] = x
    return rows


def holed(args: Sequence[Any]) -> list[Tensor]:
    """Return the inputs that have the tokens that ran."""
    return [] if not len(SOURCES) else [x for x in args if isinstance(x, Tensor) and x in SOURCES]


def whole(args: Sequence[Any]) -> Sequence[Any]:
    """Return the inputs of a graph with all positions, in place of those that ran."""
    if not holed(args):
        return args
    return [_whole(SOURCES[x]) if isinstance(x, Tensor) and x in SOURCES else x for x in args]


def _whole(x: RowsBetween) -> Tensor:
    rows = x.rows
    found: Tensor = x.clone()
    return found if origin_of(x) is None else copy_origin(rows, found)


def ran(args: Sequence[Any]) -> Tensor | None:
    """Return bool [B, T] on the host, the tokens that all values of other graphs have; None for all."""
    origins = map(origin_of, holed(args))
    masks = [origin.ran for origin in origins if origin is not None and origin.ran is not None]
    return torch.stack(masks).all(0) if masks else None


def hand_on_changes(given: Sequence[Any], args: Sequence[Any]) -> None:
    """Make the changes in place to the inputs of a graph in what they were taken from.

    A graph that changes a value of another graph gets all of its positions.
    """
    for x, y in zip(given, args, strict=True):
        if isinstance(x, RowsBetween) and y not in SOURCES and y._version:
            x.copy_(y)


def hands_on(analysis: Analysis) -> bool:
    """Return whether the outputs of a graph are taken for hidden states that graphs behind it read.

    It has the layers, and vectors of another graph in place of token ids. Hooks of the modules that are being called
    will read what these return, maybe after weights are given back to other ranks.
    """
    assert analysis.tokens is not None
    behind = bool(analysis.tokens.made) and bool(analysis.attentions)
    return behind and all(map(is_per_token, analysis.packed_outputs.values())) and not _are_hooked()


def _are_hooked() -> bool:
    """Return whether a module that is being called in this thread has hooks, other than those of transformers."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        module = frame.f_locals.get("self")
        if isinstance(module, nn.Module):
            hooks = [hook for name in _HOOKS for hook in vars(module).get(name, {}).values()]
            if not all(str(getattr(hook, "__module__", "")).startswith(_LIBRARY) for hook in hooks):
                return True
        frame = frame.f_back
    return False
