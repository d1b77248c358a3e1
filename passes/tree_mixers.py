"""Mixers that run on the packed tokens themselves, their context taken from the tree.

A causal convolution reads its window through parents: the tap that is d tokens back reads the d-th ancestor, or zero
above the root. A token's ancestors are its row's past, whichever row that is, so each distinct token is computed once;
at a fork the gradients of all children meet in the gather's backward.

Before (4 rows of 12 tokens)::

    conv: "f32[4, 64, 14]" = convolution(x, w, b, padding=2);  y: "f32[4, 64, 12]" = slice(conv, 2, 0, 12)

After::

    up1: "i64[s0]" = parents[...];  y: "f32[s0, 64]" = w[:, 0, 2] * x + w[:, 0, 1] * x[up1] + w[:, 0, 0] * x[up2] + b
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from treefx.kernels.tree_conv import tree_conv1d
from treefx.passes.facts import Axis, Kind, fact_of, shape_of

__all__ = ["TreeConvolution", "convolve", "find_tree_convolution"]

aten = torch.ops.aten


@dataclass(frozen=True)
class TreeConvolution:
    """A causal convolution of packed tokens; tap i reads the ancestor ``distances[i]`` above, 0 being the token."""

    source: fx.Node
    weight: fx.Node
    bias: fx.Node | None
    distances: tuple[int, ...]
    groups: int


def find_tree_convolution(node: fx.Node) -> TreeConvolution | None:
    """The convolution that a value [B, C, T], proved causal, is the beginning of; None where it is not one."""
    call, start = _beginning(node)
    if call.target is not aten.convolution.default or fact_of(node).kind is not Kind.ROW:
        return None
    x, weight, bias, stride, padding, dilation, transposed, _, groups = call.args
    source, left = _unpadded(x)
    if transposed or list(stride) != [1] or not _is_channels_by_tokens(source):  # type: ignore[arg-type]
        return None
    assert isinstance(weight, fx.Node) and isinstance(groups, int) and (bias is None or isinstance(bias, fx.Node))
    if any(fact_of(item).kind is not Kind.INVARIANT for item in (weight, bias) if item is not None):
        return None
    behind, gap = int(padding[0]) + left - start, int(dilation[0])  # type: ignore[arg-type, index]
    distances = tuple(behind - tap * gap for tap in range(shape_of(weight)[2]))
    return TreeConvolution(source, weight, bias, distances, groups) if distances[-1] >= 0 else None


def _beginning(node: fx.Node) -> tuple[fx.Node, int]:
    """What a slice along the last dimension cuts, and where it starts."""
    source = node.args[0] if node.args else None
    if node.target is not aten.slice.Tensor or not isinstance(source, fx.Node):
        return node, 0
    dim, start = (node.args[i] if len(node.args) > i else 0 for i in (1, 2))
    step = node.args[4] if len(node.args) > 4 else 1
    rank = len(shape_of(source))
    if not isinstance(dim, int) or dim % rank != rank - 1 or step != 1:
        return node, 0
    assert start is None or isinstance(start, int)
    first = start or 0
    return source, first if first >= 0 else max(0, first + shape_of(source)[-1])


def _unpadded(x: Any) -> tuple[fx.Node, int]:
    """A value without the zeros that were put before its last dimension, and how many there were."""
    pad: Any = x.args[1] if x.target is aten.constant_pad_nd.default else None
    zero = pad is not None and (len(x.args) < 3 or x.args[2] == 0)
    if not zero or len(pad) != 2 or min(pad) < 0:
        return x, 0
    return x.args[0], int(pad[0])


def _is_channels_by_tokens(node: fx.Node) -> bool:
    """Whether a value is packed as [B, C, T]."""
    fact = fact_of(node)
    if fact.kind is not Kind.PACKED or fact.dims is None or len(fact.dims) != 3:
        return False
    axes = [[factor.axis for factor in dim] for dim in fact.dims]
    return axes[0] == [Axis.ROW] and axes[2] == [Axis.TOKEN] and set(axes[1]) <= {Axis.PLAIN}


def convolve(law: TreeConvolution, x: Tensor, weight: Tensor, bias: Tensor | None, parent: Tensor) -> Tensor:
    """The convolution of packed tokens x [1, C, N] as [1, C', N]; ``parent`` [N] is -1 at roots."""
    out = tree_conv1d(x.squeeze(0).t(), weight, bias, parent, distances=law.distances, groups=law.groups)
    return out.t().unsqueeze(0)
