"""Register emitters of packed forms, by the law of an operator or of a fact.

An emitter sees the graph through ``Packer`` alone; ``pack_tokens`` walks the graph and looks emitters up.
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

__all__ = ["HIDING", "SIGHT", "Emitter", "Packer", "emits", "emits_full", "find_emitter", "find_full_emitter"]

T = TypeVar("T")

HIDING = (
    "scores of this call are too large for the fill of a mask to hide keys; fill masks with -inf or "
    "torch.finfo(dtype).min"
)
"""Message for a mask that does not hide all it should (``treefx.passes.scores.hidden``)."""
SIGHT = (
    "a position sees no key in this call, and the model's attention then takes a mean over its whole row, past and "
    "future; let every position see a key"
)
"""Message for an attention whose conditions a parameter decides."""


class Packer(Protocol):
    """Provide forms of a graph's values, made on demand, and facts of the call."""

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
    """Inputs that the graph writes to, and their new values."""
    proofs: list[tuple[str, Tensor]]
    """Facts that only the numbers of a call prove: the message where one fails (``HIDING``), and a bool scalar."""

    @property
    def metadata(self) -> Metadata:
        """The trie of the call being traced."""

    def full(self, node: Any) -> Any:
        """The value as the traced graph has it."""

    def packed(self, node: Any) -> Any:
        """The value once per distinct token."""

    def once(self, name: str, of: Any, make: Callable[[], T]) -> T:
        """Make a value once per call for several emitters."""

    def call(self, node: fx.Node, *, align: Dims | None = None, only: Sequence[int] | None = None) -> Any:
        """Run the node's operator on packed operands; align invariant ones to ``align``.

        ``only`` selects positions.
        """

    def operand(self, item: Any, align: Dims | None = None) -> Any:
        """An operand of a packed operator: packed, or an invariant one aligned to ``align``."""

    def shape(self, dims: Dims) -> list[Any]:
        """The packed shape of labelled dimensions."""


Emitter = Callable[[Packer, fx.Node, Fact], Any]
_EMITTERS: dict[Any, Emitter] = {}
_FULL: dict[type, Emitter] = {}


def emits(*laws: Any) -> Callable[[Emitter], Emitter]:
    """Register an emitter of packed forms, by law of operators or type of a fact's law."""

    def register(emitter: Emitter) -> Emitter:
        _EMITTERS.update(dict.fromkeys(laws, emitter))
        return emitter

    return register


def emits_full(law: type) -> Callable[[Emitter], Emitter]:
    """Register an emitter of full forms from packed values, by type of a fact's law."""

    def register(emitter: Emitter) -> Emitter:
        _FULL[law] = emitter
        return emitter

    return register


def find_emitter(node: fx.Node, fact: Fact) -> Emitter | None:
    """Return the emitter of a node's packed form; None for its own operator."""
    return _EMITTERS.get(type(fact.law)) or _EMITTERS.get(find_law(node.target))


def find_full_emitter(fact: Fact) -> Emitter | None:
    """Return the emitter of a node's full form; None for its own operator."""
    return _FULL.get(type(fact.law))
