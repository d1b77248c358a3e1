"""Why a call does not run on its distinct tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from treefx.reason_codes import code_of_cause

__all__ = ["Cause", "Reason"]


class Cause(Enum):
    """Name the reason for a call on rows; code decides by this, people read the text."""

    NO_TOKENS = "no token ids in the graph"
    NO_ATTENTION = "no attention in the graph"
    GRAPH_BREAK = "a graph break"
    CACHE = "a cache of earlier tokens"
    INPUT = "an input of another form"
    TRACE = "a graph that cannot be traced"
    OPERATOR = "an operator without a law"
    UNPROVED = "a model that is not proved"
    SIZES = "sizes that have to be numbers"
    SEGMENTS = "sequences of a packed row that are not told apart"
    MANY_SHAPES = "more shapes than are kept"
    MANY_BUFFERS = "more values of buffers than are kept"
    LATER = "memory or files that failed"
    VALUES = "values of this call"
    HOOKS = "hooks in another order"


_PASSING = {Cause.MANY_SHAPES, Cause.MANY_BUFFERS, Cause.LATER}


@dataclass(frozen=True)
class Reason:
    """Why a call runs on rows.

    Attributes:
        cause: by which code decides.
        text: for people; "" for a graph without token ids, which is not reported.
        operator_code: the code of the operator that the text names, where it names one.
        note: of a graph without attention: notes the keys of its outputs for later graphs, from the tensors and the
            results of a call.
    """

    cause: Cause
    text: str
    operator_code: str | None = None
    note: Callable[[Sequence[Any], Sequence[Any]], None] | None = field(default=None, compare=False, repr=False)

    def __str__(self) -> str:
        return self.text

    @property
    def code(self) -> str:
        """Return the stable code, see ``treefx.reason_codes``.

        The code of an operator is more exact than that of the call.
        """
        return self.operator_code or code_of_cause(self.cause.name)

    @property
    def passes(self) -> bool:
        """Whether it holds for this call and not for the model."""
        return self.cause in _PASSING
