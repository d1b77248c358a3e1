"""Record the calls of each graph for ``treefx.inspect``, and the sharing of each optimizer step.

A call computes its own distinct tokens once. Rows that share a prefix but come in different calls of a step compute it
once a call. Here the distinct prefixes of all calls of a step are counted together, as if they had been one call.

A step ends where the parameters change, so no caller has to mark it: PyTorch reports the steps of all its optimizers
(some fused ones leave the versions of tensors unchanged), and counts other changes in place (``Tensor._version``). A
call of the very tensor of an earlier call of the step is left out: no optimizer step came between the two, and no order
of rows would merge them. Changes behind PyTorch's back (``parameter.data``) are not seen; then, and in steps of more
than `MOST_TOKENS` tokens, pieces of that size are counted.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, Protocol, TypeAlias

import numpy as np
import torch
from torch import Tensor, fx
from torch._guards import CompileContext
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.weak import WeakIdKeyDictionary

from treefx.config import Config
from treefx.forests.trie import Prefixes
from treefx.passes.analysis import Analysis, Rewritten
from treefx.runtime.call_log import CallLog, LoggedCall
from treefx.runtime.lost_sharing.distinct_tokens import CallRows, Counts
from treefx.runtime.reason import Reason
from treefx.runtime.run_record import RECORD, ModelKey
from treefx.runtime.shapes import Executable
from treefx.runtime.structured_log import log_compiled

__all__ = [
    "GraphReport",
    "KeptGraph",
    "MOST_TOKENS",
    "NO_ATTENTION",
    "NO_IDS",
    "Parameters",
    "Records",
    "ReportingGraph",
    "Reports",
    "Run",
    "StepSharing",
    "Steps",
    "find",
    "models_of_the_run",
    "now",
    "register",
    "stepped_since",
    "steps_of",
    "steps_taken",
    "version_of",
]

MOST_TOKENS = 2**22
"""Most distinct tokens remembered of a step: eight bytes each, or their keys if none is shared."""


_MOST_INPUTS = 64


@dataclass(frozen=True)
class StepSharing:
    """The tokens of the calls of one step.

    Attributes:
        calls: how many calls with gradients there were.
        repeats: how many of them got the tensor of an earlier one; the figures below leave them out.
        raw_tokens: tokens of the rows of all calls.
        tokens: that ran, summed over calls.
        distinct_tokens: that would run if all rows came in one call.
    """

    calls: int
    raw_tokens: int
    tokens: int
    distinct_tokens: int
    repeats: int = 0

    @property
    def ratio(self) -> float:
        """Sharing ratio of the step as it ran."""
        return self.raw_tokens / self.tokens if self.tokens and self.raw_tokens else 1.0

    @property
    def possible(self) -> float:
        """Sharing ratio of the step as one call."""
        return self.raw_tokens / self.distinct_tokens if self.distinct_tokens and self.raw_tokens else 1.0


@dataclass
class _Window:
    """Calls between two changes of the parameters."""

    version: int
    calls: int = 0
    raw_tokens: int = 0
    tokens: int = 0
    repeats: int = 0
    prefixes: list[Prefixes] = field(default_factory=list)
    remembered: int = 0
    """Length of all prefixes."""
    seen: deque[tuple[weakref.ref[Tensor], tuple[int, ...]]] = field(default_factory=lambda: deque(maxlen=_MOST_INPUTS))
    """Token ids of calls, how often each had been changed in place, and the calls' tokens."""

    def repeats_call(self, ids: Tensor | None, raw_tokens: int, tokens: int) -> bool:
        """Whether a call has the tensor and the tokens of an earlier one."""
        if ids is None or ids.is_inference():
            return False
        call = ids._version, raw_tokens, tokens
        for known, earlier in self.seen:
            if known() is ids and earlier == call:
                return True
        self.seen.append((weakref.ref(ids), call))
        return False

    def sharing(self) -> StepSharing:
        """Count lazily: it numbers and sorts the prefixes."""
        distinct = np.unique(np.concatenate([prefixes.numbers for prefixes in self.prefixes]))
        self.prefixes = [Prefixes(len(distinct), lambda: distinct)]
        self.remembered = len(distinct)
        return StepSharing(self.calls, self.raw_tokens, self.tokens, len(distinct), self.repeats)


class Steps:
    """The last two windows of one model: the one under way, and the one before."""

    def __init__(self) -> None:
        self._before: _Window | None = None
        self._now: _Window | None = None
        self.is_announced = False
        """Whether the log has its line about the first compiled call."""

    def count(self, version: int, raw_tokens: int, tokens: int, prefixes: Prefixes, ids: Tensor | None = None) -> None:
        """Count a call with gradients.

        Args:
            version: of the parameters, see `version_of`.
            raw_tokens: tokens of its rows.
            tokens: that ran.
            prefixes: of its distinct tokens.
            ids: the caller's tensor of token ids.
        """
        now = self._now
        if now is None or now.version != version or now.remembered + len(prefixes) > MOST_TOKENS:
            self._before, self._now = now, _Window(version)
            now = self._now
        now.calls += 1
        if now.repeats_call(ids, raw_tokens, tokens):
            now.repeats += 1
            return
        now.raw_tokens += raw_tokens
        now.tokens += tokens
        now.prefixes.append(prefixes)
        now.remembered += len(prefixes)

    def last(self, version: int) -> StepSharing | None:
        """Return the last complete step, or the running one; None if nothing was counted."""
        complete = self._now is not None and self._now.version != version
        window = self._now if complete or self._before is None else self._before
        return None if window is None else window.sharing()


def version_of(parameters: Iterable[Tensor]) -> int:
    """A number that changes with every change of a parameter that is trained."""
    trained = [x for x in parameters if x.requires_grad and not x.is_inference()]
    steps = steps_taken(trained[0]) if trained else 0
    return steps + sum([x._version for x in trained])


_by_model: MutableMapping[Tensor, Steps] = WeakIdKeyDictionary()


def steps_of(parameters: Sequence[Tensor]) -> Steps:
    """Return the step counts of a model by its first parameter; its graphs count together."""
    if not parameters:
        return Steps()
    return _by_model.setdefault(parameters[0], Steps())


@dataclass
class _Steps:
    number: int = 0
    last: int = 0


_step_clock = itertools.count(1)
_of_optimizer: MutableMapping[Optimizer, _Steps] = weakref.WeakKeyDictionary()
_of_parameter: MutableMapping[Tensor, _Steps] = WeakIdKeyDictionary()
"""The steps of the optimizer that a parameter was in at its first step."""


def now() -> int:
    """Return a time, counted in steps and questions, later than all earlier steps."""
    return next(_step_clock)


def steps_taken(parameter: Tensor) -> int:
    """How many steps the optimizer of a parameter has taken."""
    found = _of_parameter.get(parameter)
    return 0 if found is None else found.number


def stepped_since(time: int) -> set[int]:
    """The parameters, by ``id``, of all optimizers that stepped after a time."""
    later = [optimizer for optimizer, steps in list(_of_optimizer.items()) if steps.last > time]
    return {id(x) for optimizer in later for group in optimizer.param_groups for x in group["params"]}


def _count_step(optimizer: Optimizer, *_: Any) -> None:
    if torch.compiler.is_compiling():  # it would be traced into the user's graph, which counts versions anyway
        return
    if optimizer not in _of_optimizer:
        steps = _of_optimizer[optimizer] = _Steps()
        _of_parameter.update((x, steps) for group in optimizer.param_groups for x in group["params"])
    steps = _of_optimizer[optimizer]
    steps.number, steps.last = steps.number + 1, next(_step_clock)


register_optimizer_step_post_hook(_count_step)


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
    noted: weakref.ref[Analysis] | None = None
    """The analysis that these figures are of."""
    is_settled: bool = False
    """Whether the last call ran packed, and no later one of its analysis can lose sharing that a warning would name."""
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
        if self.noted is not None and self.noted() is analysis:
            return
        self.noted, self.is_settled, self.has_tokens = weakref.ref(analysis), False, True
        self.attention_layers = len(analysis.attentions) + analysis.attentions_on_rows
        self.attention_rewritten, self.recurrences_rewritten = len(analysis.attentions), analysis.recurrences
        self.products_on_rows = analysis.products_on_rows
        self.expansions = [{**asdict(item), "code": item.code} for item in analysis.expansions]

    def note_block(self) -> None:
        """Note that the graph got distinct tokens and their tree.

        The report of the converted model has the figures.
        """
        self.ran, self.way, self.reason, self.has_tokens, self.noted = "packed", "converted", None, False, None
        self.attention_layers = self.attention_rewritten = self.recurrences_rewritten = self.products_on_rows = 0
        self.expansions = []

    def note_rows(self, reason: Reason | None) -> None:
        """Note that the call runs every row: for a reason, or (None) because it shares too little.

        Figures of the tokens stay only in the second case, where the call counted them before.
        """
        self.reason, self.ran, self.way, self.feeds_others, self.is_settled = reason, "ordinary", "rows", False, False
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


class Records:
    """Hold the reports of one graph, this thread's call current, and the graphs that ran.

    Args:
        gm: Dynamo's graph.
    """

    def __init__(self, gm: fx.GraphModule) -> None:
        compile_id = CompileContext.current_compile_id()
        self._graphs: dict[str, fx.GraphModule] = {"captured": gm}
        self._reports = Reports(None if compile_id is None else compile_id.frame_id, self._graphs)
        self._current = threading.local()

    def all(self) -> list[GraphReport]:
        """One report per model that ran the graph."""
        return self._reports.all()

    def begin(self, parameters: Sequence[Tensor]) -> None:
        """A call of the model with these parameters."""
        report = self._current.report = self._reports.of(parameters)
        self._current.version = version_of(parameters) if torch.is_grad_enabled() else None
        report.count_call()

    def count_rows(
        self, raw_tokens: int, tokens: int, prefixes: Prefixes | None, ids: Tensor | None = None
    ) -> GraphReport:
        """Count a call of rows in its report; calls without gradients (sampling) belong to no step."""
        report = self.report
        report.raw_tokens, report.tokens = raw_tokens, tokens
        report.distinct_tokens = None if prefixes is None else len(prefixes)
        version, self._current.version = getattr(self._current, "version", None), None  # a call may run twice
        if version is not None and prefixes is not None:
            report.steps.count(version, raw_tokens, tokens, prefixes, ids)
        return report

    @property
    def report(self) -> GraphReport:
        """The report of the model that this thread runs, or ran last."""
        return getattr(self._current, "report", None) or self._reports.of(())

    @contextmanager
    def reporting(self, report: GraphReport) -> Iterator[None]:
        """Let this thread report there, from now on or (a backward in between) for a while."""
        before, self._current.report = self.report, report
        try:
            yield
        finally:
            self._current.report = before

    def count_ordinary(self, seconds: float) -> None:
        """The ordinary graph was compiled."""
        self.report.compiles += 1
        self.report.seconds["ordinary"] = self.report.seconds.get("ordinary", 0.0) + seconds

    def count_compiled(self, executable: Executable) -> None:
        """A variant was compiled."""
        self.report.compiles += 1
        self.report.seconds.update(executable.seconds)
        log_compiled(executable)

    def show(self, executable: Executable) -> None:
        """Publish the running graphs to the inspector."""
        for stage in ("rewritten", "forward", "backward"):
            self._graphs.pop(stage, None)
        self._graphs.update(executable.graphs)
