"""Cut out the part of a graph that computes one value per row, as a float64 function.

The region of a value reaches back, through all values on rows, to token-wise values: its packed inputs. Token-wise
functions of contracted values belong to it too, up to the next projection.

A region can be compared with another formula by running both on random numbers if it is *analytic*: made of sums,
products, quotients, exponentials and movements of its inputs, under conditions that depend on no input. Such a function
of its inputs is meromorphic in all of them together. Two of those that agree on an open set agree everywhere, and where
they are not the same the points of agreement have measure zero. So random float64 inputs, the parameters among them,
tell them apart with probability one, up to rounding: a saturated branch, a parameter that happens to be zero or a
condition that happens to hold cannot deceive, because there are none. (That a value is causal, and the same function of
every row, is not shown that way: the causal domain proves it.) ``detach`` is not analytic here: it keeps the value and
changes the derivative.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_map

from treefx.passes.causal.contract import Contracted
from treefx.passes.causal.domain import row_digit
from treefx.passes.labels.constants import constants_of
from treefx.passes.labels.facts import Axis, Kind, fact_of, token_axes

__all__ = ["ZERO_STAYS_ZERO", "Region", "find_mixed", "find_region"]

aten = torch.ops.aten

_MOVEMENTS = {
    aten.alias, aten.cat, aten.clone, aten.constant_pad_nd, aten.contiguous, aten.copy, aten.expand, aten.flip,
    aten.permute, aten.reshape, aten.select, aten.select_scatter, aten.slice, aten.slice_scatter, aten.split,
    aten.split_with_sizes, aten.squeeze, aten.stack, aten.t, aten.transpose, aten.tril, aten.triu, aten.unbind,
    aten.unsqueeze, aten.view, aten._unsafe_view, aten._to_copy, operator.getitem,
}  # fmt: skip
_LAYOUTS = {
    aten.alias, aten.clone, aten.constant_pad_nd, aten.contiguous, aten.expand, aten.permute, aten.reshape,
    aten.squeeze, aten.t, aten.transpose, aten.unsqueeze, aten.view, aten._unsafe_view, aten._to_copy,
}  # fmt: skip
"""Operators that only rearrange or repeat a value of tokens."""
_MASKS = {aten.masked_fill, aten.tril, aten.triu}
ZERO_STAYS_ZERO = {aten.mul, *_LAYOUTS}
"""Operators with a zero result if one of their operands is zero."""
_SIZED = {
    aten.view.default: aten.reshape, aten._unsafe_view.default: aten.reshape, aten.reshape.default: aten.reshape,
    aten.expand.default: aten.expand,
}  # fmt: skip
"""Operators that are told sizes; values may lie in memory in another order than when they were traced."""
_ARITHMETIC = {
    aten.add, aten.baddbmm, aten.bmm, aten.cumsum, aten.div, aten.exp, aten.linalg_solve_triangular, aten.masked_fill,
    aten.mul, aten.neg, aten.rsub, aten.sub, aten.sum, aten.where,
}  # fmt: skip
_FILLED = {aten.zeros_like.default: 0, aten.ones_like.default: 1}
_ALIGNED = {aten.baddbmm, aten.bmm, aten.cat, aten.copy, aten.linalg_solve_triangular}
_SCATTERS = {aten.select_scatter.default, aten.slice_scatter.default}
_NEW = {aten.new_zeros.default: 0, aten.new_ones.default: 1}


def _is_analytic(node: fx.Node) -> bool:
    packet = getattr(node.target, "overloadpacket", node.target)
    return node.op == "call_function" and (packet in _MOVEMENTS or packet in _ARITHMETIC)


def find_mixed(gm: fx.GraphModule) -> set[fx.Node]:
    """Find values on rows, or token-wise analytic functions of such values alone."""
    mixed: set[fx.Node] = set()
    for node in gm.graph.find_nodes(op="placeholder"):
        if fact_of(node).kind is Kind.ROW:
            mixed.add(node)
    for node in gm.graph.nodes:
        if node.op != "call_function":
            continue
        fact = fact_of(node)
        follows = fact.kind is Kind.PACKED and fact.law is None and _is_analytic(node)
        on_rows = fact.kind in (Kind.ROW, Kind.SCORE) or isinstance(fact.law, Contracted)
        if on_rows or (follows and any(operand in mixed for operand in node.all_input_nodes)):
            mixed.add(node)
    return mixed


@dataclass(frozen=True)
class Region:
    """An analytic region.

    Attributes:
        result: the value.
        nodes: everything that is computed from inputs, in order; the result is the last.
        packed: its inputs with tokens, in the order of the graph.
        learned: its inputs that are the same for all tokens and made of parameters.
        fixed: inputs without parameters that are the same for all tokens, as read by ``nodes``.
    """

    result: fx.Node
    nodes: tuple[fx.Node, ...]
    packed: tuple[fx.Node, ...]
    learned: tuple[fx.Node, ...]
    fixed: tuple[fx.Node, ...]

    def key(self) -> tuple[Any, ...]:
        """The same for regions that compute the same function."""
        number: dict[fx.Node, int] = {}

        def text(item: Any) -> Any:
            return f"%{number[item]}" if isinstance(item, fx.Node) else item

        parts: list[Any] = []
        for node in (*self.packed, *self.learned):
            number[node] = len(number)
            parts.append((tuple(node.meta["val"].shape), node.meta["val"].dtype, fact_of(node).dims))
        for node in _with_ancestors(self.fixed):
            number[node] = len(number)
            lent = _filled(node)
            call = (node.target, lent, tuple(node.meta["val"].shape)) if lent is not None else _call(node, text)
            parts.append(call if node.op == "call_function" else node)  # buffers count as equal only to themselves
        for node in self.nodes:
            number[node] = len(number)
            parts.append(_call(node, text))
        parts.append(fact_of(self.result).dims)
        return tuple(map(repr, parts))

    @property
    def has_rows(self) -> bool:
        """Return whether the rows of every value are known, so that ``run`` may take one row."""
        values = [node for node in self.nodes if isinstance(node.meta["val"], Tensor)]
        return all(row_digit(node) is not None and self._aligned(node) for node in values)

    def _aligned(self, node: fx.Node) -> bool:
        """Whether the last dimensions of all constants that a value reads are its own last ones."""
        read = [source for source in node.all_input_nodes if source in self.fixed]
        scatters = node.target in _SCATTERS and read == [node.args[0]]
        packet = getattr(node.target, "overloadpacket", None)
        return not read or packet in _ALIGNED or scatters or torch.Tag.pointwise in node.target.tags  # type: ignore[union-attr]

    def run(self, values: Mapping[fx.Node, Tensor], rows: int, given: int) -> Tensor | None:
        """Compute the result in float64; None where a constant is unknown before the call.

        Args:
            values: By input.
            rows: B.
            given: How many rows the values have: all, or one if ``has_rows``.
        """
        found: dict[fx.Node, Any] = dict(values)
        constants: dict[fx.Node, Tensor] = {}
        for node in self.fixed:
            value = _constant(node)
            if value is None:
                return None
            constants[node] = value
        last = {source: node for node in self.nodes for source in node.all_input_nodes}
        for node in self.nodes:
            found |= {s: _of_rows(constants[s], node, rows, given) for s in node.all_input_nodes if s in constants}
            args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), found.__getitem__)
            if node.target in _SIZED:
                found[node] = _SIZED[node.target](args[0], _shape(node, rows, given))
            else:
                found[node] = node.target(*_widened(args), **_widened(kwargs))  # type: ignore[operator]
            for source in node.all_input_nodes:
                if last[source] is node:
                    found.pop(source, None)
        result = found[self.result]
        return result if isinstance(result, Tensor) else None


def _shape(node: fx.Node, rows: int, given: int) -> list[int]:
    """The shape of a value of so many rows."""
    shape = list(node.meta["val"].shape)
    if given != rows:
        row = row_digit(node)
        assert row is not None
        shape[row.dim] = shape[row.dim] // rows * given
    return shape


def _of_rows(constant: Tensor, node: fx.Node, rows: int, given: int) -> Tensor:
    """A constant operand of a value of so many rows: it is the same in all of them."""
    row = row_digit(node) if given != rows else None
    if row is None:
        return constant
    shape = node.meta["val"].shape
    position = constant.dim() - (len(shape) - row.dim)
    if position < 0 or constant.shape[position] != shape[row.dim]:
        return constant
    sizes = constant.shape
    digits = constant.reshape(*sizes[:position], -1, rows, row.inner, *sizes[position + 1 :])
    return digits.narrow(position + 1, 0, given).flatten(position, position + 2)


def _call(node: fx.Node, text: Callable[[Any], Any]) -> tuple[Any, ...]:
    args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), text)
    return node.target, args, sorted(kwargs.items())


def _widened(items: Any) -> Any:
    """Arguments with float64 for every floating dtype."""

    def widen(item: Any) -> Any:
        return torch.float64 if isinstance(item, torch.dtype) and item.is_floating_point else item

    return tree_map(widen, items)


def find_region(result: fx.Node, mixed: set[fx.Node]) -> Region | None:
    """The region of a value, or None where it is not analytic."""
    found = _walk(result, mixed)
    if found is None:
        return None
    for group in _by_source(found.packed):
        _merge(found, group)
    return Region(result, *(tuple(sorted(part)) for part in (found.nodes, found.packed, found.learned, found.fixed)))


@dataclass(frozen=True)
class _Found:
    """The parts of a ``Region``."""

    nodes: set[fx.Node]
    packed: set[fx.Node]
    learned: set[fx.Node]
    fixed: set[fx.Node]


def _walk(result: fx.Node, mixed: set[fx.Node]) -> _Found | None:
    found = _Found({result}, set(), set(), set())
    stack = [result]
    while stack:
        node = stack.pop()
        if not _may_run(node):
            return None
        for source in node.all_input_nodes:
            if source in mixed:
                if source not in found.nodes:
                    found.nodes.add(source)
                    stack.append(source)
                continue
            fact = fact_of(source)
            if fact.kind is not Kind.INVARIANT:
                if not _is_input(source):
                    return None
                found.packed.add(source)
            elif fact.learned:
                if not source.meta["val"].is_floating_point():
                    return None
                found.learned.add(source)
            else:
                found.fixed.add(source)
    return found


def _by_source(packed: set[fx.Node]) -> list[list[list[fx.Node]]]:
    """Group inputs by origin, with the layouts of each, step by step."""
    groups: dict[fx.Node, list[list[fx.Node]]] = {}
    for node in sorted(packed):
        chain = [node]
        while (source := _laid_out(chain[-1])) is not None:
            chain.append(source)
        groups.setdefault(chain[-1], []).append(chain)
    return list(groups.values())


def _laid_out(node: fx.Node) -> fx.Node | None:
    """The input that a value is a layout or a masked copy of."""
    packet = getattr(node.target, "overloadpacket", None)
    source = node.args[0] if node.args else None
    if packet not in _LAYOUTS | _MASKS or not isinstance(source, fx.Node) or not _is_input(source):
        return None
    masks = [fact_of(other) for other in node.all_input_nodes if other is not source]
    return source if all(fact.kind is Kind.INVARIANT and not fact.learned for fact in masks) else None


def _merge(found: _Found, chains: list[list[fx.Node]]) -> None:
    """Replace inputs of one origin by their common source, before masks and repeats."""
    shared = [node for node in chains[0] if all(node in chain for chain in chains)]
    masked = [i for i, node in enumerate(shared) if getattr(node.target, "overloadpacket", None) in _MASKS]
    shared = shared[masked[-1] + 1 :] if masked else shared
    smallest = min(node.meta["val"].numel() for node in shared)
    chosen = next(node for node in shared if node.meta["val"].numel() == smallest)
    for chain in chains:
        found.packed.discard(chain[0])
        for node in chain[: chain.index(chosen)]:
            found.nodes.add(node)
            found.fixed.update(other for other in node.all_input_nodes if other is not node.args[0])
    found.packed.add(chosen)


def _is_input(node: fx.Node) -> bool:
    """Whether a value is one number per token and feature, read from the packed tokens."""
    fact = fact_of(node)
    if fact.kind not in (Kind.PACKED, Kind.PREFIX) or fact.dims is None or isinstance(fact.law, str):
        return False
    return node.meta["val"].is_floating_point() and token_axes(fact.dims) == {Axis.ROW, Axis.TOKEN}


def _may_run(node: fx.Node) -> bool:
    """Return whether an operator is analytic here: no result is an integer or a condition."""
    if not _is_analytic(node):
        return False
    value = node.meta["val"]
    parts = value if isinstance(value, list | tuple) else [value]
    return all(isinstance(part, Tensor) and part.is_floating_point() for part in parts)


def _filled(node: fx.Node) -> int | None:
    """Return the fill of a value whose operand only gives shape or dtype."""
    target: Any = node.target
    return _FILLED.get(target, _NEW.get(target))


def _with_ancestors(nodes: tuple[fx.Node, ...]) -> list[fx.Node]:
    """The nodes and all they are computed from, in order."""
    found: set[fx.Node] = set()
    stack = list(nodes)
    while stack:
        node = stack.pop()
        if node not in found:
            found.add(node)
            stack += [] if _filled(node) is not None else node.all_input_nodes
    return sorted(found)


def _constant(node: fx.Node) -> Tensor | None:
    """Return the value of an invariant without parameters, computed in float64."""
    values: dict[fx.Node, Any] = {}
    for item in _with_ancestors((node,)):
        lent = _filled(item)
        example = item.meta.get("val")
        if lent is not None:
            assert isinstance(example, Tensor)
            values[item] = _wide(torch.full(example.shape, lent, dtype=example.dtype, device=example.device))
        elif item.op != "call_function":
            read = constants_of(item).value(item)
            if read is None:
                return None
            values[item] = _wide(read)
        else:
            if torch.Tag.nondeterministic_seeded in getattr(item.target, "tags", ()):
                return None
            args, kwargs = fx.node.map_arg((item.args, dict(item.kwargs)), values.__getitem__)
            values[item] = item.target(*_widened(args), **_widened(kwargs))  # type: ignore[operator]
    result = values[node]
    return _wide(result) if isinstance(result, Tensor) else None


def _wide(x: Tensor) -> Tensor:
    return x.double() if x.is_floating_point() else x
