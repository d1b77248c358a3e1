"""Whether tokens are known by their place in their own row, wherever that row starts.

A row that is padded on the left starts in a later column. Its tokens are those of a row without padding only if nothing
that runs once per token reads the column itself: no table of positions by column, no mask that reads more than the
distance of two columns. Positions that the model computes from the mask, or that the caller passes, distinguish tokens
by value instead. Convolutions and recurrences must start there as they do in front of a row (``causal.blanks``).

Rows of 6 columns, ``.`` padding, with positions counted from each row's own start::

    . . a b c d        the tokens a b c are one in both rows: they agree on ids and on positions 0 1 2
    . a b c e f
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence

from torch import Tensor, fx

from treefx.kernels.score import Expr
from treefx.passes.labels.facts import ALONG_ROWS, Kind, ReadsOthers, fact_of, shape_of
from treefx.passes.labels.laws.base import reads_columns
from treefx.passes.labels.purity import impurity
from treefx.passes.labels.token_inputs import Tokens
from treefx.passes.scores.attention_facts import Attention
from treefx.passes.scores.choices import Choice

__all__ = ["find_own_positions"]


class _ByColumn(Exception):
    """Something reads the column itself."""


def find_own_positions(
    gm: fx.GraphModule,
    tokens: Tokens,
    attentions: Sequence[Attention],
    live: Collection[fx.Node],
    redundant: Collection[Expr] = (),
) -> list[fx.Node] | None:
    """The values [B, T] that tell tokens apart where rows may start in different columns.

    Args:
        gm: The labelled graph.
        tokens: Its token axes.
        attentions: Its lifted attentions.
        live: The nodes that an output reads.
        redundant: Conditions that all tokens of a call meet, and that are therefore dropped.

    Returns:
        Functions of the inputs in the order of the graph, to be compared by value (sharing of calls of one step is
        counted by values in this order); None where tokens are only known by their column.
    """
    search = _Search(tokens)
    try:
        for node in live:
            if node.op == "call_function" and fact_of(node).kind is Kind.PACKED:
                search.check_packed(node)
        for attention in attentions:
            asked = [item for item in (*attention.conditions, *attention.padding) if item not in redundant]
            for expr in (attention.score, *asked):
                search.check_expression(expr)
    except _ByColumn:
        return None
    return [node for node in gm.graph.nodes if node in search.found]


class _Search:
    def __init__(self, tokens: Tokens) -> None:
        self.tokens = tokens
        self.found: dict[fx.Node, None] = {}
        self._seen: set[fx.Node] = set()

    def check_packed(self, node: fx.Node) -> None:
        """Check an operator that runs once per token: its reads of inputs and constants."""
        law = fact_of(node).law
        if isinstance(law, Attention):  # its expressions say more
            return
        if reads_columns(node) or isinstance(law, Choice):
            raise _ByColumn
        for operand in _tensors(law.reads() if isinstance(law, ReadsOthers) else node.all_input_nodes):
            if fact_of(operand).kind is Kind.PREFIX:
                self.check_prefix(operand)

    def check_prefix(self, node: fx.Node) -> None:
        """Check a function of the inputs: of tokens alone, or comparable values [B, T]."""
        if node in self._seen:
            return
        self._seen.add(node)
        if node in self.tokens.inputs:
            self.found[node] = None
            return
        if impurity(node) is not None:  # values of the graph cannot be compared
            raise _ByColumn
        by_column = node.op != "call_function" or fact_of(node).law == ALONG_ROWS
        operands = list(_tensors(node.all_input_nodes))
        constants = [item for item in operands if fact_of(item).kind is Kind.INVARIANT]
        if by_column or any(self._may_count_columns(item) for item in constants):
            if tuple(shape_of(node)) != (self.tokens.rows, self.tokens.columns):
                raise _ByColumn
            self.found[node] = None
            return
        for operand in operands:
            if operand not in constants:
                self.check_prefix(operand)

    def _may_count_columns(self, node: fx.Node) -> bool:
        """Whether a constant has as many entries along some dimension as there are columns."""
        columns = self.tokens.columns
        counts = (str(columns), str(columns * self.tokens.rows))  # a symbol is no number, for any batch
        return columns > 1 and any(str(size) in counts for size in shape_of(node))

    def check_expression(self, expr: Expr) -> None:
        """A lifted expression: columns may only occur as their distance, values only by token."""
        if expr in (("sub", ("cq",), ("ck",)), ("sub", ("ck",), ("cq",))) or expr[0] == "dot":
            return
        if expr[0] in ("cq", "ck"):
            raise _ByColumn
        items = expr[1:]
        if expr[0] == "load":
            source, *items = items  # type: ignore[assignment]
            kind = fact_of(source).kind
            if kind is Kind.PREFIX:
                self.check_prefix(source)
            if kind in (Kind.PREFIX, Kind.PACKED):
                items = items[1:]  # the token
        for item in items:
            if isinstance(item, tuple):
                self.check_expression(item)


def _tensors(nodes: Iterable[fx.Node]) -> Iterator[fx.Node]:
    return (node for node in nodes if isinstance(node.meta.get("val"), Tensor))
