"""Prove that a graph does not use the number of columns of a forest's row.

No row has that number by itself.

With the number as a symbol, the graph shows values computed from it (``treefx.passes.labels.column_counts``). Branches
of Python on it, while Dynamo captured the graph, are in Dynamo's guards: each has to hold for every row by itself.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import sympy
from torch import SymFloat, SymInt, Tensor, fx

from treefx.errors import UnsupportedError
from treefx.forests.forest import Forest
from treefx.forests.subset import EdgeSubset
from treefx.inputs.sizes import COLUMNS, BatchSizes, Pattern, pattern_of
from treefx.inputs.values import InputValues
from treefx.kernels.memory import Bounded, lasting
from treefx.passes.labels.column_counts import find_column_count
from treefx.passes.labels.label_tokens import user_line
from treefx.runtime.analyses import Analyses
from treefx.runtime.shapes import Refusal
from treefx.runtime.ways.free_sizes import Symbols
from treefx.torch_patches.compiling import compiling

__all__ = ["ColumnCounts"]

_KEPT = 64
_SMALLEST = 2
"""Dynamo compiles a separate graph for one column; a row of one token predicts nothing."""
_WAY_OUT = (
    "there it is the number of the forest's distinct tokens, and each row has its own number. Compute it from "
    "position_ids, or call the model on a padded batch without treefx.use"
)
_COMPUTES = "under treefx.use(forest) the model computes with the number of columns of its inputs ({}), but {}"
_DECIDES = (
    "under treefx.use(forest) the model decides by the number of columns of its inputs ({}), which a row of {} "
    "tokens would decide otherwise, but {}"
)
_FIXED = (
    "under treefx.use(forest) it must be seen what the model computes from the number of columns, but Dynamo compiled "
    "the model for {} columns alone (the model makes a Python number of it, as int(), range() and linspace do, or the "
    "dimension is marked static), and {}"
)
_UNKNOWN = (
    "under treefx.use(forest) it must be seen what the model computes from the number of columns, but with a symbol in "
    "its place {}, and {}"
)


class ColumnCounts:
    """Check a graph's use of the number of columns once, and its guards row by row.

    Args:
        gm: Dynamo's graph.
        roles: Role of each placeholder.
        analyses: Its analyses.
    """

    def __init__(self, gm: fx.GraphModule, roles: list[str], analyses: Analyses) -> None:
        self._gm, self._roles, self._analyses = gm, roles, analyses
        self._symbols = Symbols(gm)
        examples = [node.meta.get("example_value") for node in gm.graph.find_nodes(op="placeholder")]
        self._captured = next((x.node.shape_env for x in examples if isinstance(x, SymInt)), None)
        """Has the conditions on its symbols under which Dynamo captured the graph."""
        self._known: Bounded[Any, BatchSizes | str] = Bounded(_KEPT)
        self._of_forms: Bounded[Hashable, BatchSizes] = Bounded(_KEPT)

    def check(
        self,
        args: Sequence[Any],
        by_column: Sequence[Any],
        forest: Forest,
        known: InputValues,
        form: Hashable | None = None,
    ) -> None:
        """Raise if a forest's packed row would give other results than its rows.

        Args:
            args: The inputs of the call.
            by_column: The same as functions of the column.
            forest: The forest, or a part of it.
            known: Proofs from the values of ``by_column``.
            form: Equal for calls with equal ``by_column``, if known.

        Raises:
            UnsupportedError: The graph computes with the number of columns, or its use cannot be determined.
        """
        whole = forest.uncut if isinstance(forest, EdgeSubset) else forest
        lengths = sorted({max(length, _SMALLEST) for length in whole.row_offsets.diff().tolist()})
        self._check_guards(args, forest.num_tokens, lengths)
        found = None if form is None else self._of_forms.get(form)
        if found is None:
            found = self._sizes(args, by_column, forest, known)
            if form is not None:
                self._of_forms[form] = found
        values = found.values(self._analyses.tensors(by_column))
        for length in lengths:
            if not found.holds({**values, found.symbol(COLUMNS): length}):
                raise UnsupportedError(_DECIDES.format("while it is traced", length, _WAY_OUT))

    def _sizes(self, args: Sequence[Any], by_column: Sequence[Any], forest: Forest, known: InputValues) -> BatchSizes:
        """Return the graph's sizes with symbolic columns and conditions."""
        pattern = pattern_of(self._analyses.sized, self._roles, self._analyses.filled(by_column))
        if pattern is None or self._has_fixed_columns(args, forest.num_tokens):
            raise UnsupportedError(_FIXED.format(forest.num_tokens, _WAY_OUT))
        found = self._known.get((pattern, known))
        if found is None:
            with compiling, lasting():
                found = self._known[pattern, known] = self._look(by_column, known, pattern)
        if isinstance(found, str):
            raise UnsupportedError(found)
        return found

    def _look(self, by_column: Sequence[Any], known: InputValues, pattern: Pattern) -> BatchSizes | str:
        """Return the graph's sizes with symbolic columns and conditions, or a refusal's text."""
        found = self._analyses.attempt(by_column, known, pattern)
        if isinstance(found, Refusal):
            number = next((node for node in self._gm.graph.nodes if _is_number(node)), None)
            if number is not None:
                return _COMPUTES.format(f"{number.name}: {user_line(number)}", _WAY_OUT)
            return _UNKNOWN.format(found.reason.text, _WAY_OUT)
        used = find_column_count(found.gm)
        if used is not None:
            return _COMPUTES.format(f"{used.target}: {user_line(used)}", _WAY_OUT)
        assert found.batch is not None
        return found.batch

    def _has_fixed_columns(self, args: Sequence[Any], count: int) -> bool:
        """Return whether Dynamo has a constant for the columns of some input.

        From the start, or by the model's use.
        """
        nodes = self._gm.graph.find_nodes(op="placeholder")
        rows = [
            node.meta["example_value"].shape[1]
            for node, x, role in zip(nodes, args, self._roles, strict=True)
            if role == "input" and isinstance(x, Tensor) and x.shape == (1, count)
        ]
        return not all(isinstance(size, SymInt) and isinstance(size.node.expr, sympy.Symbol) for size in rows)

    def _check_guards(self, args: Sequence[Any], count: int, lengths: Sequence[int]) -> None:
        guards = () if self._captured is None else self._captured.guards
        if not guards:
            return
        values = self._symbols.values(args)
        counts = {symbol for symbol, value in values.items() if value == count}
        for guard in guards:
            if not guard.expr.free_symbols <= values.keys() or not guard.expr.free_symbols & counts:
                continue
            for length in lengths:
                if guard.expr.xreplace({**values, **dict.fromkeys(counts, length)}) == sympy.false:
                    place = f"{guard.expr}, asked at {guard.sloc}"
                    raise UnsupportedError(_DECIDES.format(place, length, _WAY_OUT))


def _is_number(node: fx.Node) -> bool:
    """Whether a node of Dynamo's graph makes a number that is no size."""
    return node.op == "call_function" and isinstance(node.meta.get("example_value"), SymFloat)
