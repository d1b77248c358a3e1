"""Write ``flex_attention`` as products and a softmax, like any other attention.

The operator's own kernel is opaque. Its two functions, of the score and of the mask, are functions of single numbers;
called on aranges that broadcast against each other they become the ordinary subgraphs that ``lift_mask`` reads. Block
lists only say which tiles the mask leaves empty, so they are not needed.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

__all__ = ["flex_attention"]


def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: fx.GraphModule,
    block_mask: tuple[Any, ...],
    scale: float,
    kernel_options: dict[str, Any],
    score_buffers: tuple[Any, ...] = (),
    mask_buffers: tuple[Any, ...] = (),
) -> tuple[Tensor, Tensor, Tensor]:
    """Map the operator's arguments to output, log-sum-exp and maximum.

    Output [B, H, T, Dv], the others [B, H, T] in powers of two.

    Shapes: query [B, H, T, D], key [B or 1, Hkv, S, D], value [B or 1, Hkv, S, Dv]. Where a function does more with a
    buffer than reading single elements, the operator is called unchanged.
    """
    groups = query.shape[1] // key.shape[1]
    keys, values = (_repeated(x, groups, query.shape[0]) for x in (key, value))
    precision = torch.float64 if query.dtype is torch.float64 else torch.float32
    products = (query.to(precision) @ keys.to(precision).transpose(-2, -1)) * scale
    places = [
        torch.arange(size, device=query.device).reshape([-1 if d == dim else 1 for d in range(4)])
        for dim, size in enumerate(products.shape)
    ]
    try:
        seen = _Elementwise(block_mask[-1]).run(*places, *map(_whole, mask_buffers))
        scores = _Elementwise(score_mod).run(products, *places, *map(_whole, score_buffers))
    except _NotElementwiseError:
        arguments = (query, key, value, score_mod, block_mask, scale, kernel_options, score_buffers, mask_buffers)
        kept: tuple[Tensor, Tensor, Tensor] = torch.ops.higher_order.flex_attention(*arguments)
        return kept
    scores = torch.where(seen, scores.to(precision), -torch.inf)
    out = torch._safe_softmax(scores, -1).to(query.dtype) @ values
    return out, torch.logsumexp(scores, -1) / math.log(2), scores.amax(-1) / math.log(2)


def _repeated(x: Tensor, groups: int, rows: int) -> Tensor:
    """Keys or values with a head for every query head, and for every row."""
    heads, *rest = x.shape[1:]
    return x[:, :, None].expand(rows, heads, groups, *rest).reshape(rows, heads * groups, *rest)


class _NotElementwiseError(Exception):
    """A function reads more of a buffer than single elements."""


@dataclass(frozen=True)
class _Buffer:
    """A buffer of which the first dimensions have been indexed."""

    tensor: Tensor
    indices: tuple[Any, ...] = ()


def _whole(item: Any) -> Any:
    return _Buffer(item) if isinstance(item, Tensor) and item.dim() else item


class _Elementwise(fx.Interpreter):
    """Run a scalar function on broadcast tensors; every scalar operator is pointwise."""

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target is operator.getitem and isinstance(args[0], _Buffer):
            return _indexed(args[0], args[1] if isinstance(args[1], tuple) else (args[1],))
        self._check(args, kwargs)
        return super().call_function(target, args, kwargs)

    def call_method(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._check(args, kwargs)
        return super().call_method(target, args, kwargs)

    def call_module(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        raise _NotElementwiseError

    def _check(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if any(isinstance(item, _Buffer) for item in (*args, *kwargs.values())):
            raise _NotElementwiseError


def _indexed(buffer: _Buffer, indices: tuple[Any, ...]) -> Any:
    """An element, or a buffer with more of its dimensions indexed."""
    if any(not isinstance(index, Tensor | int) for index in indices):
        raise _NotElementwiseError
    indices = buffer.indices + indices
    if len(indices) < buffer.tensor.dim():
        return _Buffer(buffer.tensor, indices)
    tensors = [index if isinstance(index, Tensor) else torch.tensor(index) for index in indices]
    return torch.ops.aten.index.Tensor(buffer.tensor, tensors)
