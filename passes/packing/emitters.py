"""Who makes the packed form of what: emitters, found by the law of an operator or by the kind of what was proved of it.

An emitter sees the graph through ``Packer`` alone; ``pack_tokens`` walks the graph and asks the registry.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from torch import Tensor, fx

from treefx.kernels.score import Expr
from treefx.passes.labels.facts import Dims, Fact
from treefx.passes.labels.laws.base import find_law
from treefx.passes.labels.token_inputs import Tokens
from treefx.passes.packing.layout import Metadata

__all__ = ["Emitter", "Packer", "emits", "emits_full", "find_emitter", "find_full_emitter"]

T = TypeVar("T")


class Packer(Protocol):
    """The forms of a graph's values, made on demand, and what is known of the call."""

    tokens: Tokens
    native: bool
    """Whether the token ids come packed already."""
    own_positions: bool
    """Whether rows start in different columns."""
    redundant: frozenset[Expr]
    """Conditions of attentions that hold for all tokens of the call."""
    absent: frozenset[int]
    """Positions of logits that are not computed."""
    changed: dict[fx.Node, Any]
    """Inputs that the graph writes to, and what it writes there."""
    hidden: list[Tensor]
    """Whether masks hide what they are to hide, for the attentions where only the numbers of the call tell."""

    @property
    def metadata(self) -> Metadata:
        """The trie of the call being traced."""

    def full(self, node: Any) -> Any:
        """The value as the traced graph has it."""

    def packed(self, node: Any) -> Any:
        """The value once per distinct token."""

    def once(self, name: str, of: Any, make: Callable[[], T]) -> T:
        """What is made once per call and read by several emitters."""

    def call(self, node: fx.Node, *, align: Dims | None = None, only: Sequence[int] | None = None) -> Any:
        """The node's own operator on packed operands; invariant ones aligned to ``align`` (at positions ``only``)."""

    def operand(self, item: Any, align: Dims | None = None) -> Any:
        """An operand of a packed operator: packed, or an invariant one aligned to ``align``."""

    def shape(self, dims: Dims) -> list[Any]:
        """The packed shape of labelled dimensions."""


Emitter = Callable[[Packer, fx.Node, Fact], Any]
_EMITTERS: dict[Any, Emitter] = {}
_FULL: dict[type, Emitter] = {}


def emits(*laws: Any) -> Callable[[Emitter], Emitter]:
    """Register what makes the packed form of operators by their law, or of facts by the type of theirs."""

    def register(emitter: Emitter) -> Emitter:
        _EMITTERS.update(dict.fromkeys(laws, emitter))
        return emitter

    return register


def emits_full(law: type) -> Callable[[Emitter], Emitter]:
    """Register what makes the full form of facts whose law is of a type from packed values."""

    def register(emitter: Emitter) -> Emitter:
        _FULL[law] = emitter
        return emitter

    return register


def find_emitter(node: fx.Node, fact: Fact) -> Emitter | None:
    """What makes the packed form of a node; None for its own operator."""
    return _EMITTERS.get(type(fact.law)) or _EMITTERS.get(find_law(node.target))


def find_full_emitter(fact: Fact) -> Emitter | None:
    """What makes the full form of a node; None for its own operator."""
    return _FULL.get(type(fact.law))
