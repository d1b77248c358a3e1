"""The native level: the graph's row is the packed row of a forest, or of a part of one."""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor, fx

from treefx.errors import ForestError, UnsupportedError
from treefx.forests.context import ran_on_forest
from treefx.forests.forest import Forest
from treefx.forests.subset import EdgeSubset
from treefx.inputs.token_count import PackedSize
from treefx.kernels.memory import Bounded
from treefx.kernels.score import Expr
from treefx.passes.analysis import Variant
from treefx.passes.labels.label_tokens import user_line
from treefx.passes.labels.rows import rows_in_order
from treefx.passes.trace.pattern import is_number_input
from treefx.passes.trace.unseen_changes import changed_by
from treefx.runtime.call_plan import forest_batch
from treefx.runtime.cut import CutRow
from treefx.runtime.lazy import name_of_input
from treefx.runtime.reason import Reason
from treefx.runtime.records import Records
from treefx.runtime.shapes import Shape
from treefx.runtime.ways.rows import PackedRun

__all__ = ["NativeRun", "wrong_row"]

_BLIND = (
    "a token of the forest may see no key, and the model's attention then takes a mean over its whole row, past and "
    "future; let every token see itself, give scaled_dot_product_attention a boolean mask (its mean of no keys is "
    "zero), or call the model on padded rows"
)

_COUNTS = (
    "under treefx.use(forest) the inputs hold a shared token once, but {operator} changes {buffer} by what they hold "
    "({line}), and separate rows would count that token once each. Call the model on a padded batch without "
    "treefx.use, or compute the statistic outside of the model, from forest.token_of"
)


_SEVERAL = (
    "under treefx.use(forest) the inputs should be [1, N] values of the forest's tokens, got {name} of shape {shape}: "
    "a forest does not know which rows agree on it. Call the model on a padded batch without treefx.use, which shares "
    "as far as rows agree on all of their inputs"
)


_Kind: TypeAlias = Literal["depth", "ones", "ids"]
_KEPT = 64
_KEPT_BY_MODEL = ("parameter", "buffer")


class ByColumn(NamedTuple):
    """Inputs of a native call as functions of the column.

    ``form`` is equal for calls whose ``args`` are, but for parameters and buffers; None where other tensors come with
    the call.
    """

    args: list[Any]
    form: Hashable | None


class NativeRun:
    """Run a graph on the packed row of a forest.

    Args:
        gm: Dynamo's graph.
        roles: Role of each placeholder.
        packed: Runs a variant.
        records: Where to report.
        size: Of packed rows. Its ranks share the graph, which may take for granted that they can divide its columns.
    """

    def __init__(
        self, gm: fx.GraphModule, roles: list[str], packed: PackedRun, records: Records, size: PackedSize
    ) -> None:
        self._gm, self._counts = gm, dict[tuple[int, ...], str | None]()
        self._roles, self._packed, self._records, self._size = roles, packed, records, size
        nodes = zip(gm.graph.find_nodes(op="placeholder"), roles, strict=True)
        self._given = [i for i, (node, role) in enumerate(nodes) if role not in _KEPT_BY_MODEL or is_number_input(node)]
        self._columns, self._known = 0, Bounded[Any, frozenset[Expr]](_KEPT)

    def by_column(self, args: Sequence[Any], forest: Forest) -> ByColumn | None:
        """Return the inputs of a native call as functions of the column.

        None for a graph without the packed row.

        Where Dynamo left the length symbolic, they are as long as the deepest path of all calls rounded up, not as the
        forest: one compilation then serves all forests that are no deeper.
        """
        count = forest.num_tokens
        rows, numbers, others = list[int](), list[int](), False
        for i in self._given:
            x = args[i]
            if type(x) is int and x == count:
                numbers.append(i)
            elif not isinstance(x, Tensor):
                continue
            elif x.shape == (1, count) and self._roles[i] == "input":
                rows.append(i)
            else:
                others = True
        if not rows:
            return None
        if others:
            self._check_values(args, count)
        self._check_changes(tuple(sorted(rows + numbers)))
        if numbers:
            self._columns = max(self._columns, _capacity(forest, self._size.ranks))
        columns, result, kinds = self._columns if numbers else count, list(args), dict[int, _Kind]()
        for i in rows:
            kinds[i] = _kind_of(args[i], forest)
            result[i] = _of_columns(kinds[i], args[i], columns)
        for i in numbers:
            result[i] = columns
        if others:
            return ByColumn(result, None)
        form = list[Hashable]([columns])
        for i in self._given:
            x = result[i]
            form.append((kinds[i], x.dtype, x.device) if i in kinds else (type(x), x))
        return ByColumn(result, tuple(form))

    def run(
        self, shape: Shape, args: Sequence[Any], by_column: list[Any], forest: Forest, form: Hashable | None
    ) -> Any:
        """The native level: the graph's row is the packed row of a forest.

        Args:
            shape: The analysis, and its code.
            args: The tensors of the call.
            by_column: The same as functions of the column.
            forest: The forest, or a part of it.
            form: That of the call, see ``ByColumn``.
        """
        tokens = shape.analysis.tokens
        assert tokens is not None
        position = shape.analysis.position_of_ids
        ids = args[position]
        if ids.shape != (1, forest.num_tokens) or not torch.equal(ids[0].cpu(), forest.tokens.cpu().to(ids.dtype)):
            raise wrong_row(forest, [ids.shape])
        _check_sight(shape, by_column, position, forest)
        cut = forest.cut if isinstance(forest, CutRow) else None
        batch = forest_batch(forest, ids.device, tokens.rows, tokens.columns, self._size if cut is None else None)
        redundant = self._redundant(shape, by_column, form)
        part = forest.part_tokens if isinstance(forest, EdgeSubset) else None
        counts = (forest.raw_tokens, forest.num_tokens) if part is None else part
        report = self._records.report
        (report.raw_tokens, report.tokens), report.trie = counts, (weakref.ref(forest), redundant)
        by_column[position] = torch.cat([ids, ids[:, :1].expand(1, batch.size - batch.tokens)], 1)
        variant = Variant(native=True, redundant=redundant, part=None if cut is None else cut.run)
        ran_on_forest()
        results = self._packed.run(shape, variant, by_column, batch, cut)
        if isinstance(results, Reason):
            raise UnsupportedError(results.text, results.code)
        packed, plain = shape.analysis.packed_outputs, shape.analysis.plain_outputs
        tokens_of = [value[None, : batch.tokens] if i in packed else value for i, value in enumerate(results)]
        others = packed.keys() - plain
        return tuple([rows_in_order(x, packed[i]) if i in others else x for i, x in enumerate(tokens_of)])

    def _redundant(self, shape: Shape, by_column: Sequence[Any], form: Hashable | None) -> frozenset[Expr]:
        """The conditions that all tokens meet: known for a form, where no buffer decides."""
        found = None if form is None else self._known.get((shape, form))
        if found is None:
            found = shape.padding.redundant(shape.grid(by_column), None, native=True)
            if form is not None and not shape.padding.buffers_decide:
                self._known[shape, form] = found
        return found

    def _check_values(self, args: Sequence[Any], count: int) -> None:
        """Raise if an input has several values for each token of the packed row.

        A forest knows ids and depths.
        """
        given = list(zip(self._gm.graph.find_nodes(op="placeholder"), args, self._roles, strict=True))
        has_ids = any([role == "input" and isinstance(x, Tensor) and x.shape == (1, count) for _, x, role in given])
        if not has_ids or "parameter" not in self._roles:
            return  # a graph without ids is refused elsewhere, and one without parameters is not the model
        for node, x, role in given:
            shape = tuple(x.shape) if isinstance(x, Tensor) and role == "input" else ()
            if len(shape) > 2 and (shape[:2] == (1, count) or len(shape) == 3 and shape[1:] == (1, count)):
                raise UnsupportedError(_SEVERAL.format(name=name_of_input(node), shape=list(shape)))

    def _check_changes(self, positions: tuple[int, ...]) -> None:
        """Raise if the model changes a buffer by the values of some inputs."""
        if positions not in self._counts:
            found = changed_by(self._gm, positions)
            self._counts[positions] = None if found is None else _describe(*found)
        reason = self._counts[positions]
        if reason is not None:
            raise UnsupportedError(reason)


def _describe(operator: fx.Node, changed: fx.Node) -> str:
    name = str(getattr(operator.target, "__name__", operator.target))
    return _COUNTS.format(buffer=name_of_input(changed), operator=name, line=user_line(operator))


def _check_sight(shape: Shape, by_column: Sequence[Any], position: int, forest: Forest) -> None:
    """Raise if a token sees no key where the model then averages its row's past and future.

    No forest has these; ``position`` is that of the token ids. Tokens of a part are checked with all of their paths.
    """
    if not shape.padding.may_blind:
        return
    whole = forest.uncut if isinstance(forest, CutRow) else forest
    paths = whole.sequences()
    for path in paths if shape.padding.ids_may_blind else [max(paths, key=len)]:
        args, columns = list(by_column), by_column[position].shape[1]
        args[position] = torch.nn.functional.pad(path, (0, columns - len(path))).to(by_column[position])[None]
        keep = torch.arange(columns, device=path.device)[None] < len(path)
        if len(path) > columns or not shape.padding.is_defined(shape.grid(args), keep):
            raise UnsupportedError(_BLIND)


def wrong_row(forest: Forest, shapes: Sequence[Sequence[int]]) -> ForestError:
    """The error of inputs that are not the packed row of the forest in use."""
    given = ", ".join(str(list(shape)) for shape in shapes)
    return ForestError(
        f"under treefx.use(forest) the model expects the forest's packed row, input_ids [1, {forest.num_tokens}] "
        f"of its tokens, got inputs of shape {given} with others; call it with **forest.model_inputs()"
    )


def _capacity(forest: Forest, ranks: int) -> int:
    """Return the columns to compile for.

    The longest path is rounded up to a power of two, and to a multiple of the ranks.
    """
    columns = max(16, 1 << forest.deepest.bit_length())
    return columns + -columns % ranks


def _kind_of(value: Tensor, forest: Forest) -> _Kind:
    """Return which input of the native level a row is."""
    given = value[0].cpu().long()
    if torch.equal(given, forest.depth.cpu().long()):
        return "depth"
    if bool((value == 1).all()):
        return "ones"
    if torch.equal(given, forest.tokens.cpu().long()):
        return "ids"
    raise ForestError(
        "under treefx.use(forest) the [1, N] inputs must be the forest's tokens (input_ids), its depth (position_ids) "
        "or all ones (attention_mask), got other values; pass **forest.model_inputs() of the forest in use"
    )


def _of_columns(kind: _Kind, value: Tensor, columns: int) -> Tensor:
    """Return an input as a function of the column; token ids become a number that proves nothing about them."""
    if kind == "depth":
        return torch.arange(columns, device=value.device, dtype=value.dtype)[None]
    return value.new_full((1, columns), 1 if kind == "ones" else -1)
