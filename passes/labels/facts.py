"""Keep the facts of each value on its node, under one key.

Every value of the traced graph belongs to one kind. The token axes of a packed value are named by *factors*: a
dimension is an ordered product of factors, so that a view only regroups factors and sizes are never guessed.
"""

from __future__ import annotations

import abc
import enum
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from treefx.kernels.score import Expr

__all__ = [
    "ALONG_ROWS",
    "FACT",
    "Axis",
    "Dims",
    "Fact",
    "Factor",
    "Kind",
    "Lifted",
    "ReadsOthers",
    "ancestors",
    "fact_of",
    "plain_dims",
    "set_fact",
    "shape_of",
    "token_axes",
    "watching",
]

FACT = "treefx"
"""Where a node keeps its fact."""


class Kind(enum.Enum):
    """How a value depends on the rows of the batch, and in which form it is computed."""

    INVARIANT = "invariant"
    """Same for every row: parameters, buffers, constants, arange."""
    PREFIX = "prefix"
    """[B, T, ...], computed in full from inputs alone; (b, t) depends on row b up to t, so it may be gathered."""
    PACKED = "packed"
    """Like PREFIX, but computed once per distinct token."""
    SCORE = "score"
    """[.., query, key] attention scores or probabilities: never materialised packed, only lifted into attention."""
    ROW = "row"
    """Any other function of the rows: computed in full, on expanded operands."""


class Axis(enum.Enum):
    """Name the meaning of a factor of a dimension."""

    ROW = "B"
    TOKEN = "T"
    KEY = "U"
    SLOT = "S"
    """Tokens times choices in the order of a sort: the slots of a mixture of experts."""
    PLAIN = ""


def as_number(size: Any) -> Any:
    """A size that is the same in every batch as a number; a symbol otherwise."""
    return int(size) if isinstance(size, torch.SymInt) and size.node.expr.is_Integer else size


@dataclass(frozen=True)
class Factor:
    """One factor of a dimension.

    ``size`` is its extent in the traced (full) graph. ``repeated`` marks a plain factor along which the value was
    expanded from size one, such as the group axis of ``repeat_kv``.
    """

    axis: Axis
    size: int
    repeated: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", as_number(self.size))

    def __hash__(self) -> int:
        return hash((self.axis, str(self.size), self.repeated))  # a symbol has no hash

    def __repr__(self) -> str:
        return f"{self.axis.value}{self.size}{'*' if self.repeated else ''}"


Dims = tuple[tuple[Factor, ...], ...]
ALONG_ROWS = "along rows"
"""The ``law`` of a PREFIX value that reads earlier columns too, such as a running sum: it only exists in full."""


class ReadsOthers(abc.ABC):
    """Mark a ``law`` with a packed form that reads other nodes than its operator."""

    @abc.abstractmethod
    def reads(self) -> list[fx.Node]:
        """Return the nodes that the rewritten form reads."""


class Lifted(ReadsOthers):
    """Describe in expressions how each query meets each key (``treefx.kernels.score``)."""

    @abc.abstractmethod
    def tells_apart(self) -> list[Expr]:
        """Return the expressions with inputs that distinguish tokens."""

    @abc.abstractmethod
    def hides(self) -> tuple[Expr, ...]:
        """Conditions on the key's token alone, which may be left out where all tokens meet them."""


@dataclass(frozen=True)
class Fact:
    """Everything label_tokens found out about one value.

    ``dims`` is None where the dimensions carry no labels (INVARIANT, ROW). ``parts`` holds the facts of the results of
    an operator with several. ``law`` holds further facts for the rewriting: a lifted attention, a
    permutation of expert slots, a loss sink.
    """

    kind: Kind
    dims: Dims | None = None
    parts: tuple[Fact, ...] | None = None
    law: Any = None
    learned: bool = False
    """Whether a trained parameter takes part in the value."""
    reason: str | None = field(default=None, compare=False)
    """Why this node reads expanded values (ROW nodes with packed operands only)."""
    obstacle: str | None = field(default=None, compare=False)
    """Why a trained value is computed per row although nothing before it is packed or per row."""
    blame: str | None = field(default=None, compare=False)
    """The operator to name in the report where it is another than this node's."""


def fact_of(node: fx.Node) -> Fact:
    """The fact of a node.

    Raises:
        KeyError: The analysis has not visited the node.
    """
    looked = _looked.get()
    if looked is not None:
        looked.add(node)
    fact: Fact = node.meta[FACT]
    return fact


_looked: ContextVar[set[fx.Node] | None] = ContextVar("looked", default=None)


@contextmanager
def watching() -> Iterator[set[fx.Node]]:
    """Record the nodes with facts read in the block, without those of an inner watch."""
    found: set[fx.Node] = set()
    token = _looked.set(found)
    try:
        yield found
    finally:
        _looked.reset(token)


def set_fact(node: fx.Node, fact: Fact) -> None:
    """Write the fact of a node."""
    node.meta[FACT] = fact


def plain_dims(shape: Sequence[int]) -> Dims:
    """Dimensions without labels; a dimension of size one is an empty product."""
    return tuple((Factor(Axis.PLAIN, size),) if size != 1 else () for size in shape)


def token_axes(dims: Dims) -> set[Axis]:
    """The labelled axes that occur in ``dims``."""
    return {factor.axis for dim in dims for factor in dim if factor.axis is not Axis.PLAIN}


def shape_of(node: fx.Node) -> torch.Size:
    """Return the full shape of a node with one tensor result; cancelled symbols are numbers."""
    shape: torch.Size = node.meta["val"].shape
    return torch.Size(map(as_number, shape))


def ancestors(*nodes: fx.Node) -> Iterable[fx.Node]:
    """All nodes that the given ones depend on, nearest first."""
    seen: set[fx.Node] = set()
    stack = list(nodes)
    while stack:
        for source in stack.pop().all_input_nodes:
            if source not in seen:
                seen.add(source)
                stack.append(source)
                yield source
