"""Exact dependence of small per-row values: which row each element reads, and up to which column.

Laws cover operators that treat positions alike. Position bookkeeping often does not (``diff``, ``pad``, shifts), yet
it may still be causal: element (b, t) reads row b up to column t, and so is determined by the prefix. That is decided
here element by element, without sampling: movement operators are run on tables of rows and columns, pointwise
operators take the maximum, running sums the running maximum. Anything else is unknown.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, fx

from treefx.passes.facts import Axis, Dims, Factor, Kind, fact_of
from treefx.passes.uniformity import is_uniform

__all__ = ["Dependence", "depend", "prefix_dims"]

aten = torch.ops.aten
_MOVEMENT = {
    aten.slice.Tensor, aten.cat.default, aten.view.default, aten.unsqueeze.default, aten.squeeze.dim,
    aten.expand.default, aten.clone.default, aten.alias.default, aten.select.int, aten.permute.default,
    aten.transpose.int, aten.roll.default, aten.flip.default, aten.detach.default,
}  # fmt: skip
_LARGEST = 4
"""Values of more than this many entries per position are not followed: they are masks, which are lifted instead."""


@dataclass(frozen=True)
class Dependence:
    """For each element the row it reads (-1: none) and one more than the last column it reads (0: none), as int64."""

    row: Tensor
    column: Tensor


def _of_labels(dims: Dims) -> Dependence:
    """The dependence of a labelled prefix-determined value."""
    factors = [factor for dim in dims for factor in dim]
    shape = [factor.size for factor in factors]
    row, column = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.int64)
    for position, factor in enumerate(factors):
        index = torch.arange(factor.size).reshape([-1] + [1] * (len(shape) - position - 1))
        if factor.axis is Axis.ROW:
            row = row + index
        if factor.axis is Axis.TOKEN:
            column = column + index + 1
    sizes = [int(torch.tensor([1] + [f.size for f in dim]).prod()) for dim in dims]
    return Dependence(row.reshape(sizes), column.reshape(sizes))


def depend(node: fx.Node, known: dict[fx.Node, Dependence], positions: int) -> Dependence | None:
    """The dependence of a node's single result, or None where it is unknown or too large to follow."""
    value = node.meta.get("val")
    if not isinstance(value, Tensor) or value.numel() > _LARGEST * positions:
        return None
    operands = {source: _operand(source, known, positions) for source in node.all_input_nodes}
    if any(found is None for found in operands.values()):
        return None
    tables = {source: found for source, found in operands.items() if found is not None}
    if node.target in _MOVEMENT:
        return Dependence(
            _move(node, {n: d.row for n, d in tables.items()}),
            _move(node, {n: d.column for n, d in tables.items()}),
        )
    if node.target is aten.cumsum.default:
        (source,) = tables.values()
        dim = int(node.args[1])  # type: ignore[arg-type]
        return Dependence(source.row.cummax(dim).values, source.column.cummax(dim).values)
    if torch.Tag.pointwise in getattr(node.target, "tags", ()) or node.target is aten._to_copy.default:
        return _pointwise(value, tables)
    return None


def _operand(node: fx.Node, known: dict[fx.Node, Dependence], positions: int) -> Dependence | None:
    if node in known:
        return known[node]
    fact, value = fact_of(node), node.meta.get("val")
    if not isinstance(value, Tensor) or value.numel() > _LARGEST * positions:
        return None
    if fact.kind is Kind.INVARIANT:
        varies = any(size > 1 and not is_uniform(node, d) for d, size in enumerate(value.shape[:-1]))
        shape = tuple(value.shape)
        return None if varies else Dependence(torch.full(shape, -1), torch.zeros(shape, dtype=torch.int64))
    return _of_labels(fact.dims) if fact.kind is Kind.PREFIX and fact.dims is not None else None


def _move(node: fx.Node, tables: dict[fx.Node, Tensor]) -> Tensor:
    args = fx.node.map_arg(node.args, tables.__getitem__)
    result: Tensor = node.target(*args)  # type: ignore[operator]
    return result


def _pointwise(value: Tensor, tables: dict[fx.Node, Dependence]) -> Dependence | None:
    shape = tuple(value.shape)
    rows = [found.row.expand(shape) for found in tables.values()]
    row = torch.stack(rows).amax(0)
    if any(bool(((other != row) & (other >= 0)).any()) for other in rows):
        return None  # two rows meet in one element
    return Dependence(row, torch.stack([found.column.expand(shape) for found in tables.values()]).amax(0))


def prefix_dims(found: Dependence, rows: int, columns: int) -> Dims | None:
    """Labels for a ``[B, T]`` value each of whose elements is proved to read its own row up to its own column."""
    if tuple(found.row.shape) != (rows, columns):
        return None
    own_row = (found.row == torch.arange(rows)[:, None]) | (found.row < 0)
    past = found.column <= torch.arange(1, columns + 1)
    if not bool((own_row & past).all()):
        return None
    return ((Factor(Axis.ROW, rows),), (Factor(Axis.TOKEN, columns),))
