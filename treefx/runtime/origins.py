"""Note the origin of tensors that one graph of a model passes to the next.

Dynamo cuts a model in two where a vision tower reads sizes on the host, and the graph behind the cut gets vectors in
place of token ids. Equal bits do not suffice to share them: a projection that starts at zero gives equal vectors for
all images, and another gradient for each. So the graph that makes vectors notes it here: tokens ``[B, T, ...]`` whose
keys agree on their prefixes, or vectors ``[n, ...]`` of equal numbers, are the same function of equal inputs. The
gradient of the parameters behind such copies needs the sum over them alone, which may go into one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import TensorWeakRef, WeakIdKeyDictionary

from treefx.errors import UnsupportedError
from treefx.kernels.memory import together

__all__ = [
    "OTHER_ORIGIN",
    "Origin",
    "are_own",
    "copy_origin",
    "guarded",
    "is_noted",
    "note_tokens",
    "note_vectors",
    "numbers_of_vectors",
    "origin_of",
    "with_origin",
]


OTHER_ORIGIN = (
    "values that go from one graph of the model to the next are as they were in the call, but an output that was not "
    "read then is computed now, and they have been changed or got a hook since; read the output right after the call"
)
"""Text of the error where the origin of a value has been lost since the call."""


@dataclass(frozen=True)
class Origin:
    """Describe the origin of a tensor.

    Attributes:
        per_token: Whether its first two dimensions are rows and columns; else the first one counts vectors.
        version: That of the tensor when this was noted.
        find: Gives its keys [B, T], or one number per vector [n]; None if these are not known any more.
        own: Whether keys that agree on prefixes of rows tell equal tokens, whatever columns these start in.
        ran: bool [B, T] on the host, the tokens that have a value, where padding has none; None for all.
    """

    per_token: bool
    version: int
    find: Callable[[], Sequence[Tensor] | None]
    own: bool = False
    ran: Tensor | None = None


_origins: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""Origin by tensor, for as long as the tensor lives."""


def note_tokens(x: Tensor, keys: Sequence[Tensor], *, own: bool = False, ran: Tensor | None = None) -> None:
    """Note that tokens of x [B, T, ...] are equal where keys [B, T] agree on prefixes.

    ``own`` and ``ran`` are those of ``Origin``.
    """
    if any(item.is_inference() for item in (x, *keys)):  # changes of these cannot be detected
        return
    versions = [key._version for key in keys]

    def find() -> Sequence[Tensor] | None:
        return keys if versions == [key._version for key in keys] else None

    _origins[x] = Origin(True, x._version, find, own, ran)


def note_vectors(x: Tensor, find: Callable[[], Tensor | None]) -> None:
    """Note that vectors of x [n, ...] are equal where their numbers [n] are equal.

    `find` returns None if these are unknown by then.
    """

    def found() -> Sequence[Tensor] | None:
        numbers = find()
        return None if numbers is None else [numbers]

    if not x.is_inference():
        _origins[x] = Origin(False, x._version, found)


def with_origin(x: Tensor, leaf: Tensor) -> Tensor:
    """Return a leaf that stands for x, or a view of it that has the origin of x, where one is noted."""
    return leaf if origin_of(x) is None else copy_origin(x, leaf.view_as(leaf))


def copy_origin(x: Tensor, other: Tensor) -> Tensor:
    """Note the origin of x for another tensor of equal values, and return that."""
    origin = origin_of(x)
    if origin is not None:
        _origins[other] = replace(origin, version=other._version)
    return other


def are_own(given: Sequence[Any]) -> bool:
    """Return whether all tokens that other graphs made are known in whatever columns their rows start."""
    origins = [origin_of(x) for x in given]
    return all(origin.own for origin in origins if origin is not None and origin.per_token)


def is_noted(x: Tensor) -> bool:
    """Return whether a graph of the model noted the origin of a tensor, current or not."""
    return x in _origins


def origin_of(x: Any) -> Origin | None:
    """Return the origin of a tensor, if it is known and its own gradient is unused.

    Gradients of a tensor that a caller keeps, or hangs a hook on, are wanted for each copy, which a sum does not give.
    """
    origin: Origin | None = _origins[x] if isinstance(x, Tensor) and x in _origins else None
    if origin is None or origin.version != x._version:
        return None
    if x.requires_grad and (x.is_leaf or x.retains_grad or x._backward_hooks):
        return None
    return origin if origin.find() is not None else None


def numbers_of_vectors(given: Sequence[Any]) -> Tensor | None:
    """Return int64 [n], the numbers of vectors in several tensors; None if unknown."""
    origins = [origin_of(x) for x in given]
    found = [None if origin is None or origin.per_token else origin.find() for origin in origins]
    return torch.cat(together([keys[0] for keys in found if keys])) if all(found) else None


_LOOKED_AT = (
    "the gradient of a value between two graphs of the model is asked for, but the graph behind it ran once per "
    "distinct token, and gave the gradients of all rows to one of them: set the hook, or retain_grad(), before the "
    "value is read on, or pass options={'min_sharing': float('inf')} where you take torch.autograd.grad of it"
)


class _Guarded(torch.autograd.Function):
    """Hands a value on, and its gradient back if nothing but the parameters in front wants it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, alive: TensorWeakRef, rows: Tensor | None) -> Tensor:
        ctx.alive = alive
        return x.view_as(x) if rows is None else rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x = ctx.alive()
        if x is not None and (x.retains_grad or x._backward_hooks or _is_only_captured(x.grad_fn)):
            raise UnsupportedError(_LOOKED_AT)
        return grads[0], None, None


def guarded(x: Tensor, rows: Tensor | None = None) -> Tensor:
    """Wrap a value of another graph so that its backward refuses to show its gradient.

    The gradient is that of all rows in one. ``rows`` are its numbers, where x is no plain tensor.

    Raises:
        UnsupportedError: In the backward, where a hook or ``retain_grad`` came after the call, or
            ``torch.autograd.grad`` takes this gradient.
    """
    if not (x.requires_grad and torch.is_grad_enabled()):
        return x if rows is None else rows
    result: Tensor = _guarded(x, TensorWeakRef(x), rows)
    return result


_guarded: Callable[..., Any] = _Guarded.apply


def _is_only_captured(node: Any) -> bool:
    """Return whether ``torch.autograd.grad`` captures a node's gradient and stops there."""
    behind = [following for following, _ in node.next_functions if following is not None]
    return bool(behind) and not any(map(_will_run, behind))


def _will_run(node: Any) -> bool:
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # a leaf of the requested gradients
        return True
