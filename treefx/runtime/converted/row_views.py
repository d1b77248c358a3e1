"""Slices, views and changes in place of packed rows.

=====================  ==============================================================================================
functions              law
=====================  ==============================================================================================
slices, views          the packed value stays; places of tokens are sliced as rows would be
indices, masks         the same, in memory of their own; pairs of position and feature are picked
changes in place       another packed value, for all tensors that rows would share memory with
=====================  ==============================================================================================
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from treefx.runtime.converted.packed_rows import Held, PackedRows, by_law, packed_rows, rows_among
from treefx.runtime.converted.row_laws import named, picked

__all__: list[str] = []

# Slices and views ---------------------------------------------------------------------------------------------------


def _taken(x: PackedRows, take: Callable[[Tensor], Tensor], packed: Tensor | None = None) -> PackedRows:
    """Take some positions, in the same memory if the function returns a view."""
    places, held = take(x.places), x.held if packed is None else packed
    if places.untyped_storage().data_ptr() == x.places.untyped_storage().data_ptr():
        return packed_rows(held, take(x.token_of), (x.family, places))
    x.family.used |= x.packed.requires_grad
    return packed_rows(held, take(x.token_of), count=x.family.count)


@by_law([Tensor.__getitem__])
def _item(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Index positions by slices, masks or indices; features by slices; pairs of [R, V]."""
    x, key = args
    if not isinstance(x, PackedRows) or not x.is_packed:
        return NotImplemented
    lead, last = _split_key(key if isinstance(key, tuple) else (key,), x)
    if lead is None:
        return NotImplemented
    take = operator.itemgetter(lead)
    indices = [item for item in lead if isinstance(item, Tensor | list)]
    if isinstance(last, Tensor):  # a slice between indices would stand behind them in the result
        pairs = indices and last.dtype is torch.int64 and not any(isinstance(item, slice) for item in lead)
        return _entries(x, take(x.token_of), last) if pairs else NotImplemented
    if last == slice(None):
        return _taken(x, take)
    return NotImplemented if indices else _taken(x, take, x.packed[:, last])


def _split_key(key: tuple[Any, ...], x: PackedRows) -> tuple[tuple[Any, ...] | None, Any]:
    """Split a key into positions and features; None if they cannot be separated."""
    if not all(map(_is_known, key)) or x.packed.dim() != 2:
        return None, None
    taken = [item.dim() if isinstance(item, Tensor) and item.dtype is torch.bool else 1 for item in key]
    dots = [i for i, item in enumerate(key) if item is Ellipsis]
    whole = len(x.deferred.shape)
    if dots:
        missing = whole - (sum(taken) - 1)
        key = (*key[: dots[0]], *[slice(None)] * missing, *key[dots[0] + 1 :])
    else:
        key = (*key, *[slice(None)] * (whole - sum(taken)))
    *lead, last = key
    fits = isinstance(last, slice) or (isinstance(last, Tensor) and last.dtype is not torch.bool)
    return (tuple(lead), last) if len(dots) < 2 and fits else (None, None)


def _is_known(item: Any) -> bool:
    """Return whether a key is a number, a slice, or an index or mask of known dimensions."""
    if isinstance(item, list):
        return all(isinstance(x, Integral) and not isinstance(x, bool) for x in item)
    if isinstance(item, Tensor):
        return item.dtype in (torch.int64, torch.bool) and not isinstance(item, PackedRows)
    return isinstance(item, Integral | slice) and not isinstance(item, bool) or item is Ellipsis


def _entries(x: PackedRows, token_of: Tensor, index: Tensor) -> Any:
    return picked(x, token_of, index) if token_of.shape == index.shape else NotImplemented


@by_law(named("view", "reshape", "flatten", "squeeze", "unsqueeze", "unflatten", "view_as"))
def _reshape(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Positions in another shape, in the same order."""
    x = args[0] if args else None
    if not isinstance(x, PackedRows) or not x.is_packed:
        return NotImplemented
    sizes = func(torch.empty(x.deferred.shape, dtype=x.dtype, device="meta"), *args[1:], **kwargs)
    features = x.packed.shape[1:]
    if sizes.dtype is not x.dtype or sizes.shape[-len(features) :] != features or not sizes.numel():
        return NotImplemented
    shape = sizes.shape[: sizes.dim() - len(features)]
    if math.prod(shape) != x.token_of.numel():
        return NotImplemented
    if func in (Tensor.view, Tensor.view_as):
        x.places.view(shape)  # fails where the function would
    return _taken(x, lambda y: y.reshape(shape))


@by_law([Tensor.contiguous])
def _contiguous(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    x = args[0]
    if len(args) > 1 or kwargs or not x.is_packed:
        return NotImplemented
    if x.places.is_contiguous() and x.packed.is_contiguous():
        return x
    return _taken(x, torch.clone, None if x.packed.is_contiguous() else x.packed.contiguous())


_ALONG = {
    "split": (2, 0),
    "chunk": (2, 0),
    "tensor_split": (2, 0),
    "unbind": (1, 0),
    "select": (1, None),
    "narrow": (1, None),
}
"""Functions that cut along a dimension: its place among the arguments, and its default."""


def _law_of_cut(place: int, default: int | None) -> Callable[..., Any]:
    def cut(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Positions along a dimension of positions."""
        x, *others = args or (None,)
        if not isinstance(x, PackedRows) or not x.is_packed:
            return NotImplemented
        dim = args[place] if len(args) > place else kwargs.get("dim", default)
        if not isinstance(dim, int) or not -len(x.deferred.shape) <= dim < len(x.deferred.shape):
            return NotImplemented
        dim %= len(x.deferred.shape)
        if dim >= x.token_of.dim():
            return NotImplemented
        if len(args) > place:
            others[place - 1] = dim
        else:
            kwargs = {**kwargs, "dim": dim}
        found = func(x.token_of, *others, **kwargs)
        if isinstance(found, Tensor):
            return _taken(x, lambda y: func(y, *others, **kwargs))
        parts = zip(found, func(x.places, *others, **kwargs), strict=True)
        return tuple(packed_rows(x.held, token_of, (x.family, places)) for token_of, places in parts)

    return cut


for _name, (_place, _default) in _ALONG.items():
    by_law(named(_name))(_law_of_cut(_place, _default))


# In place -----------------------------------------------------------------------------------------------------------

_IN_PLACE = ("add", "sub", "mul", "div", "neg", "exp", "tanh", "clamp", "pow")
_OPERATORS = {f"__i{name}__": f"__{name}__" for name in ("add", "sub", "mul", "truediv")}
_FUNCTIONAL = {
    getattr(Tensor, changing): getattr(Tensor, name)
    for changing, name in {**{f"{name}_": name for name in _IN_PLACE}, **_OPERATORS}.items()
}


@by_law(_FUNCTIONAL)
def _change(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Change the packed value of all tensors that share the memory.

    Tensors with other positions keep the old value next to it.
    """
    x, *others = args
    if not isinstance(x, PackedRows) or rows_among(others, kwargs) or not x.is_packed:
        return NotImplemented
    if any(isinstance(item, Tensor) and item.dim() > x.packed.dim() - 1 for item in (*others, *kwargs.values())):
        return NotImplemented
    relatives = x.family.others(x)
    if not all(_follows(other, x) for other in relatives):
        return NotImplemented
    fresh = Held(_FUNCTIONAL[func](x.packed, *others, **kwargs))
    if fresh.packed.dtype is not x.dtype:
        return NotImplemented
    changed = [(other, *_partly(other, x, fresh)) for other in relatives]
    for other, held, token_of in (*changed, (x, fresh, x.token_of)):
        other.become(packed_rows(held, token_of))
    return x


def _partly(other: PackedRows, x: PackedRows, fresh: Held) -> tuple[Held, Tensor]:
    """Return a tensor's value after a change of another one in the same memory."""
    hit = torch.isin(other.places.contiguous(), x.places.contiguous())  # it fails for some slices
    if bool(hit.all()):
        return fresh if other.packed.requires_grad else fresh.detached(), other.token_of
    both = torch.cat([other.packed, fresh.packed if other.packed.requires_grad else fresh.packed.detach()])
    return Held(both), torch.where(hit, other.token_of + len(x.packed), other.token_of)


def _follows(other: PackedRows, x: PackedRows) -> bool:
    """Return whether a change of one tensor applies to the other, in history too.

    Detached tensors change values alone.
    """
    history = x.packed.requires_grad or not other.packed.requires_grad
    return history and other.is_packed and other.held.origin is x.held.origin
