"""Prove that a batch of fewer columns sees a corner of a constant.

Elements are the same, only fewer.

A proof from a table of many columns holds for fewer only if no element depends on their number. So a number of columns
may set the extent of a value (the end of an ``arange``, the sizes of an ``expand``), and never its elements or its
beginning: not in ``arange(T).flip(0)``, ``T - 1 - i`` or ``i / T``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import SymInt, Tensor, fx
from torch.utils._pytree import tree_leaves

from treefx.passes.labels.facts import shape_of
from treefx.passes.labels.purity import read_operands

__all__ = ["first_dependent", "is_corner"]

aten = torch.ops.aten
_SAME_PLACE = {
    aten.permute.default, aten.transpose.int, aten.t.default, aten.unsqueeze.default, aten.squeeze.dim,
    aten.squeeze.dims, aten.squeeze.default, aten.clone.default, aten.alias.default, aten.detach.default,
    aten.lift_fresh_copy.default, aten._to_copy.default, aten.tril.default, aten.triu.default, aten.cumsum.default,
    aten.embedding.default, aten.gather.default, aten.where.self, aten.where.ScalarSelf,
    aten.where.ScalarOther, aten.where.Scalar, aten.floor_divide.default, aten.remainder.Tensor, aten.remainder.Scalar,
}  # fmt: skip
"""They move or combine elements by rules that hold no size."""
_EXTENTS = {
    aten.expand.default: (1,), aten.arange.default: (0,), aten.arange.start: (1,), aten.arange.start_step: (1,),
    aten.full.default: (0,), aten.zeros.default: (0,), aten.ones.default: (0,), aten.new_full.default: (1,),
    aten.new_zeros.default: (1,), aten.new_ones.default: (1,), aten.full_like.default: (), aten.zeros_like.default: (),
    aten.ones_like.default: (),
}  # fmt: skip
"""Where these take how far their result extends; nothing else of them may be a size."""


def is_corner(node: fx.Node) -> bool:
    """Whether an invariant value for fewer columns is a corner of that for more."""
    return first_dependent(node) is None


def first_dependent(node: fx.Node) -> fx.Node | None:
    """Find the first operator that makes elements of an invariant depend on the column count."""
    seen, stack, found = {node}, [node], None
    while stack:
        item = stack.pop()
        if _has_sizes(item) and not _keeps_corners(item):
            found = item
        stack += [source for source in read_operands(item) if source not in seen]
        seen.update(stack)
    return found


def _has_sizes(node: fx.Node) -> bool:
    """Whether a size that may change takes part in an operator."""
    shapes = [shape_of(item) for item in [node, *node.all_input_nodes] if isinstance(item.meta.get("val"), Tensor)]
    return node.op == "call_function" and any(
        isinstance(item, SymInt) for item in [*tree_leaves((node.args, node.kwargs)), *tree_leaves(shapes)]
    )


def _keeps_corners(node: fx.Node) -> bool:
    rule = _RULES.get(node.target)
    if rule is not None:
        return rule(node)
    target: Any = node.target
    extents = _EXTENTS.get(target)
    rest = [item for i, item in enumerate(node.args) if extents is None or i not in extents]
    if any(isinstance(item, SymInt) for item in tree_leaves((rest, dict(node.kwargs)))):
        return False
    pointwise = torch.Tag.pointwise in getattr(node.target, "tags", ())
    return extents is not None or pointwise or node.target in _SAME_PLACE


def _begins_in_front(node: fx.Node) -> bool:
    start = node.args[2] if len(node.args) > 2 else None
    step = node.args[4] if len(node.args) > 4 else 1
    return (start is None or (isinstance(start, int) and start >= 0)) and isinstance(step, int)


def _selects_from_the_front(node: fx.Node) -> bool:
    return isinstance(node.args[2], int) and node.args[2] >= 0


def _counts_from_the_front(node: fx.Node) -> bool:
    """An index below zero counts from the end, which must then be where it is in every batch."""
    source: Any = node.args[0]
    return not any(isinstance(size, SymInt) for size in shape_of(source))


def _keeps_dimensions(node: fx.Node) -> bool:
    """Return whether a view regroups only dimensions between those of changing size."""
    source: Any = node.args[0]
    return _between_symbols(shape_of(source)) == _between_symbols(shape_of(node))


def _between_symbols(shape: torch.Size) -> list[Any]:
    """Return the changing sizes in order, with the numbers of elements around them."""
    found: list[Any] = [1]
    for size in shape:
        if isinstance(size, SymInt):
            found += [str(size), 1]
        else:
            found[-1] *= size
    return found


def _repeats_no_columns(node: fx.Node) -> bool:
    """Repeats along dimensions of sizes that are the same in every batch."""
    source, repeats = node.args[:2]
    sizes = [1] * (len(repeats) - len(shape_of(source))) + list(shape_of(source))  # type: ignore[arg-type]
    pairs = zip(sizes, repeats, strict=True)  # type: ignore[arg-type]
    return all(isinstance(count, int) and (count == 1 or not isinstance(size, SymInt)) for size, count in pairs)


_RULES: dict[Any, Callable[[fx.Node], bool]] = {
    aten.index.Tensor: _counts_from_the_front, aten.slice.Tensor: _begins_in_front,
    aten.select.int: _selects_from_the_front, aten.view.default: _keeps_dimensions,
    aten.reshape.default: _keeps_dimensions, aten._unsafe_view.default: _keeps_dimensions,
    aten.repeat.default: _repeats_no_columns,
}  # fmt: skip
