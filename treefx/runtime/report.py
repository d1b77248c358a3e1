"""Record facts of each graph, for ``treefx.inspect``."""

from __future__ import annotations

import itertools
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, MutableMapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, Protocol, TypeAlias

from torch import Tensor, fx
from torch.utils.weak import WeakIdKeyDictionary

from treefx.config import Config
from treefx.passes.analysis import Analysis, Rewritten
from treefx.runtime.call_log import CallLog, LoggedCall
from treefx.runtime.lost_sharing.distinct_tokens import CallRows, Counts
from treefx.runtime.reason import Reason
from treefx.runtime.run_record import RECORD, ModelKey
from treefx.runtime.steps import Steps, steps_of

__all__ = [
    "NO_ATTENTION",
    "NO_IDS",
    "GraphReport",
    "KeptGraph",
    "Parameters",
    "ReportingGraph",
    "Reports",
    "Run",
    "find",
    "models_of_the_run",
    "register",
]

Trie: TypeAlias = tuple[Callable[[], Any], Collection[Any]]
"""A weak reference to a ``Batch`` or a forest, and conditions of masks that all its tokens meet."""
Parameters: TypeAlias = MutableMapping[Tensor, None]
"""Tensors by identity, held weakly: a number such as ``id`` may pass to another tensor."""


NO_ATTENTION = "the graph has no attention or recurrence, so that running it on distinct tokens would not pay"
"""Why a graph with token ids runs on rows that holds little but lookups."""
NO_IDS = (
    "no input [B, T] of the graph is looked up in an embedding, so no input shows which positions are the same "
    "token; ids [T] without a dimension of rows run unchanged (ids[None] is a row)"
)
"""Why a graph with weights runs unchanged, where no graph break explains it."""


@dataclass
class GraphReport:
    """Report one graph of Dynamo.

    Counters grow over calls; the token figures are those of the last call.
    """

    has_tokens: bool = False
    raw_tokens: int = 0
    """Tokens under the mask in the last call."""
    tokens: int = 0
    """Distinct tokens that ran in the last call; as many as ``raw_tokens`` where it ran on rows."""
    distinct_tokens: int | None = None
    """Distinct tokens of the last call, whether or not they ran once; None where nothing counted them."""
    rows: CallRows | None = None
    """The token ids of the last call, where it ran on rows for a reason: counted when they are asked for."""
    head_tokens: int | None = None
    """Positions that the LM head of a converted model ran on in the last call; None if not counted."""
    rows_of_call: int = 0
    """Which call ``rows`` are of, counted from 1."""
    attention_layers: int = 0
    """Attentions of the graph that runs, whether or not they run on the tree."""
    attention_rewritten: int = 0
    recurrences_rewritten: int = 0
    """Linear recurrences (Mamba 2, gated delta nets) that run once per distinct token."""
    products_on_rows: int = 0
    """Products with a trained weight that run on most columns of every row of a graph that runs packed."""
    expansions: list[dict[str, Any]] = field(default_factory=list)
    reason: Reason | None = None
    """Why the last call did not run packed, or None. Low sharing is a choice, not a reason."""
    ran: str = "nothing"
    """"packed", "ordinary" or "nothing": the kind of the last run."""
    way: Literal["rows", "forest", "converted"] = "rows"
    """The last call's input: rows [B, T] to a compiled graph, a forest, or rows to a converted model."""
    feeds_others: bool = False
    """Whether the last call had no attention, and noted its tokens' keys for later graphs."""
    cut: str | None = None
    """The graph break that keeps token ids or attention away from the graph; None without one."""
    calls_on_rows: int = 0
    """Calls that ran on rows for a reason."""
    warned: bool = False
    """Whether the user was warned of that."""
    compiles: int = 0
    shapes: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    graphs: dict[str, fx.GraphModule] = field(default_factory=dict)
    frame: int | None = None
    """Dynamo's number of the function the graph came from; its recompilations share it."""
    parameters: Parameters = field(default_factory=WeakIdKeyDictionary)
    """The parameters it ran with, the keys: two models of one class share a graph, and each has a report."""
    steps: Steps = field(default_factory=Steps)
    """The calls of an optimizer step together, shared by all graphs of the model."""
    calls: int = 0
    last_call: int = 0
    """Place of the last call among the calls of all graphs: of two graphs, the larger one ran later."""
    trie: Trie | None = None
    """The trie of the last call that had one, as long as others keep it, and the conditions left out of it."""
    log: CallLog = field(default_factory=CallLog)
    """The calls before the last one."""
    model: ModelKey | None = None
    """The model in the record of the run; None where there is none."""

    def count_call(self) -> None:
        """Count a call and note its number; log the previous one, whose figures are complete."""
        if self.calls:
            self.log.calls.append(self.logged())
        self.log.seconds, self.log.compiles_before = None, self.compiles
        self.calls += 1
        self.last_call = next(_clock)

    def logged(self) -> LoggedCall:
        """The last call as the log keeps it."""
        return LoggedCall(
            self.last_call, self.ran, self.raw_tokens, self.tokens, self.distinct_tokens, self.reason,
            self.log.seconds, self.compiles - self.log.compiles_before,
        )  # fmt: skip

    def keep_rows(self, rows: CallRows | None) -> None:
        """Keep the token ids of the call under way, which runs on rows for a reason."""
        self.rows, self.rows_of_call = rows, self.calls if rows is not None else 0

    def note_analysis(self, analysis: Analysis) -> None:
        """Note the proofs of an analysis of the graph about to run."""
        self.has_tokens = True
        self.attention_layers = len(analysis.attentions) + analysis.attentions_on_rows
        self.attention_rewritten, self.recurrences_rewritten = len(analysis.attentions), analysis.recurrences
        self.products_on_rows = analysis.products_on_rows
        self.expansions = [{**asdict(item), "code": item.code} for item in analysis.expansions]

    def note_block(self) -> None:
        """Note that the graph got distinct tokens and their tree.

        The report of the converted model has the figures.
        """
        self.ran, self.way, self.reason, self.has_tokens = "packed", "converted", None, False
        self.attention_layers = self.attention_rewritten = self.recurrences_rewritten = self.products_on_rows = 0
        self.expansions = []

    def note_rows(self, reason: Reason | None) -> None:
        """Note that the call runs every row: for a reason, or (None) because it shares too little.

        Figures of the tokens stay only in the second case, where the call counted them before.
        """
        self.reason, self.ran, self.way, self.feeds_others = reason, "ordinary", "rows", False
        if reason is not None or not self.has_tokens:
            self.raw_tokens, self.tokens, self.distinct_tokens = 0, 0, None

    @property
    def fallback(self) -> str | None:
        """The text of the reason."""
        return None if self.reason is None else self.reason.text

    @property
    def counts(self) -> Counts | None:
        """Return tokens and distinct tokens of the last call, counted lazily."""
        if self.ran == "packed":
            return Counts(self.raw_tokens, self.tokens) if self.tokens else None
        if self.distinct_tokens is not None:
            return Counts(self.raw_tokens, self.distinct_tokens)
        return None if self.rows is None else self.rows.counts

    @property
    def sharing_ratio(self) -> float:
        """Raw over distinct tokens of the last call; 1 where all of it is padding."""
        return self.raw_tokens / self.tokens if self.tokens and self.raw_tokens else 1.0


_MOST_MODELS = 256
"""That a record of the run keeps of one graph."""


class Reports:
    """The reports of one graph: one per model that ran it, gone with the model.

    Args:
        frame: Dynamo's number of the function the graph came from.
        graphs: The graph's stages, shared by all reports.
    """

    def __init__(self, frame: int | None, graphs: dict[str, fx.GraphModule]) -> None:
        self._frame, self._graphs = frame, graphs
        self._by_model: MutableMapping[Tensor, GraphReport] = WeakIdKeyDictionary()
        self._without_parameters: GraphReport | None = None
        self._of_the_run: deque[GraphReport] = deque(maxlen=_MOST_MODELS)
        """Also of models that are gone, where the run is recorded."""

    def of(self, parameters: Sequence[Tensor]) -> GraphReport:
        """Return the report of the model with these parameters; the first one identifies it."""
        known = self._by_model.get(parameters[0]) if parameters else self._without_parameters
        if known is not None:
            return known
        made = GraphReport(frame=self._frame, graphs=self._graphs, steps=steps_of(parameters))
        made.parameters.update(dict.fromkeys(parameters))
        made.model = RECORD.key_of(parameters)
        if made.model is not None:
            self._of_the_run.append(made)
        if parameters:
            self._by_model[parameters[0]] = made
        else:
            self._without_parameters = made
        return made

    def all(self) -> list[GraphReport]:
        """Those of the models that are still there, and of all models where the run is recorded."""
        if self._of_the_run:
            return [*self._of_the_run]
        others = [] if self._without_parameters is None else [self._without_parameters]
        return [*self._by_model.values(), *others]


class ReportingGraph(Protocol):
    """Define the inspector's view of a graph that the backend returned to Dynamo."""

    config: Config

    @property
    def reports(self) -> list[GraphReport]:
        """One report per model that ran the graph."""

    @property
    def rewrites(self) -> list[Rewritten]:
        """The rewritten graphs in which the inspector can describe attentions."""


@dataclass(eq=False)
class KeptGraph:
    """Hold the facts of hooks without their model."""

    config: Config
    reports: list[GraphReport]
    rewrites: list[Rewritten]


@dataclass(frozen=True)
class Run:
    """One graph as one model ran it."""

    graph: ReportingGraph
    report: GraphReport


_clock = itertools.count(1)
_graphs: list[weakref.ref[ReportingGraph]] = []


def register(graph: ReportingGraph, kept: ReportingGraph | None = None) -> None:
    """Remember a compiled graph for the inspector, as long as Dynamo keeps it.

    Args:
        graph: Of Dynamo, or the hooks of a converted model.
        kept: Replacement in the record of the run, if the graph holds the model.
    """
    _graphs[:] = [ref for ref in _graphs if ref() is not None]
    _graphs.append(weakref.ref(graph))
    if RECORD.is_on:
        RECORD.graphs.append(kept or graph)


def models_of_the_run() -> list[tuple[str, list[Run]]]:
    """List the models of a recorded run: their classes, and their runs in order."""
    found: dict[ModelKey, list[Run]] = {}
    for graph in RECORD.graphs:
        for report in graph.reports:
            if report.model is not None and report.calls:
                found.setdefault(report.model, []).append(Run(graph, report))
    return [(key.name, found[key]) for key in sorted(found)]


def find(parameters: Iterable[Tensor]) -> list[Run]:
    """List runs with any of the given tensors, in order of compilation."""
    wanted = list(parameters)
    alive = [graph for ref in _graphs if (graph := ref()) is not None]
    return [
        Run(graph, report)
        for graph in alive
        for report in graph.reports
        if any(parameter in report.parameters for parameter in wanted)
    ]
