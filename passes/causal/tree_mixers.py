"""Mixers that run on the packed tokens themselves, their context taken from the tree.

A causal convolution reads its window through parents: the tap that is d tokens back reads the d-th ancestor, or zero
above the root. A token's ancestors are the past of any of its rows, so each distinct token is computed once;
at a fork the gradients of all children meet in the gather's backward.

Before (4 rows of 12 tokens)::

    conv: "f32[4, 64, 14]" = convolution(x, w, b, padding=2);  y: "f32[4, 64, 12]" = slice(conv, 2, 0, 12)

After::

    up1: "i64[s0]" = parents[...];  y: "f32[s0, 64]" = w[:, 0, 2] * x + w[:, 0, 1] * x[up1] + w[:, 0, 0] * x[up2] + b

A linear recurrence (``TreeScan``, found by ``tree_scans``) takes its state from the parent: ``treefx::tree_scan``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from treefx.kernels.recurrence.tree_conv import tree_conv1d
from treefx.kernels.recurrence.tree_scan import tree_scan
from treefx.passes.labels.facts import Axis, Dims, Kind, ReadsOthers, fact_of, shape_of

__all__ = [
    "LibraryTree", "Operand", "TreeConvolution", "TreeScan", "Vanishing", "convolve", "find_tree_convolution",
    "has_channels_by_tokens", "scan",
]  # fmt: skip

aten = torch.ops.aten


@dataclass(frozen=True)
class TreeConvolution(ReadsOthers):
    """Hold a causal convolution of packed tokens.

    Tap i reads the ancestor ``distances[i]`` above, 0 being the token.
    """

    source: fx.Node
    weight: fx.Node
    bias: fx.Node | None
    distances: tuple[int, ...]
    groups: int

    def reads(self) -> list[fx.Node]:
        """The convolved value and its filter."""
        return [self.source, self.weight, *([self.bias] if self.bias is not None else [])]


@dataclass(frozen=True)
class Operand:
    """A packed value that a recurrence reads as [N, groups, features].

    Neighbouring heads share a group where the value was ``repeats`` times repeated for them.
    """

    source: fx.Node
    groups: int
    features: int
    repeats: int = 1


@dataclass(frozen=True)
class TreeScan(ReadsOthers):
    """Hold a linear recurrence of packed tokens (``tree_scan``), per token::

        factor * tree_scan(q, k, v, g, w) + skip_factor * weight * skip

    With ``step`` [heads] instead of ``w``, v and k are multiplied by it, the latter being w. ``decays`` is a g with the
    features of the keys.
    """

    roles: Mapping[str, Operand]
    """Of "q", "k", "v" and, where there are, "g" or "decays", "w", "step" and "skip"."""
    heads: int
    features: int
    dtype: torch.dtype
    """The dtype of the model's computation, at least float32."""
    factor: float = 1.0
    weight: fx.Node | None = None
    skip_factor: float = 0.0
    region: tuple[fx.Node, ...] = field(default=(), compare=False, repr=False)
    """The nodes that computed it on rows."""

    @property
    def operands(self) -> tuple[fx.Node, ...]:
        """The nodes that it reads."""
        found = dict.fromkeys(operand.source for operand in self.roles.values())
        return (*found, *([] if self.weight is None else [self.weight]))

    def reads(self) -> list[fx.Node]:
        """Its operands: not the region that computed it on rows."""
        return list(self.operands)


@dataclass(frozen=True)
class LibraryTree(ReadsOthers):
    """Run a recurrence of packed tokens by a library's kernel: ``treefx::library_tree``."""

    tensors: tuple[fx.Node, ...]
    key: str

    def reads(self) -> list[fx.Node]:
        """The tensors of the call."""
        return list(self.tensors)


@dataclass(frozen=True)
class Vanishing(ReadsOthers):
    """Mark a contracted value that is always zero, as a first chunk's earlier state."""

    def reads(self) -> list[fx.Node]:
        """Nothing."""
        return []


def find_tree_convolution(node: fx.Node) -> TreeConvolution | None:
    """Find the convolution that starts a causal value [B, C, T]; None if it is none."""
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
    """Return the source and the start of a slice along the last dimension."""
    source = node.args[0] if node.args else None
    if node.target is not aten.slice.Tensor or not isinstance(source, fx.Node):
        return node, 0
    dim, start = (node.args[i] if len(node.args) > i else 0 for i in (1, 2))
    step = node.args[4] if len(node.args) > 4 else 1
    rank = len(shape_of(source))
    first, size = start or 0, shape_of(source)[-1]
    if not isinstance(dim, int) or dim % rank != rank - 1 or step != 1 or not isinstance(first, int):
        return node, 0
    if first < 0 and not isinstance(size, int):  # counted from an end that moves
        return node, 0
    return source, first if first >= 0 else max(0, first + size)


def _unpadded(x: Any) -> tuple[fx.Node, int]:
    """Return a value without leading zeros of its last dimension, and their number."""
    pad: Any = x.args[1] if x.target is aten.constant_pad_nd.default else None
    zero = pad is not None and (len(x.args) < 3 or x.args[2] == 0)
    if not zero or len(pad) != 2 or min(pad) < 0:
        return x, 0
    return x.args[0], int(pad[0])


def _is_channels_by_tokens(node: fx.Node) -> bool:
    """Whether a value is packed as [B, C, T]."""
    fact = fact_of(node)
    return fact.kind is Kind.PACKED and fact.dims is not None and has_channels_by_tokens(fact.dims)


def has_channels_by_tokens(dims: Dims) -> bool:
    """Return whether dimensions are [B, C, T].

    Those of a row of one token, before it is cut off, may be [B T, C, taps].
    """
    axes = [[factor.axis for factor in dim] for dim in dims]
    return len(axes) == 3 and axes[0] == [Axis.ROW] and axes[2] == [Axis.TOKEN] and set(axes[1]) <= {Axis.PLAIN}


def convolve(law: TreeConvolution, x: Tensor, weight: Tensor, bias: Tensor | None, parent: Tensor) -> Tensor:
    """Convolve packed tokens x [1, C, N] to [1, C', N]; ``parent`` [N] is -1 at roots."""
    out = tree_conv1d(x.squeeze(0).t(), weight, bias, parent, distances=law.distances, groups=law.groups)
    return out.t().unsqueeze(0)


def scan(law: TreeScan, values: Mapping[str, Tensor], weight: Tensor | None, subtree_end: Tensor) -> Tensor:
    """The recurrence of values [N, groups, features] by role, as [N, heads, features]."""
    dtype = torch.promote_types(law.dtype, values["q"].dtype)
    wide = {role: value.to(dtype) for role, value in values.items()}
    q, k, v, g, w = (wide.get(role) for role in ("q", "k", "v", "g", "w"))
    assert q is not None and k is not None and v is not None
    if "step" in wide:
        w = wide["step"] * k.repeat_interleave(law.heads // k.shape[1], 1)
        v = wide["step"] * v
    g = wide.get("decays") if g is None else g.squeeze(-1)
    out = tree_scan(q, k, v, g, w, subtree_end)
    out = out if law.factor == 1.0 else law.factor * out
    if weight is None:
        return out
    return out + law.skip_factor * weight.to(dtype).reshape(_weight_shape(law, weight.numel())) * wide["skip"]


def _weight_shape(law: TreeScan, entries: int) -> tuple[int, int]:
    """How a weight lies over [heads, features]."""
    shapes = {law.heads * law.features: (law.heads, law.features), law.features: (1, law.features)}
    return {**shapes, law.heads: (law.heads, 1), 1: (1, 1)}[entries]
