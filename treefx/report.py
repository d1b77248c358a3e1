"""What treefx did, graph by graph: the facts behind ``treefx.inspect``."""

from __future__ import annotations

import itertools
import weakref
from dataclasses import dataclass, field
from typing import Protocol

from torch import fx

from treefx.config import Config
from treefx.passes.pipeline import Rewritten

__all__ = ["GraphReport", "ReportingGraph", "Run", "find", "register"]


@dataclass
class GraphReport:
    """One graph of Dynamo. Counters grow over calls; the token figures are those of the last call."""

    has_tokens: bool = False
    raw_tokens: int = 0
    """Tokens under the mask in the last call."""
    tokens: int = 0
    """Distinct tokens that ran in the last call."""
    attention_rewritten: int = 0
    expansions: list[dict[str, str | None]] = field(default_factory=list)
    fallback: str | None = None
    """Why the last call did not run packed, or None. Low sharing is a choice, not a fallback."""
    ran: str = "nothing"
    """"packed", "ordinary" or "nothing": what the last call ran."""
    compiles: int = 0
    shapes: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    graphs: dict[str, fx.GraphModule] = field(default_factory=dict)
    frame: int | None = None
    """Dynamo's number of the function the graph came from; its recompilations share it."""
    parameters: set[int] = field(default_factory=set)
    """``id`` of the parameters it ran with: two models of one class share a graph, and each has a report."""
    calls: int = 0
    last_call: int = 0
    """Place of the last call among the calls of all graphs: of two graphs, the larger one ran later."""

    def count_call(self) -> None:
        """Count a call and note its place among all calls."""
        self.calls += 1
        self.last_call = next(_clock)

    @property
    def sharing_ratio(self) -> float:
        """Raw over distinct tokens of the last call."""
        return self.raw_tokens / self.tokens if self.tokens else 1.0


class ReportingGraph(Protocol):
    """What the backend returns to Dynamo for one graph, as the inspector sees it."""

    config: Config

    @property
    def reports(self) -> list[GraphReport]:
        """One report per model that ran the graph."""

    @property
    def rewrites(self) -> list[Rewritten]:
        """The rewritten graphs in which the inspector can describe attentions."""


@dataclass(frozen=True)
class Run:
    """One graph as one model ran it."""

    graph: ReportingGraph
    report: GraphReport


_clock = itertools.count(1)
_graphs: list[weakref.ref[ReportingGraph]] = []


def register(graph: ReportingGraph) -> None:
    """Remember a compiled graph for the inspector, as long as Dynamo keeps it."""
    _graphs[:] = [ref for ref in _graphs if ref() is not None]
    _graphs.append(weakref.ref(graph))


def find(parameters: set[int]) -> list[Run]:
    """What ran with any of the given tensors (by ``id``), in the order it was compiled."""
    alive = [graph for ref in _graphs if (graph := ref()) is not None]
    return [Run(graph, report) for graph in alive for report in graph.reports if report.parameters & parameters]
