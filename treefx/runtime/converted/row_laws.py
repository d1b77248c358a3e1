"""Define functions of packed rows that run once per distinct token.

=====================  ==============================================================================================
functions              law
=====================  ==============================================================================================
linear, matmul         each token by itself, of the tokens that are left after slicing
pointwise, casts       the same, with numbers, vectors of features and rows of the same tokens
softmax, sum, argmax   the same, along the last dimension; numbers per token are expanded to rows
gather, cross entropy  entries of packed values, picked by pairs of token and index of each row
=====================  ==============================================================================================

A law is exact if the function computes each position from the same position alone: then a function of packed values,
expanded, is the function of expanded values, and so are the gradients, which are sums over rows.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map_only

from treefx.kernels.expand import expand, pick
from treefx.runtime.converted.packed_rows import Held, PackedRows, by_law, packed_rows, rows_among, version

__all__ = ["named", "picked"]


def named(*names: str) -> list[Any]:
    """Functions and methods of these names."""
    owners = (torch, Tensor, F, torch.special)
    return list({getattr(owner, name) for owner in owners for name in names if hasattr(owner, name)})


def _all_packed(*given: Any) -> bool:
    return all(x.is_packed for x in rows_among(given))


# Token by token -----------------------------------------------------------------------------------------------------


def _compacted(x: PackedRows) -> tuple[Tensor, Tensor]:
    """The packed value and places of those tokens that rows still have."""
    kept, token_of = torch.unique(x.token_of, return_inverse=True)
    if len(kept) == len(x.packed):
        return x.packed, x.token_of
    return x.packed.index_select(0, kept), token_of


def _by_token(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Call a function with packed values in place of rows; the result on rows."""
    first, *others = rows_among(args, kwargs)
    if not _all_packed(first, others) or any(not _same_tokens(first, x) for x in others):
        return NotImplemented
    for x in (first, *others):
        x.family.used |= x.packed.requires_grad
    packed, token_of = _called(func, args, kwargs)
    return _on_rows(packed, token_of, first.family.count)


def _called(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, Tensor]:
    """Return a function's result for packed values, and the places of tokens in it."""
    first = rows_among(args, kwargs)[0]
    if first.token_of.numel() >= len(first.packed):
        return _with(func, args, kwargs, lambda x: x.packed), first.token_of
    found = _for_all(func, args, kwargs)
    if found is not None:
        return found, first.token_of
    return _with(func, args, kwargs, lambda x: _compacted(x)[0]), _compacted(first)[1]


def _with(func: Any, args: Sequence[Any], kwargs: dict[str, Any], take: Callable[[PackedRows], Any]) -> Any:
    return func(*tree_map_only(PackedRows, take, args), **tree_map_only(PackedRows, take, kwargs))


def _same_tokens(x: PackedRows, y: PackedRows) -> bool:
    if x.token_of is y.token_of:
        return len(x.packed) == len(y.packed)
    return len(x.packed) == len(y.packed) and torch.equal(x.token_of, y.token_of)


def _for_all(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The packed result of all tokens, for rows that are read a few at a time.

    A loop over rows meets a shared token once per row. Its result is kept with the packed value, unless no gradient is
    recorded: then the caller's loop keeps nothing either, on purpose. References are weak: a result must not keep its
        keeper alive.
    """
    held = [x.held for x in rows_among(args, kwargs)]
    keeps = torch.is_grad_enabled() and any(x.packed.requires_grad for x in held)
    if not keeps or torch._C._autograd._top_saved_tensors_default_hooks(False) is not None:
        return None
    kind = held[0].packed.device.type
    given, shape = tree_flatten((tuple(args), kwargs))
    state = (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
    key = (func, state, shape, *map(_key, given))
    try:
        known = held[0].known.get(key)
    except TypeError:  # an argument without a hash
        return None
    if known is None:
        known = tree_map_only(Tensor, Held, _with(func, args, kwargs, lambda x: x.packed))
        held[0].known[key] = known
    return known


def _key(item: Any) -> Any:
    """Return a key of an argument that changes with its value; 0.0 is not -0.0."""
    if isinstance(item, PackedRows):
        return weakref.ref(item.held)
    return (item, version(item)) if isinstance(item, Tensor) else (type(item), str(item), item)


def _on_rows(found: Any, token_of: Tensor, count: Any = None) -> Any:
    """Results [N, ...] on rows: numbers expanded, features packed."""
    if isinstance(found, tuple):  # of torch.return_types, which take a list
        return type(found)([_on_rows(x, token_of) for x in found])
    packed = found.packed if isinstance(found, Held) else found
    token_of = token_of.to(packed.device)
    return expand(packed, token_of) if math.prod(packed.shape[1:]) == 1 else packed_rows(found, token_of, count=count)


@by_law([F.linear, *named("matmul", "mm"), Tensor.__matmul__])
def _product(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """With a matrix: the LM head."""
    x, weight = [*args, kwargs.get("input"), kwargs.get("weight", kwargs.get("other"))][:2]
    if not (isinstance(x, PackedRows) and _all_packed(x)) or len(rows_among(args, kwargs)) != 1:
        return NotImplemented
    if not isinstance(weight, Tensor) or weight.dim() != 2 or x.packed.dim() != 2:
        return NotImplemented
    packed, token_of = _compacted(x)
    x.family.used |= packed.requires_grad
    x.family.note(weight, len(packed))
    return _on_rows(_with(func, args, kwargs, lambda _: packed), token_of)


_POINTWISE = (
    "add", "sub", "subtract", "rsub", "mul", "multiply", "div", "divide", "true_divide", "neg", "negative", "pow",
    "exp", "expm1", "log", "log1p", "log2", "xlogy", "square", "sqrt", "rsqrt", "reciprocal", "abs",
    "maximum", "minimum",
    "tanh", "sigmoid", "relu", "silu", "gelu", "softplus", "logsigmoid", "clamp", "clip", "clamp_min", "clamp_max",
    "clone", "nan_to_num", "isnan", "isinf", "isfinite", "logical_not", "eq", "ne", "lt", "le", "gt", "ge",
    "__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__", "__truediv__", "__rtruediv__", "__neg__",
    "__pow__", "__rpow__",
)  # fmt: skip


@by_law(named(*_POINTWISE))
def _pointwise(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Apply pointwise functions with numbers, or with tensors without positions.

    The latter have at most a token's dimensions.
    """
    rows = rows_among(args, kwargs)
    features = rows[0].packed.dim() - 1
    plain = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor) and not isinstance(x, PackedRows)]
    if any(item is True for item in (*args[1:], *kwargs.values())):  # inplace
        return NotImplemented
    if any(x.dim() > features for x in plain) or any(x.packed.dim() - 1 != features for x in rows):
        return NotImplemented
    return _by_token(func, args, kwargs)


@by_law(named("to", "float", "half", "bfloat16", "double", "type", "cpu", "cuda"))
def _cast(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """To another type or device; the tensor itself if it has that already, as casts do it."""
    x, *others = args
    if not isinstance(x, PackedRows) or rows_among(others, kwargs) or not x.is_packed:
        return NotImplemented
    empty = x.packed.detach()[:0]
    found = func(empty, *others, **kwargs)
    if not isinstance(found, Tensor):  # the name of a type
        return found
    return x if found is empty else _by_token(func, args, kwargs)


_LAST = {
    "softmax": 1, "log_softmax": 1, "logsumexp": 1, "sum": 1, "mean": 1, "argmax": 1, "argmin": 1, "amax": 1, "amin": 1,
    "max": 1, "min": 1, "topk": 2,
}  # fmt: skip
"""Functions of the last dimension, and where that stands among their arguments."""


def _law_of_last(place: int) -> Callable[..., Any]:
    def along_last(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Along the last dimension, each token by itself."""
        args = list(args)
        default = -1 if place == 2 and len(args) <= 2 and "dim" not in kwargs else None
        dim = args[place] if len(args) > place else kwargs.get("dim", default)
        dim = dim[0] if isinstance(dim, list | tuple) and len(dim) == 1 else dim
        x = rows_among(args, kwargs)[0]
        if not isinstance(dim, int) or dim not in (-1, len(x.deferred.shape) - 1) or x.packed.dim() != 2:
            return NotImplemented
        if len(args) > place:
            args[place] = -1
        else:
            kwargs = {**kwargs, "dim": -1}
        return _by_token(func, args, kwargs)

    return along_last


for _name, _place in _LAST.items():
    by_law(named(_name))(_law_of_last(_place))


# Numbers of rows ----------------------------------------------------------------------------------------------------


def picked(x: PackedRows, token_of: Tensor, index: Tensor) -> Any:
    """Pick entries of packed values [N, V] by pairs of token and index.

    An index outside gets the function's own result.
    """
    if bool(((index < 0) | (index >= x.packed.shape[1])).any()):
        return NotImplemented
    x.family.used |= x.packed.requires_grad
    found: Tensor = pick(x.packed, token_of.reshape(-1), index.reshape(-1).to(token_of.device))
    return found.view(index.shape)


@by_law(named("gather", "take_along_dim"))
def _gather(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Gather along the last dimension: log-probabilities of labels, which differ by row."""
    names = ("dim", "index") if "gather" in func.__name__ else ("indices", "dim")
    given = {**dict(zip(("input", *names), args, strict=False)), **kwargs}
    x, dim, index = given.get("input"), given.get("dim"), given.get("index", given.get("indices"))
    if not isinstance(x, PackedRows) or not isinstance(index, Tensor) or isinstance(index, PackedRows):
        return NotImplemented
    last = dim in (-1, len(x.deferred.shape) - 1) and x.packed.dim() == 2
    if not last or not x.is_packed or index.shape[:-1] != x.token_of.shape or index.dtype is not torch.int64:
        return NotImplemented
    return picked(x, x.token_of[..., None].expand(index.shape), index)


@by_law([F.cross_entropy, F.nll_loss])
def _nll(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Compute the loss of labels of rows from log-probabilities on distinct tokens.

    One entry per row, reduced as by the function.
    """
    names = ("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing")
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    x, target, ignored = given["input"], given["target"], given.get("ignore_index", -100)
    if not isinstance(x, PackedRows) or isinstance(target, PackedRows) or not x.is_packed or x.packed.dim() != 2:
        return NotImplemented
    asks_more = any(given.get(name) is not None for name in ("weight", "size_average", "reduce"))
    if asks_more or given.get("label_smoothing") or x.token_of.dim() != 1 or target.dtype is not torch.int64:
        return NotImplemented
    if target.shape != x.token_of.shape or target.device != x.token_of.device:
        return NotImplemented
    scored = target != ignored
    logp: Any = F.log_softmax(x, -1) if func is F.cross_entropy else x
    found = picked(logp, logp.token_of, torch.where(scored, target, 0))
    if found is NotImplemented:
        return NotImplemented
    one = torch.where(scored, 0, -100)
    return F.nll_loss(found[:, None], one, ignore_index=-100, reduction=given.get("reduction", "mean"))
