"""Prove that an invariant value does not vary along a dimension.

A model may expand an invariant tensor over the batch (``inv_freq.expand(B, -1, 1)``) and compute on. Run packed, it is
read at row 0, which is exact only if all rows are alike. The proof follows the graph; sizes prove nothing.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence

import torch
from torch import fx

__all__ = ["FILLED", "is_uniform", "is_uniform_along"]

aten = torch.ops.aten
_SAME_SHAPE = {
    aten._to_copy.default,
    aten.clone.default,
    aten.detach.default,
    aten.alias.default,
    aten.lift_fresh_copy.default,
}
_SPLITS = {aten.split_with_sizes.default, aten.split.Tensor}
FILLED = {aten.zeros.default, aten.ones.default, aten.full.default, aten.zeros_like.default, aten.ones_like.default,
           aten.full_like.default, aten.new_zeros.default, aten.new_ones.default, aten.new_full.default,
           aten.scalar_tensor.default, aten.empty.memory_format, aten.empty_like.default, aten.new_empty.default,
           aten.empty_strided.default, aten.new_empty_strided.default, aten.empty_permuted.default}  # fmt: skip
"""Uninitialised memory holds any value: it may hold the same one everywhere."""


def is_uniform(node: fx.Node, dim: int) -> bool:
    """Whether ``node`` is proved constant along ``dim`` (non-negative)."""
    shape = node.meta["val"].shape
    if shape[dim] == 1 or node.target in FILLED:
        return True
    rule = _RULES.get(node.target)
    if rule is not None:
        return rule(node, dim)
    tags = getattr(node.target, "tags", ())
    if torch.Tag.pointwise in tags or node.target in _SAME_SHAPE or node.target is aten.where.self:
        return all(_is_uniform_aligned(operand, dim - len(shape)) for operand in node.all_input_nodes)
    return False


def is_uniform_along(node: fx.Node, dim: int, sizes: Sequence[int], digit: int) -> bool:
    """Whether ``node`` is constant along one of the digits of ``dim``, which has the given sizes."""
    if len(sizes) == 1:
        return is_uniform(node, dim)
    while node.target in _SAME_SHAPE:
        node = _source(node)
    if _RULES.get(node.target) is not _view:
        return False
    shape, given = (list(item.meta["val"].shape) for item in (node, _source(node)))
    split = [*shape[:dim], *sizes, *shape[dim + 1 :]]
    return list(map(str, given)) == list(map(str, split)) and is_uniform(_source(node), dim + digit)


def _is_uniform_aligned(node: fx.Node, from_end: int) -> bool:
    rank = node.meta["val"].dim()
    return -from_end > rank or is_uniform(node, rank + from_end)


def _source(node: fx.Node) -> fx.Node:
    source = node.args[0]
    assert isinstance(source, fx.Node)
    return source


def _expand(node: fx.Node, dim: int) -> bool:
    return _is_uniform_aligned(_source(node), dim - node.meta["val"].dim())


def _unsqueeze(node: fx.Node, dim: int) -> bool:
    new = int(node.args[1]) % node.meta["val"].dim()  # type: ignore[arg-type]
    return dim == new or is_uniform(_source(node), dim - (dim > new))


def _permute(node: fx.Node, dim: int) -> bool:
    rank = node.meta["val"].dim()
    labels = torch.empty([2 + i for i in range(rank)], device="meta")
    moved = node.target(labels, *node.args[1:])  # type: ignore[operator]
    return is_uniform(_source(node), moved.shape[dim] - 2)


def _view(node: fx.Node, dim: int) -> bool:
    """Return whether a leading dimension passes a view unchanged.

    Products of matrices are wrapped in such views.
    """
    source = _source(node)
    seen, given = ([str(size) for size in item.meta["val"].shape[: dim + 1]] for item in (node, source))
    return seen == given and is_uniform(source, dim)


def _slice(node: fx.Node, dim: int) -> bool:
    return is_uniform(_source(node), dim)


def _cat(node: fx.Node, dim: int) -> bool:
    along = node.args[1] if len(node.args) > 1 else 0
    pieces = node.args[0]
    assert isinstance(along, int) and isinstance(pieces, list | tuple)
    along %= node.meta["val"].dim()
    return dim != along and all(isinstance(piece, fx.Node) and is_uniform(piece, dim) for piece in pieces)


def _embedding(node: fx.Node, dim: int) -> bool:
    index = node.args[1]
    assert isinstance(index, fx.Node)
    return dim < index.meta["val"].dim() and is_uniform(index, dim)


def _bmm(node: fx.Node, dim: int) -> bool:
    left, right = node.args[:2]
    assert isinstance(left, fx.Node) and isinstance(right, fx.Node)
    if dim == 0:
        return is_uniform(left, 0) and is_uniform(right, 0)
    return is_uniform(left, 1) if dim == 1 else is_uniform(right, 2)


def _index(node: fx.Node, dim: int) -> bool:
    """Follow x[i, j, ...]: a varying index reads a dimension of x that does not vary."""
    indices = node.args[1]
    assert isinstance(indices, list | tuple)
    found = [index for index in indices if isinstance(index, fx.Node)]
    if len(found) != len(indices) or any(x.meta["val"].dtype in (torch.bool, torch.uint8) for x in found):
        return False
    rank = max(index.meta["val"].dim() for index in found)
    if dim >= rank:
        return is_uniform(_source(node), dim - rank + len(found))
    return all(_is_uniform_aligned(index, dim - rank) or is_uniform(_source(node), k) for k, index in enumerate(found))


def _pad(node: fx.Node, dim: int) -> bool:
    widths = node.args[1]
    assert isinstance(widths, list | tuple)
    before = 2 * (node.meta["val"].dim() - 1 - dim)
    return not any(widths[before : before + 2]) and is_uniform(_source(node), dim)


def _scan(node: fx.Node, dim: int) -> bool:
    along = node.args[1]
    assert isinstance(along, int)
    return dim != along % node.meta["val"].dim() and is_uniform(_source(node), dim)


def _repeat(node: fx.Node, dim: int) -> bool:
    return _is_uniform_aligned(_source(node), dim - node.meta["val"].dim())


def _select(node: fx.Node, dim: int) -> bool:
    along = int(node.args[1]) % (node.meta["val"].dim() + 1)  # type: ignore[arg-type]
    return is_uniform(_source(node), dim + (dim >= along))


def _piece(node: fx.Node, dim: int) -> bool:
    pieces = _source(node)
    return pieces.target in _SPLITS and is_uniform(_source(pieces), dim)


def _copy(node: fx.Node, dim: int) -> bool:
    """Follow a copy, which has the shape of its first argument and the values of the second."""
    source = node.args[1]
    assert isinstance(source, fx.Node)
    return _is_uniform_aligned(source, dim - node.meta["val"].dim())


def _scatter(node: fx.Node, dim: int) -> bool:
    """Follow a value written into a slice or an index: along other dimensions both must be uniform."""
    rank, part = node.meta["val"].dim(), node.args[1]
    along = int(node.args[2]) % rank if len(node.args) > 2 else 0  # type: ignore[arg-type]
    if dim == along or node.kwargs or not isinstance(part, fx.Node):
        return False
    within = dim - (part.meta["val"].dim() < rank and dim > along)
    return is_uniform(_source(node), dim) and is_uniform(part, within)


_RULES: dict[object, Callable[[fx.Node, int], bool]] = {
    aten.expand.default: _expand,
    aten.unsqueeze.default: _unsqueeze,
    aten.permute.default: _permute,
    aten.transpose.int: _permute,
    aten.view.default: _view,
    aten._unsafe_view.default: _view,
    aten.slice.Tensor: _slice,
    aten.cat.default: _cat,
    aten.embedding.default: _embedding,
    aten.bmm.default: _bmm,
    aten.index.Tensor: _index,
    aten.constant_pad_nd.default: _pad,
    aten.repeat.default: _repeat,
    aten.cumsum.default: _scan,
    aten.select.int: _select,
    operator.getitem: _piece,
    aten.copy.default: _copy,
    aten.slice_scatter.default: _scatter,
    aten.select_scatter.default: _scatter,
}
