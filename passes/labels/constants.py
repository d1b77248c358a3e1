"""Evaluate values known at compile time: buffers, aranges and functions of these alone.

A causal mask may live in a registered buffer, where only its values prove it causal. The buffers read are remembered,
so that the run time can tell when one of them has changed and the proof no longer holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import SymInt, Tensor, fx

from treefx.inputs.sizes import BatchSizes, concrete
from treefx.inputs.values import GivenMask, InputValues
from treefx.kernels.score import Expr, evaluate, walk
from treefx.passes.labels.corners import is_corner
from treefx.passes.labels.facts import Kind, ancestors, fact_of
from treefx.passes.labels.purity import changed_inputs, impurity
from treefx.passes.labels.segments import Segments

__all__ = ["MASKING", "Constants", "constants_of"]

_KEY = "treefx_constants"
_LARGEST_TABLE = 1 << 28
MASKING = -1e4
"""Numbers at or below this fill masks (the weakest in models); ``hidden`` proves their effect."""


class Constants:
    """Evaluates invariant, parameter-free nodes of one traced graph.

    Args:
        gm: The traced graph.
        inputs: The run-time value of each placeholder.
        roles: Role of each placeholder; the values of "input" ones may differ from call to call and prove nothing, nor
            do those of buffers that the graph changes.
        known: Proofs from the values of the inputs.
        batch: Rows and columns where they are symbols: then a constant holds for all of them.
        segmented: Whether rows are taken to be packed with segments.
    """

    def __init__(
        self,
        gm: fx.GraphModule,
        inputs: Sequence[Any],
        roles: Sequence[str],
        known: InputValues,
        batch: BatchSizes | None = None,
        segmented: bool = False,
    ) -> None:
        self._batch, self._inputs = batch, [_kept(x, role) for x, role in zip(inputs, roles, strict=True)]
        self._sizes: dict[Any, int] = {} if batch is None else batch.values(inputs)
        self._values: dict[fx.Node, Any] = dict(zip(gm.graph.find_nodes(op="placeholder"), self._inputs, strict=True))
        self._gm = gm
        self._tables: dict[Expr, Tensor | None] = {}
        self.read: set[int] = set()
        """Positions of the inputs with values that entered a proof."""
        self._positions = {node: i for i, node in enumerate(self._values)}
        self._per_call = {node for node, role in zip(self._values, roles, strict=True) if role == "input"}
        self._per_call |= changed_inputs(gm).keys()
        self.consecutive = frozenset(node for node, i in self._positions.items() if i in known.consecutive)
        self.binary = frozenset(node for node, i in self._positions.items() if i in known.binary)
        self.runs = frozenset(node for node, i in self._positions.items() if i in known.runs)
        self.full = frozenset(node for node, i in self._positions.items() if i in known.full)
        self.segments = Segments(segmented)
        """Masks' facts on segments."""
        self.masks = _masks(list(self._positions), known)
        """Masks that the caller gives, and the inputs that are their parts."""
        gm.meta[_KEY] = self

    def changes(self, node: fx.Node) -> bool:
        """Whether a value is an input of the caller's, which may differ from call to call."""
        return node in self._per_call

    def _is_constant(self, node: fx.Node) -> bool:
        fact = fact_of(node)
        if fact.kind is not Kind.INVARIANT or fact.learned or self._per_call & {node, *ancestors(node)}:
            return False
        return impurity(node) is None and (self._batch is None or is_corner(node))

    def value(self, node: fx.Node) -> Tensor | None:
        """Return the value of an invariant node.

        None if it depends on rows or a parameter, or changes each time.
        """
        if not self._is_constant(node):
            return None
        with torch.no_grad():
            result = self._run(node)
        return result if isinstance(result, Tensor) else None

    def number(self, node: fx.Node) -> Any:
        """Return the number of a one-element tensor that is constant, or a masking buffer."""
        value = getattr(self._gm, str(node.target)) if node.op == "get_attr" else self._values.get(node)
        own = node.op == "get_attr" or (node.op == "placeholder" and node not in self._per_call)
        if not own or fact_of(node).learned or not isinstance(value, Tensor) or value.numel() != 1:
            return None
        number = value.item()
        if node.op == "placeholder":  # other numbers may change from step to step
            if number > MASKING or value.dtype is torch.bool:
                return None
            self.read.add(self._positions[node])
        return number

    def _run(self, node: fx.Node) -> Any:
        if node.op == "placeholder":
            self.read.add(self._positions[node])
            return self._values[node]
        if node not in self._values:
            if node.op == "get_attr":
                self._values[node] = getattr(self._gm, str(node.target))
            else:
                args, kwargs = fx.node.map_arg(concrete((node.args, dict(node.kwargs)), self._sizes), self._run)
                self._values[node] = node.target(*args, **kwargs)  # type: ignore[operator]
        return self._values[node]

    def table(self, expr: Expr, columns: int, heads: int) -> Tensor | None:
        """Return an expression on the grid [head, query column, key column]; None if not constant."""
        if any(item[0] in ("dot", "b") for item in walk(expr)):
            return None
        if expr not in self._tables:
            self._tables[expr] = self._tabulate(expr, columns, heads)
        return self._tables[expr]

    def _tabulate(self, expr: Expr, columns: int, heads: int) -> Tensor | None:
        loads = [item[1] for item in walk(expr) if item[0] == "load"]
        if not all(map(self._is_constant, loads)):
            return None
        columns = self._wide(columns)
        if heads * columns**2 > _LARGEST_TABLE:
            return None
        buffers: list[Tensor] = []
        resolved = self._resolve(expr, buffers)
        if resolved is None:
            return None
        column = torch.arange(columns)
        grid = {"q": column[:, None], "k": column[None, :], "head": torch.arange(heads)[:, None, None]}
        zero = torch.zeros(())
        value = evaluate(resolved, dot=zero, batch=zero, buffers=[b.cpu() for b in buffers], **grid)
        shape = torch.broadcast_shapes(value.shape, (1, columns, columns))  # type: ignore[no-untyped-call]
        return value.expand(shape)

    def _wide(self, columns: Any) -> int:
        """Return the columns of a table; for a symbol, the most of any batch that it covers."""
        if self._batch is None or not isinstance(columns, SymInt):
            return columns  # type: ignore[no-any-return]
        wide = self._batch.table_columns(columns, self._inputs)
        if self._sizes[columns.node.expr] != wide:
            self._sizes[columns.node.expr] = wide
            self._values = dict(zip(self._positions, self._inputs, strict=True))
        return wide

    def _resolve(self, expr: Expr, buffers: list[Tensor]) -> Expr | None:
        """Replace nodes by buffers and columns by indices of the grid."""
        if expr[0] in ("cq", "ck"):
            return ("q",) if expr[0] == "cq" else ("k",)
        items: list[Any] = []
        if expr[0] == "load":
            value = self.value(expr[1])
            if value is None:
                return None
            buffers.append(value)
            items, expr = [len(buffers) - 1], ("load", *expr[2:])
        for item in expr[1:]:
            resolved = self._resolve(item, buffers) if isinstance(item, tuple) else item
            if resolved is None:
                return None
            items.append(resolved)
        return (expr[0], *items)


def _kept(x: Any, role: str) -> Any:
    """Return an input of a call without the graph of its gradient, which would live as long as the analysis."""
    of_call = role not in ("parameter", "buffer")
    return x.detach() if of_call and isinstance(x, Tensor) and x.is_floating_point() else x


def _masks(placeholders: list[fx.Node], known: InputValues) -> dict[fx.Node, tuple[GivenMask, list[fx.Node]]]:
    parts = iter(placeholders[len(placeholders) - sum(mask.count for mask in known.masks) :])
    return {placeholders[mask.position]: (mask, [next(parts) for _ in range(mask.count)]) for mask in known.masks}


def constants_of(node: fx.Node) -> Constants:
    """The constants of the graph that a node belongs to."""
    found = node.graph.owning_module.meta[_KEY]  # type: ignore[union-attr]
    assert isinstance(found, Constants)
    return found
