"""Compute exact column dependence: the last token of its row that an element reads.

The laws of ``treefx.passes.labels.laws.base`` cover operators that treat positions alike. Convolutions, scans, shifts
and recurrences do not, and are still causal. That is decided here element by element, without sampling. A value is
described as a function of *one* row, the same function for every row: the row index is one digit of one dimension, and
every law (``treefx.passes.causal.laws``) must leave it alone. What remains are three tables over the other dimensions,
each of size one along dimensions that do not vary:

==========  ==========================================================================================
``column``  one more than the last column that the element reads (0: none)
``value``   the element's value, where that is known before the call
``mask``    where ``value`` holds; a known element reads nothing
==========  ==========================================================================================

Known elements prove masks: a product with a known zero does not read its other factor, which is taken to be
finite. A value without a law is unknown, and so is everything made of it.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx

from treefx.passes.causal.state import RowDigit, State, States, Unknown
from treefx.passes.labels.constants import constants_of
from treefx.passes.labels.facts import ALONG_ROWS, Axis, Dims, Factor, Kind, fact_of, plain_dims, shape_of
from treefx.passes.labels.uniformity import is_uniform

__all__ = [
    "HAS_KNOWN",
    "CausalDomain",
    "Step",
    "one_row",
    "row_digit",
    "token_dims",
]

_LARGEST_KEPT = 1 << 16
"""Larger tables are kept only until their last use."""
_LARGEST_CONSTANT = 1 << 24
"""Larger constants are not read."""
_ROW_KEY = "treefx_row"
HAS_KNOWN = "treefx_has_known"
"""Set on labelled values with known elements, which proofs rely on. On rows they are computed, not expanded:
an expansion gives another token's value at padding that was left out."""
_MASKS = {
    torch.ops.aten.masked_fill, torch.ops.aten.where, torch.ops.aten.tril, torch.ops.aten.triu,
    torch.ops.aten.bitwise_and, torch.ops.aten.logical_and,
}  # fmt: skip
"""They put known elements among the others."""


@dataclass(frozen=True)
class Step:
    """One operator call seen by a law."""

    node: fx.Node
    domain: CausalDomain

    @property
    def rows(self) -> int:
        """B."""
        return self.domain.rows

    def arg(self, index: int, name: str, default: Any = None) -> Any:
        """A positional or keyword argument."""
        args = self.node.args
        return args[index] if index < len(args) else self.node.kwargs.get(name, default)

    def state(self, node: Any) -> State:
        """The state of an operand with one result."""
        found = self.domain.state(node) if isinstance(node, fx.Node) else None
        if not isinstance(found, State):
            raise Unknown
        return found

    def shape_without(self, full: Sequence[int], row: RowDigit | None) -> tuple[int, ...]:
        """A full shape with the row digit taken out."""
        return tuple(size // self.rows if row is not None and d == row.dim else size for d, size in enumerate(full))

    def result_shape(self, row: RowDigit | None) -> tuple[int, ...]:
        """The result's shape for one row."""
        return self.shape_without(shape_of(self.node), row)


def one_row(step: Step, node: fx.Node, offset: int, inner: int) -> State:
    """Return the state of an operand next to a row digit at ``offset`` from the right.

    Raises:
        Unknown: The operand has its rows elsewhere, or is not the same for all rows.
    """
    state = step.state(node)
    position = state.rank - offset
    if state.row is not None:
        if (state.row.dim, state.row.inner) == (position, inner):
            return state
        if step.rows > 1 or position < 0 or state.shape[position] % inner:
            raise Unknown
        return replace(state, row=RowDigit(position, inner))  # a single row stands anywhere
    if position < 0 or state.shape[position] == 1:
        return state
    if state.shape[position] % (step.rows * inner):
        raise Unknown
    shape = list(state.shape)
    shape[position] //= step.rows
    if bool(state.mask.all()) and state.value.shape[position] > 1:
        sizes = state.value.shape
        digits = state.value.reshape([*sizes[:position], -1, step.rows, inner, *sizes[position + 1 :]])
        first = digits.narrow(position + 1, 0, 1)
        if not bool((digits == first).all()):
            raise Unknown
        known = State.of(shape, state.value.dtype, 0)
        return replace(known, value=first.flatten(position, position + 2), sources=state.sources, packed=state.packed)
    if not bool(state.mask.all()) and not is_uniform(node, position):
        raise Unknown
    return state.mapped(lambda table: table.narrow(position, 0, 1), shape, None)


def _of_dims(dims: Dims, rows: int, dtype: torch.dtype) -> State:
    """The state of a labelled value: an element at a token reads up to that token."""
    row: RowDigit | None = None
    shape, column = [], torch.zeros([1] * len(dims), dtype=torch.int32)
    for d, dim in enumerate(dims):
        sizes = [factor.size for factor in dim]
        axes = [factor.axis for factor in dim]
        if not {Axis.ROW, Axis.TOKEN, Axis.PLAIN}.issuperset(axes):
            raise Unknown
        if Axis.ROW in axes:
            position = axes.index(Axis.ROW)
            row = RowDigit(d, math.prod(sizes[position + 1 :]))
            sizes[position] = 1
        shape.append(math.prod(sizes))
        for position, axis in enumerate(axes):
            if axis is Axis.TOKEN:
                place = torch.arange(1, sizes[position] + 1, dtype=torch.int32)
                digit = place.reshape([-1] + [1] * (len(sizes) - position - 1)).expand(sizes).reshape(-1)
                column = torch.maximum(column, digit.reshape([-1] + [1] * (len(dims) - d - 1)))
    if row is None:
        raise Unknown
    ones = [1] * len(dims)
    return State(tuple(shape), column, torch.zeros(ones, dtype=dtype), torch.zeros(ones, dtype=torch.bool), row)


def row_digit(node: fx.Node) -> RowDigit | None:
    """Return the place of the rows in a followed or labelled value; else None."""
    dims = fact_of(node).dims
    if dims is None:
        found: RowDigit | None = node.meta.get(_ROW_KEY)
        return found
    for d, dim in enumerate(dims):
        axes = [factor.axis for factor in dim]
        if Axis.ROW in axes:
            return RowDigit(d, math.prod(factor.size for factor in dim[axes.index(Axis.ROW) + 1 :]))
    return None


@dataclass
class CausalDomain:
    """States of the values of one graph, found on demand and in the order of the graph.

    Args:
        rows: B.
        columns: T.
        inputs: For each node the [B, T] inputs it was made of.
        laws: The law of an operator; None for an operator without.
    """

    rows: int
    columns: int
    inputs: dict[fx.Node, frozenset[fx.Node]]
    laws: Callable[[Any], Callable[[Step], States] | None]
    _known: dict[fx.Node, States | None] = field(default_factory=dict)
    _refined: set[fx.Node] = field(default_factory=set)
    """Labelled values of which more is known than their labels say: some elements are constants."""

    def state(self, node: fx.Node) -> States | None:
        """The state of a value, or None where it is unknown."""
        stack = [node]
        while stack:
            top = stack[-1]
            missing = [] if top in self._known else [n for n in self._followed(top) if n not in self._known]
            stack += missing
            if not missing:
                stack.pop()
                if top not in self._known:
                    self._known[top] = self._find(top)
        return self._known[node]

    def refine(self, node: fx.Node) -> None:
        """Follow a labelled value by its law where that helps.

        These values are contracted, masked, or made of refined values.
        """
        contracted = node in self._known
        masked = getattr(node.target, "overloadpacket", None) in _MASKS
        if contracted or masked or any(operand in self._refined for operand in node.all_input_nodes):
            self._refined.add(node)
            state = self.state(node)
            parts = state if isinstance(state, tuple) else (state,)
            node.meta[HAS_KNOWN] = any(part is not None and part.knows for part in parts)
            if not any(part is not None and part.says_more for part in parts):
                self._refined.discard(node)
                if not contracted:
                    del self._known[node]

    def release(self, node: fx.Node) -> None:
        """Forget large tables of operands that no later node reads."""
        for operand in node.all_input_nodes:
            state = self._known.get(operand)
            tables = (state.column, state.value, state.mask) if isinstance(state, State) else ()
            large = any(table.numel() > _LARGEST_KEPT for table in tables)
            if large and all(user is node or user < node for user in operand.users):
                del self._known[operand]

    def _followed(self, node: fx.Node) -> list[fx.Node]:
        """Return the operands that determine a node's own state."""
        labelled = node.op == "call_function" and self._is_labelled(node)
        return [] if node.op != "call_function" or labelled else node.all_input_nodes

    def _is_labelled(self, node: fx.Node) -> bool:
        """Return whether labels determine the reads of a value; labels of scores name the query."""
        fact = fact_of(node)
        labelled = fact.kind in (Kind.PREFIX, Kind.PACKED) and fact.law != ALONG_ROWS and fact.dims is not None
        return labelled and node not in self._refined

    def _find(self, node: fx.Node) -> States | None:
        fact = fact_of(node)
        result: States | None
        try:
            if fact.dims is not None and (node.op != "call_function" or self._is_labelled(node)):
                sources = self.inputs.get(node, frozenset()) if fact.kind is Kind.PREFIX else frozenset()
                state = _of_dims(fact.dims, self.rows, node.meta["val"].dtype)
                return replace(state, sources=sources, packed=fact.kind is not Kind.PREFIX)
            if node.target is operator.getitem:
                parts = self._known[node.args[0]]  # type: ignore[index]
                result = parts[node.args[1]] if isinstance(parts, tuple) else None  # type: ignore[index]
            elif fact.kind is Kind.INVARIANT:
                return self._invariant(node)
            else:
                result = self._by_law(node)
        except Unknown:
            return None
        if isinstance(result, State):
            node.meta[_ROW_KEY] = result.row
        return result

    def _by_law(self, node: fx.Node) -> States:
        law = self.laws(node.target)
        found = [self._known.get(operand) for operand in node.all_input_nodes]
        if law is None or any(state is None for state in found):
            raise Unknown
        result = law(Step(node, self))
        read = [state for state in found if isinstance(state, State)]
        read += [part for state in found if isinstance(state, tuple) for part in state]
        sources = frozenset().union(*[state.sources for state in read])
        packed = any(state.packed for state in read)
        if isinstance(result, tuple):
            return tuple(replace(state, sources=sources, packed=packed) for state in result)
        return replace(result, sources=sources, packed=packed)

    def _invariant(self, node: fx.Node) -> States | None:
        """The state of a value without rows: by its law, or read where that says more."""
        value = node.meta.get("val")
        found: States | None = None
        if node.op == "call_function":
            try:
                found = self._by_law(node)
            except Unknown:
                pass
        if not isinstance(value, Tensor) or isinstance(found, tuple) or (found is not None and bool(found.mask.all())):
            return found
        constant = constants_of(node).value(node) if value.numel() <= _LARGEST_CONSTANT else None
        if constant is not None:
            return State.constant(constant)
        if found is not None:
            return found
        learned = node.op != "call_function" and fact_of(node).learned  # a parameter holds no fill of a mask
        return State.of(value.shape, value.dtype).above_fills() if learned else State.of(value.shape, value.dtype)


def token_dims(state: State, rows: int, columns: int) -> Dims | None:
    """Return labels for a value, if no element reads anything after its own token.

    Some dimension, or its leading or trailing factor, must have the size of the rows. Where several would do, the one
    that follows the reading most closely is taken.
    """
    if state.row is None:
        return None
    digits = _digits(state, rows)
    candidates = []
    for position, (d, size) in enumerate(digits):
        if not size or size % columns or d < 0:
            continue
        for leading in {True, False} if size > columns else {True}:
            slack = _slack(state, digits, position, columns, leading)
            if slack is not None:
                candidates.append((slack, position, leading))
    if not candidates:
        return None
    _, position, leading = min(candidates)
    return _labelled(state, digits, position, rows, columns, leading)


def _digits(state: State, rows: int) -> list[tuple[int, int]]:
    """The dimension and size of each digit of one row; the row digit itself as dimension -1."""
    result = []
    for d, size in enumerate(state.shape):
        if state.row is not None and d == state.row.dim:
            result += [(d, size // state.row.inner), (-1, rows), (d, state.row.inner)]
        else:
            result.append((d, size))
    return result


def _slack(state: State, digits: list[tuple[int, int]], position: int, columns: int, leading: bool) -> int | None:
    """Return how far behind its token the value reads, summed; None if it reads ahead."""
    d, size = digits[position]
    split = (columns, size // columns) if leading else (size // columns, columns)
    same = [s for e, s in digits if e == d]
    where = [i for i, (e, _) in enumerate(digits) if e == d].index(position)
    table = state.column.amax([e for e in range(state.rank) if e != d])
    table = table.expand(state.shape[d]).reshape([*same[:where], *split, *same[where + 1 :]])
    axis = where + (0 if leading else 1)
    last = table.amax([e for e in range(table.dim()) if e != axis]) if table.dim() > 1 else table
    behind = torch.arange(1, columns + 1) - last
    return int(behind.sum()) if bool((behind >= 0).all()) else None


def _labelled(
    state: State, digits: list[tuple[int, int]], position: int, rows: int, columns: int, leading: bool
) -> Dims:
    dims: list[list[Factor]] = [[] for _ in range(state.rank)]
    at = -1
    for i, (d, size) in enumerate(digits):
        if d < 0:
            dims[at].append(Factor(Axis.ROW, rows))
            continue
        at = d
        if i != position:
            dims[d] += plain_dims([size])[0]
            continue
        rest = list(plain_dims([size // columns])[0])
        token = [Factor(Axis.TOKEN, columns)]
        dims[d] += token + rest if leading else rest + token
    return tuple(tuple(dim) for dim in dims)
