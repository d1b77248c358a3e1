"""Prove that blocks do not use sizes of the batch, which differ on a packed row.

A block may use the sizes of its inputs to reshape them or to allocate memory: on the packed row the sizes differ, and
each token gets the same values. It may not compute with them. Three kinds of operators do:

* one that takes a size as a number: ``x / T``, ``x ** T``;
* one whose operands have an entry per column or row and whose result has not: ``ones(T).sum()``, ``arange(T).max()``,
  ``table[T - 1]``;
* one that reads, at each token, a constant with an entry per column: ``x + arange(T)``, ``x + rotations.cumsum(1)``.
  The code around the blocks may make such a constant, which ``frame`` tries out; a block may read each entry of it at
  its own column. Memory with one value at all columns (``zeros(T)``) counts nothing. A vector with an entry per
  column, such as ``cache_position``, has other entries on the packed row: blocks may get it, and not read it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import SymInt, Tensor, fx
from torch.utils._pytree import tree_leaves

from treefx.errors import UnsupportedError
from treefx.passes.analysis import Analysis
from treefx.passes.labels.facts import ALONG_ROWS, Axis, Kind, fact_of
from treefx.passes.labels.label_tokens import DTYPE_ONLY, SHAPE_ONLY
from treefx.passes.labels.liveness import live_nodes
from treefx.passes.labels.uniformity import FILLED, is_uniform
from treefx.passes.scores.attention_facts import Attention
from treefx.passes.scores.choices import Choice

__all__ = ["SIZE", "check_blocks", "computes_with_size", "module_of"]

aten = torch.ops.aten
SIZE = "{} computes with a size of the batch, which is another one on the packed row"
_COUNTS = "{} in {} counts columns inside of a block"
_NUMBERS = "{} in {} reads a vector with an entry per column, and the packed row has other columns"
_CHOOSES = "{} in {} chooses among the columns of a row, and the packed row has others"
_ALONG = "{} in {} mixes the columns of a row inside of a block"

_KEEPING = {
    aten._to_copy.default, aten.clone.default, aten.detach.default, aten.alias.default, aten.lift_fresh_copy.default,
    aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.expand.default, aten.permute.default,
    aten.transpose.int, aten.view.default, aten._unsafe_view.default, aten.slice.Tensor, aten.select.int,
    aten.cat.default, aten.stack.default, aten.split.Tensor, aten.split_with_sizes.default, aten.unbind.int,
    aten.repeat.default, aten.where.self, aten.view_as_complex.default, aten.view_as_real.default, aten.t.default,
}  # fmt: skip
"""Operators that move entries and compute nothing of several; pointwise ones are known by their tag."""
_LOOKUPS = {aten.index.Tensor, aten.index_select.default, aten.embedding.default}
"""Operators that read a table at indices: each column of the result depends on its own index."""
_RESHAPING = {aten.view.default, aten._unsafe_view.default}

_OF_SLOTS = {aten.index_put.default}
"""Their laws admit constants with an entry per slot of experts (the inverse of a sort), and no others."""


def check_blocks(analysis: Analysis, blocks: set[str], on_rows: Collection[str] = ()) -> None:
    """Check that no block computes with a size of the batch, or mixes or counts columns.

    Args:
        analysis: Of the module that takes the ids.
        blocks: Names of its blocks.
        on_rows: Names of modules in them that run on rows, and may.

    Raises:
        UnsupportedError: One does.
    """
    search = _Search(analysis, blocks)
    for node in live_nodes(analysis.gm):
        search.check_vectors(node)
        name = module_of(node)
        if not any(name == module or name.startswith(f"{module}.") for module in on_rows):
            search.check(node)


def module_of(node: fx.Node) -> str:
    """Return the name of the module that made a node; "" for the module that takes the ids.

    Names are relative to it.
    """
    stack = node.meta.get("nn_module_stack") or {}
    path = next(reversed(list(stack.values())), ("", None))[0]
    return str(path).rpartition("]")[2].lstrip(".")


def computes_with_size(node: fx.Node) -> bool:
    """Whether an operator takes a symbolic size as a number to compute with, not as a size."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or target.overloadpacket is torch.ops.aten.arange:
        return False
    arguments = target._schema.arguments
    given = {**dict(zip((item.name for item in arguments), node.args, strict=False)), **node.kwargs}
    values = (given.get(item.name) for item in arguments if "int" not in str(item.type))
    return any(_is_symbolic(value) for value in values)


def _is_symbolic(value: Any) -> bool:
    value = value.meta.get("val") if isinstance(value, fx.Node) else value
    return isinstance(value, torch.SymInt | torch.SymFloat)


class _Search:
    """Checks the operators of one graph."""

    def __init__(self, analysis: Analysis, blocks: set[str]) -> None:
        assert analysis.tokens is not None
        self._blocks, self._columns = blocks, analysis.tokens.columns
        self._column = _symbols(analysis.tokens.columns)
        self._sizes = self._column | _symbols(analysis.tokens.rows)

    def check_vectors(self, node: fx.Node) -> None:
        """Raise if an operator of a block reads a vector from outside with an entry per column."""
        if node.op == "call_function" and self._inside(node) and any(map(self._numbers_columns, node.all_input_nodes)):
            raise UnsupportedError(_NUMBERS.format(node.target, module_of(node)))

    def check(self, node: fx.Node) -> None:
        """Raise if an operator computes with a size."""
        if node.op != "call_function" or isinstance(fact_of(node).law, Attention):
            return
        if isinstance(fact_of(node).law, Choice):
            raise UnsupportedError(_CHOOSES.format(node.target, module_of(node)))
        if self._inside(node):
            if computes_with_size(node) or self._loses_size(node):
                raise UnsupportedError(SIZE.format(f"{node.target} in {module_of(node)}"))
            if fact_of(node).kind is Kind.PREFIX and fact_of(node).law == ALONG_ROWS:
                raise UnsupportedError(_ALONG.format(node.target, module_of(node)))
        if fact_of(node).kind is not Kind.PACKED or node.target in _OF_SLOTS:
            return
        for operand in node.all_input_nodes:
            maker = self._counter(operand)
            if maker is not None:
                raise UnsupportedError(_COUNTS.format(maker.target, module_of(maker)))

    def _loses_size(self, node: fx.Node) -> bool:
        """Return whether an operator takes a size of the batch that its result has not."""
        fact = fact_of(node)
        if fact.kind is Kind.INVARIANT:
            value = node.meta.get("val")
            return isinstance(value, Tensor) and bool(self._taken(node) - self._sizes_of(value))
        if fact.kind not in (Kind.PREFIX, Kind.PACKED):
            return False
        plain = [factor.size for dim in fact.dims or () for factor in dim if factor.axis is Axis.PLAIN]
        return any(_symbols(size) & self._sizes for size in plain) or self._moves_by_size(node)

    def _moves_by_size(self, node: fx.Node) -> bool:
        """Return whether a size selects or moves features: ``x[..., T]``, ``x.roll(T, -1)``."""
        if node.target is aten.slice.Tensor and fact_of(node).dims == fact_of(node.args[0]).dims:  # type: ignore[arg-type]
            return False
        types = ("int", "Optional[int]", "List[int]") if node.target is aten.roll.default else ("int", "Optional[int]")
        return isinstance(node.target, torch._ops.OpOverload) and any(
            str(argument.type) in types and bool(self._among(given))
            for argument, given in zip(node.target._schema.arguments, node.args, strict=False)
        )

    def _taken(self, node: fx.Node) -> set[Any]:
        """Return the sizes of the batch in the numbers and operands of a constant."""
        fills = node.target in DTYPE_ONLY or node.target in SHAPE_ONLY
        values = [_value(item) for item in tree_leaves((node.args, node.kwargs))]
        found = self._among(values)
        return found if fills else found.union(*[self._sizes_of(x) for x in values if isinstance(x, Tensor)])

    def _among(self, numbers: Any) -> set[Any]:
        """The sizes of the batch among numbers that are given to an operator."""
        return {symbol for item in tree_leaves(numbers) for symbol in _symbols(_value(item))} & self._sizes

    def _sizes_of(self, x: Tensor) -> set[Any]:
        return {symbol for size in x.shape for symbol in _symbols(size)} & self._sizes

    # Constants with an entry per column ------------------------------------------------------------------------------

    def _counter(self, node: fx.Node) -> fx.Node | None:
        """Return the operator of a block that first made or mixed a constant per column.

        None if the constant comes from outside.
        """
        waiting, seen = [node], set[fx.Node]()
        while waiting:
            item = waiting.pop()
            if item in seen or item.op != "call_function" or not self._counts(item) or self._is_everywhere(item):
                continue
            seen.add(item)
            counting = [x for x in item.all_input_nodes if self._counts(x)]
            if self._inside(item) and not (counting and self._keeps(item)):
                return item
            waiting += counting
        return None

    def _numbers_columns(self, node: fx.Node) -> bool:
        """Return whether a value from outside of the blocks is a vector with an entry per column."""
        value = node.meta.get("val")
        is_vector = isinstance(value, Tensor) and value.dim() == 1
        return is_vector and self._counts(node) and not self._inside(node) and not self._is_everywhere(node)

    def _counts(self, node: fx.Node) -> bool:
        value = node.meta.get("val")
        if fact_of(node).kind is not Kind.INVARIANT:
            return False
        return any(isinstance(x, Tensor) and bool(self._sizes_of(x)) for x in tree_leaves(value))

    def _is_everywhere(self, node: fx.Node) -> bool:
        """Return whether a constant is proved equal at all rows and columns, for any sizes."""
        value = node.meta.get("val")
        if not isinstance(value, Tensor):
            return False
        counted = [d for d, size in enumerate(value.shape) if _symbols(size) & self._sizes]
        return all(is_uniform(node, d) for d in counted) and all(map(_moves_or_fills, self._behind(node)))

    def _behind(self, node: fx.Node) -> Iterator[fx.Node]:
        waiting = [node]
        while waiting:
            item = waiting.pop()
            yield item
            waiting += [x for x in item.all_input_nodes if self._counts(x)]

    def _keeps(self, node: fx.Node) -> bool:
        """Whether each column of a result is made of the same column of its operands."""
        looks_up = node.target in _LOOKUPS and not self._counts(node.args[0])  # type: ignore[arg-type]
        if not looks_up and (not _moves_or_fills(node) or node.target in FILLED):
            return False
        values = [x.meta.get("val") for x in (node, *node.all_input_nodes)]
        shapes = [x.shape for value in values for x in tree_leaves(value) if isinstance(x, Tensor)]
        places = [[d for d, size in enumerate(shape) if _symbols(size) & self._column] for shape in shapes]
        exact = all(str(shape[d]) == str(self._columns) for shape, at in zip(shapes, places, strict=True) for d in at)
        if not exact or any(len(at) > 1 for at in places) or not places[0]:
            return False
        return node.target not in _RESHAPING or _before(shapes[0], places[0][0]) == _before(shapes[1], places[1][0])

    def _inside(self, node: fx.Node) -> bool:
        name = module_of(node)
        return any(name == block or name.startswith(f"{block}.") for block in self._blocks)


def _moves_or_fills(node: fx.Node) -> bool:
    tags = getattr(node.target, "tags", ())
    is_part = not isinstance(node.target, torch._ops.OpOverload)  # getitem
    return is_part or torch.Tag.pointwise in tags or node.target in _KEEPING or node.target in FILLED


def _value(item: Any) -> Any:
    return item.meta.get("val") if isinstance(item, fx.Node) else item


def _symbols(size: Any) -> set[Any]:
    return set(size.node.expr.free_symbols) if isinstance(size, SymInt) else set()


def _before(shape: torch.Size, dim: int) -> str:
    """How many entries stand in front of those of a dimension, as text: sizes may be symbols."""
    count: Any = 1
    for size in shape[:dim]:
        count = count * size
    return str(count)
