"""The last hundred calls of a graph, for ``treefx.inspect``: a tuple of numbers each."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from treefx.runtime.reason import Reason

__all__ = ["MOST_CALLS", "CallLog", "LoggedCall"]

MOST_CALLS = 100
"""That are kept of one graph."""


class LoggedCall(NamedTuple):
    """One call of a graph.

    ``number`` is its place among the calls of all graphs; ``ran`` is "packed" or "ordinary"; ``seconds`` are those of
    the forward on the host, None where nothing measured them; ``compiles`` are the compilations that it waited for.
    """

    number: int
    ran: str
    raw_tokens: int
    tokens: int
    distinct_tokens: int | None
    reason: Reason | None
    seconds: float | None
    compiles: int


@dataclass
class CallLog:
    """Hold finished calls, and the known facts of the running one."""

    calls: deque[LoggedCall] = field(default_factory=lambda: deque(maxlen=MOST_CALLS - 1))
    seconds: float | None = None
    """Of the last call."""
    compiles_before: int = 0
    """Compilations of the graph before the last call."""
