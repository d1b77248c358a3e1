"""Name sizes of inputs by symbols: rows, columns, and their values in a call.

Dynamo has a symbol for every size that may change; two of them are the rows B and the columns T of the batch, and most
others are these again, or one more or less. A *pattern* names the sizes of all inputs in B and T, so that calls of one
pattern share an analysis. Before, two calls of Dynamo's graph::

    ids [4, 16], mask [4, 16], labels [4, 15]        ids [9, 31], mask [9, 31], labels [9, 30]

After, one pattern::

    ids [B, T], mask [B, T], labels [B, T - 1]       with B, T = 4, 16 and B, T = 9, 31
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import sympy
import torch
from torch import SymInt, Tensor, fx

from treefx.passes.trace.flash import ends_of_segments

__all__ = ["COLUMNS", "ROWS", "SEGMENTS", "Pattern", "inline_sizes", "is_number_input", "name_size", "pattern_of"]

ROWS, COLUMNS = sympy.symbols("rows columns", integer=True, positive=True)
SEGMENTS = sympy.Symbol("segments", integer=True, positive=True)
"""The size of an input that says where the segments of a row end, for flash attention alone."""
_LESS, _MORE, _GRID, _SHIFTED = COLUMNS - 1, COLUMNS + 1, ROWS * COLUMNS, ROWS * (COLUMNS - 1)


@dataclass(frozen=True)
class Pattern:
    """The sizes of all inputs of a graph in ``ROWS`` and ``COLUMNS`` (and ``SEGMENTS``).

    ``inputs`` holds, per placeholder, the shape of a tensor as expressions and numbers, or one for a number. A number
    of the caller has a separate symbol: a vector of which only the size is read, or a size of other inputs that the
    graph computes with (how many labels there are, which the caller gives too).
    """

    inputs: tuple[Any, ...]

    def symbols(self) -> list[sympy.Symbol]:
        """Those that occur."""
        found = {symbol for item in _leaves(self.inputs) for symbol in getattr(item, "free_symbols", ())}
        return [*[symbol for symbol in (ROWS, COLUMNS, SEGMENTS) if symbol in found], *self.numbers()]

    def numbers(self) -> list[sympy.Symbol]:
        """Those of the caller's numbers."""
        found = dict.fromkeys(item for item in _leaves(self.inputs) if isinstance(item, sympy.Symbol))
        return [symbol for symbol in found if symbol not in (ROWS, COLUMNS, SEGMENTS)]


@functools.cache
def _number(position: int) -> sympy.Symbol:
    return sympy.Symbol(f"number_{position}", integer=True, positive=True)


def _leaves(inputs: Sequence[Any]) -> list[Any]:
    return [size for item in inputs for size in (item if isinstance(item, tuple) else (item,))]


def pattern_of(gm: fx.GraphModule, roles: Sequence[str], args: Sequence[Any]) -> Pattern | None:
    """Return the pattern of a call of Dynamo's graph; None without symbolic batch sizes.

    Args:
        gm: Dynamo's graph; a size that is a number in it stays one.
        roles: Role of each placeholder: rows and columns are those of the first integer "input" [B, T].
        args: One value per placeholder.
    """
    for ids, role in zip(args, roles, strict=True):
        if role == "input" and _may_be_ids(ids):
            break
    else:
        return None
    rows, columns = ids.shape
    known = _known_inputs(gm)
    names: dict[Any, Any] = {}
    numbers = _numbers_of_caller(known, args) if known.sizes or known.numbers else {}
    inputs: list[Any] = [
        tuple(x.shape) if isinstance(x, Tensor) and i in known.tensors else x for i, x in enumerate(args)
    ]
    for i in known.numbers:
        inputs[i] = (_number(i),)
    for i, traced in known.moving.items():
        given = enumerate(zip(args[i].shape, traced, strict=True))
        sizes = [
            size
            if not isinstance(symbol, SymInt)
            else SEGMENTS
            if i in known.ends
            else name_size(size, d, rows, columns, numbers)
            for d, (size, symbol) in given
        ]
        named = False
        for symbol, size in zip(traced, sizes, strict=True):
            if isinstance(symbol, SymInt):
                names[symbol.node.expr] = size
            named = named or isinstance(size, sympy.Expr)
        if named and args[i].requires_grad and not args[i].is_contiguous():
            return None
        inputs[i] = tuple(sizes)
    for i, expr in known.sizes.items():
        inputs[i] = names.get(expr, inputs[i]) if expr is not None else 0  # an unread one may be a stride
    return Pattern(tuple(inputs)) if _has_symbols(inputs) else None


def _has_symbols(inputs: Sequence[Any]) -> bool:
    for item in inputs:
        for size in item if isinstance(item, tuple) else (item,):
            if getattr(size, "free_symbols", None):
                return True
    return False


def _numbers_of_caller(known: _Inputs, args: Sequence[Any]) -> dict[int, sympy.Symbol]:
    """Return symbols of numbers the graph computes with, by value; other inputs share them."""
    read = [i for i, expr in known.sizes.items() if expr is not None]
    return {args[i]: _number(i) for i in read} | {args[i].shape[0]: _number(i) for i in known.numbers}


@dataclass(frozen=True)
class _Inputs:
    """Hold the graph's facts on its placeholders, by position.

    Attributes:
        tensors: Those that are tensors.
        moving: The shapes of those with a symbol among their sizes, but for ``numbers``.
        ends: Those that say where segments end.
        numbers: Those that only their size is asked of.
        sizes: The expressions of those that are numbers with symbols; None if unused.
    """

    tensors: frozenset[int]
    moving: dict[int, tuple[Any, ...]]
    ends: frozenset[int]
    numbers: frozenset[int]
    sizes: dict[int, Any]


_known: weakref.WeakKeyDictionary[fx.GraphModule, _Inputs] = weakref.WeakKeyDictionary()


def _known_inputs(gm: fx.GraphModule) -> _Inputs:
    """Find the inputs once: Dynamo's graph never changes."""
    if gm not in _known:
        _known[gm] = _find_inputs(gm)
    return _known[gm]


def _find_inputs(gm: fx.GraphModule) -> _Inputs:
    nodes = dict(enumerate(gm.graph.find_nodes(op="placeholder")))
    examples = {i: node.meta.get("example_value") for i, node in nodes.items()}
    tensors = {i: tuple(x.shape) for i, x in examples.items() if isinstance(x, Tensor)}
    numbers = frozenset(i for i in tensors if _is_number(nodes[i]))
    names = {node.name for node in ends_of_segments(gm)}
    return _Inputs(
        frozenset(tensors),
        {i: x for i, x in tensors.items() if i not in numbers and any(isinstance(size, SymInt) for size in x)},
        frozenset(i for i in tensors if nodes[i].name in names),
        numbers,
        {i: x.node.expr if nodes[i].users else None for i, x in examples.items() if isinstance(x, SymInt)},
    )


def _is_number(node: fx.Node) -> bool:
    """Whether only the size of a vector is asked for (``treefx.runtime.whole.numbers``)."""
    asked = [(user.op, user.target, user.args) for user in node.users]
    return asked == [("call_method", "size", (node, 0))] and node.meta["example_value"].dim() == 1


def _may_be_ids(x: Any) -> bool:
    return isinstance(x, Tensor) and x.dim() == 2 and x.dtype in (torch.int64, torch.int32)


def name_size(
    size: int, dim: int, rows: int, columns: int, numbers: Mapping[int, sympy.Symbol] = MappingProxyType({})
) -> Any:
    """Write a size in rows and columns, else as a caller's number, else unchanged.

    Where several names fit, the first dimension counts rows and the others columns.
    """
    names = [(rows, ROWS), (columns, COLUMNS)] if dim == 0 else [(columns, COLUMNS), (rows, ROWS)]
    names += [(columns - 1, _LESS), (columns + 1, _MORE), (rows * columns, _GRID), (rows * (columns - 1), _SHIFTED)]
    for value, name in (*names, *numbers.items()):
        if value == size and size > 1:
            return name
    return size


def inline_sizes(gm: fx.GraphModule) -> None:
    """Write sizes into operators as symbols, and erase the nodes that computed them.

    Asking a tensor for its size then does not count as reading it, and laws see sizes where numbers are.
    """
    for node in gm.graph.nodes:
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), _size_or_node)
        node.args, node.kwargs = args, kwargs
    for node in reversed(gm.graph.nodes):
        if node.op == "call_function" and isinstance(node.meta.get("val"), SymInt):
            gm.graph.erase_node(node)
        elif _takes_everything(node):
            node.replace_all_uses_with(node.args[0])
            gm.graph.erase_node(node)
    gm.recompile()


def _takes_everything(node: fx.Node) -> bool:
    """A slice from the first to the last: torch writes none where sizes are numbers."""
    source: Any = node.args[0] if node.args else None
    if node.target is not torch.ops.aten.slice.Tensor or source.op == "placeholder":
        return False
    given: list[Any] = [*node.args[2:5], *[None, None, 1][len(node.args[2:5]) :]]
    start, end, step = given
    return start in (None, 0) and step == 1 and (end is None or (isinstance(end, int) and end >= sys.maxsize))


def _size_or_node(node: fx.Node) -> Any:
    value = node.meta.get("val")
    if not isinstance(value, SymInt):
        return node
    return int(value) if value.node.expr.is_Integer else value


def is_number_input(node: fx.Node) -> bool:
    """Return whether Dynamo's graph only reads an input by ``item``, as floats when dynamic."""
    return bool(node.users) and all(_asks_for_number(user, node) for user in node.users)


def _asks_for_number(user: fx.Node, node: fx.Node) -> bool:
    if user.target is torch.ops.higher_order.tag_activation_checkpoint:
        body: Any = user.args[0]
        inside = getattr(user.graph.owning_module, body.target).graph.find_nodes(op="placeholder")
        return all(is_number_input(own) for own, given in zip(inside, user.args[1:], strict=True) if given is node)
    return (user.op, user.target) == ("call_method", "item")
