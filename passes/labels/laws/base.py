"""Define token-wise laws: labelled dimensions of results from those of operands.

A law is a function ``(call) -> Fact``; its docstring is one sentence of mathematics. It holds for values computed
once per distinct token exactly as for values computed on rows, because no law lets an element depend on another
token. Its backward is linear and counts no tokens (``gradient_laws``). An operator without a law, or one used in a way
its law does not cover (``NoLaw``), reads expanded values instead.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from treefx.passes.labels.dims import NoLaw
from treefx.passes.labels.facts import (
    Axis,
    Dims,
    Fact,
    Kind,
    fact_of,
    plain_dims,
    shape_of,
    token_axes,
)
from treefx.passes.labels.uniformity import is_uniform

__all__ = ["LABELLED", "Call", "Law", "aligned", "find_law", "law", "law_where", "reads_columns"]

aten = torch.ops.aten
_AT_COLUMNS = "treefx_at_columns"
LABELLED = {Kind.PREFIX, Kind.PACKED, Kind.SCORE}


@dataclass(frozen=True)
class Call:
    """One operator call seen by a law."""

    node: fx.Node

    def arg(self, index: int, name: str, default: Any = None) -> Any:
        """A positional or keyword argument."""
        if index < len(self.node.args):
            return self.node.args[index]
        return self.node.kwargs.get(name, default)

    def node_arg(self, index: int) -> fx.Node:
        """A positional argument that is a value of the graph."""
        found = self.node.args[index]
        assert isinstance(found, fx.Node)
        return found

    @property
    def operands(self) -> list[fx.Node]:
        """The tensor operands, each once."""
        return [node for node in self.node.all_input_nodes if "val" in node.meta]

    def labelled(self, node: Any) -> bool:
        """Whether a value carries labelled dimensions."""
        return isinstance(node, fx.Node) and fact_of(node).kind in LABELLED

    def dims(self, node: fx.Node) -> Dims:
        """Dimensions of an operand: labelled, or plain for an invariant one."""
        fact = fact_of(node)
        if fact.dims is not None:
            return fact.dims
        if fact.kind is not Kind.INVARIANT:
            raise NoLaw("reads a value computed per row")
        return plain_dims(shape_of(node))

    def result(self, dims: Dims, law: Any = None) -> Fact:
        """The fact of a single result: packed if an operand is, or if a parameter takes part."""
        facts = [fact_of(node) for node in self.operands]
        learned = any(fact.learned for fact in facts)
        kinds = {fact.kind for fact in facts}
        kind = Kind.PACKED if Kind.PACKED in kinds or learned else Kind.PREFIX
        if Kind.SCORE in kinds or Axis.KEY in token_axes(dims):
            kind = Kind.SCORE  # a function of scores may have lost its keys (their maximum) and is still only lifted
        return Fact(kind, dims, law=law, learned=learned)


Law = Callable[[Call], Fact]
_LAWS: dict[tuple[Any, Kind | None], Law] = {}
_FAMILIES: list[tuple[Callable[[Any], bool], Law]] = []


def law(*targets: Any, of: Kind | None = None) -> Callable[[Law], Law]:
    """Register a law for operators, or for a kind of operands.

    A packet stands for all its overloads.
    """

    def register(function: Law) -> Law:
        for target in targets:
            overloads = (
                [getattr(target, name) for name in target.overloads()]  # type: ignore[no-untyped-call]
                if isinstance(target, torch._ops.OpOverloadPacket)
                else [target]
            )
            _LAWS.update(dict.fromkeys([(overload, of) for overload in overloads], function))
        return function

    return register


def law_where(holds: Callable[[Any], bool]) -> Callable[[Law], Law]:
    """Register a law for all operators of a family that have none of their own."""

    def register(function: Law) -> Law:
        _FAMILIES.append((holds, function))
        return function

    return register


def find_law(target: Any, of: Kind | None = None) -> Law | None:
    """The law of an operator: its own, or that of its family; None if it has none."""
    if (target, of) in _LAWS:
        return _LAWS[target, of]
    return next((found for holds, found in _FAMILIES if of is None and holds(target)), None)


def aligned(call: Call, node: fx.Node, dims: Dims) -> None:
    """Check that an invariant operand fits next to labelled dimensions (right-aligned).

    Along a token axis it is read at the token's column; along a row axis it must not vary.

    Raises:
        NoLaw: It would have to be known per row, per slot or per key.
    """
    shape = shape_of(node)
    for offset in range(1, len(shape) + 1):
        size, dim = shape[-offset], dims[-offset] if offset <= len(dims) else ()
        axes = [factor.axis for factor in dim if factor.axis is not Axis.PLAIN]
        if size == 1 or not axes:
            continue
        if axes == [Axis.TOKEN] and len(dim) == 1:
            call.node.meta[_AT_COLUMNS] = True
            continue
        if axes == [Axis.ROW] and len(dim) == 1 and is_uniform(node, len(shape) - offset):
            continue
        raise NoLaw(f"meets a value that varies along the {'/'.join(a.name.lower() for a in axes)} axis")


def reads_columns(node: fx.Node) -> bool:
    """Return whether a labelled operator reads an invariant operand at columns of tokens."""
    return _AT_COLUMNS in node.meta
