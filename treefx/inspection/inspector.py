"""Report the backend's work on a model: ``treefx.inspect``."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any, NamedTuple

import torch
from torch import fx

from treefx.config import Config
from treefx.errors import InputError
from treefx.extras import installed_version
from treefx.inspection.compiled_modules import is_compiled, modules_of
from treefx.inspection.given_up import given_up
from treefx.inspection.graph_diff import OperatorChange, diff_operators, restorations
from treefx.inspection.inner_graphs import trace_inner_graphs
from treefx.inspection.report.material import Material
from treefx.inspection.report.report import Report, make_section
from treefx.inspection.reported import material_of
from treefx.inspection.score_text import describe_attentions
from treefx.inspection.text import mark_restorations, shown_expansions, summarise
from treefx.passes.analysis import Rewritten
from treefx.reason_codes import code_of_cause
from treefx.runtime.observed.observer import observers
from treefx.runtime.reason import Cause
from treefx.runtime.records import NO_IDS, GraphReport, Run, find, version_of
from treefx.runtime.whole.distinct_images import images_run

__all__ = ["STAGES", "Inspection", "inspect", "sources_of", "statistics"]

_BEHIND = (
    "ran every row: treefx.convert shares tokens in the module that takes the ids; compile its blocks one by one, and "
    "not the model"
)
_SECTIONS = {*(item.name for item in fields(Report)), "_attention"}
STAGES = ("captured", "rewritten", "forward", "backward")
"""From Dynamo, after the passes, and as the inner compiler gets them."""


def inspect(compiled: Any) -> Inspection:
    """Report treefx's work on a compiled model, up to now.

    Args:
        compiled: The result of ``torch.compile(..., backend="treefx")`` for a model, or for a function that
            uses one, or a model compiled in place with ``model.compile(backend="treefx")``; called at least
            once.

    Returns:
        The report of all calls until now, with the graphs behind it.

    Raises:
        InputError: It is no model or function, is not compiled, or no graph of treefx has run with its
            parameters.
    """
    modules = modules_of(compiled)
    if not modules:
        raise InputError(
            "treefx.inspect expects a compiled model, or a compiled function that uses a model, got "
            f"{type(compiled).__name__}; pass what torch.compile(model, backend='treefx') returned"
        )
    name = type(getattr(modules[0], "_orig_mod", modules[0])).__name__
    graphs = find(parameter for module in modules for parameter in module.parameters())
    if graphs:
        return Inspection(graphs, name)
    if any("treefx_hooks" in part.__dict__ for module in modules for part in module.modules()):
        raise InputError(
            f"treefx.inspect expects a model that has run, got {name}, which treefx.convert has converted and which "
            "has not been called since; call it once first"
        )
    if observers(parameter for module in modules for parameter in module.parameters()):
        raise InputError(
            f"treefx.inspect expects a model that treefx has changed, got {name}, which is only observed; "
            "use treefx.observed(model)"
        )
    if not is_compiled(compiled):
        raise InputError(
            f"treefx.inspect expects a compiled model, got {name}, which is not compiled; "
            "use torch.compile(model, backend='treefx') or model.compile(backend='treefx'), then call it"
        )
    raise InputError(
        f"treefx.inspect expects a model that treefx has compiled and run, got {name}, with whose parameters "
        "no graph of treefx has run; call it once first, and if that is done, compile it with "
        "backend='treefx' instead of another one"
    )


class Inspection(Report):
    """Report treefx's work on one model as of ``treefx.inspect``, with the graphs behind it.

    Sections of the report are made when they are first read.

    A model may have several graphs of Dynamo: one a piece where Dynamo breaks it, and another for each
    recompilation. Figures of a call are those of the graphs that the last call ran; ``graphs`` shows the one that the
    token ids enter.

    Attributes:
        reports: One per graph that ran last of its piece, in the order they were compiled.
    """

    def __init__(self, graphs: list[Run], name: str = "") -> None:  # not that of Report: sections come from __getattr__
        everything = [graph.report for graph in graphs]
        latest = _of_the_last_call(_latest_of_each_frame(graphs))
        first = _with_tokens(latest)
        self.reports = [replace(graph.report, graphs=dict(graph.report.graphs)) for graph in latest]
        self._first = self.reports[latest.index(first)]
        self._sources = sources_of(first)
        self._analysis = (
            getattr(first.graph, "analysis", None) if self._sources is None else self._sources.rewritten.analysis
        )
        self._logs = [[*report.log.calls, report.logged()] for report in everything if report.calls]
        self._config = first.graph.config
        self._stats = statistics(everything, self.reports, self._first, self._config, name)

    @property
    def stats(self) -> dict[str, Any]:
        """The figures of the last call and of all calls."""
        return self._stats

    @stats.setter
    def stats(self, stats: dict[str, Any]) -> None:
        self._stats = stats

    def __getattr__(self, name: str) -> Any:
        """A section of the report that was not read before."""
        if name not in _SECTIONS:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        value = self.kernels if name == "formulas" else make_section(self, name, self._material)
        object.__setattr__(self, name, value)
        return value

    @functools.cached_property
    def _material(self) -> Material:
        """Return the source data of the sections."""
        return material_of(
            self._first, self.reports, self._analysis, self._sources and self._sources.rewritten,
            {} if self.stats["ran"] != "packed" else self.graphs, self.stats, self.summary(), self._logs,
        )  # fmt: skip

    def __repr__(self) -> str:
        stats = self.stats
        parts = (
            stats["ran"],
            f"{stats['raw_tokens']} -> {stats['tokens']} tokens",
            f"{stats['attention_rewritten']} attentions rewritten",
            f"{len(shown_expansions(stats))} expansions",
            f"fallback={stats['fallback']!r}",
        )
        return f"Inspection({', '.join(parts)})"

    @property
    def graphs(self) -> dict[str, fx.GraphModule]:
        """The graph with the tokens by stage, as far as they exist: ``STAGES`` in order."""
        graphs = _by_stage(self._first)
        if "forward" not in graphs and self._sources is not None:
            graphs |= self._inner_graphs
        return graphs

    @functools.cached_property
    def _inner_graphs(self) -> dict[str, fx.GraphModule]:
        assert self._sources is not None
        return trace_inner_graphs(self._sources.rewritten)

    @property
    def all_graphs(self) -> list[dict[str, fx.GraphModule]]:
        """``graphs`` of every piece of the model, in the order they were compiled."""
        return [self.graphs if report is self._first else _by_stage(report) for report in self.reports]

    @property
    def kernels(self) -> dict[str, str]:
        """Return each tree attention's formula, line and generated Triton source, by node name."""
        graphs = self.graphs
        return describe_attentions(graphs["captured"], graphs["rewritten"]) if "rewritten" in graphs else {}

    @property
    def restorations(self) -> list[fx.Node]:
        """The nodes of the backward graph that sum the gradients of all rows through a token."""
        return restorations(self.graphs["backward"]) if "backward" in self.graphs else []

    @property
    def operator_changes(self) -> list[OperatorChange]:
        """Compare operators before and after the rewriting, both counted in ATen's operators."""
        sources = self._sources
        return [] if sources is None else diff_operators(sources.traced, sources.rewritten.gm)

    def summary(self) -> str:
        """Summarise the run: tokens, attention, expansions with the user's lines, timings."""
        return summarise(self.stats, self.graphs, self.restorations)

    def readable(self, stage: str) -> str:
        """One graph as code with types and the user's lines; gradient restorations are marked.

        Args:
            stage: A key of ``graphs``.

        Raises:
            InputError: There is no such graph yet.
        """
        graphs = self.graphs
        if stage not in graphs:
            raise InputError(
                f"stage must be one of {', '.join(graphs)}, got {stage!r}; a rewritten graph exists after "
                "the first packed call, a backward graph after one that needs gradients (never with inner='eager')"
            )
        return mark_restorations(graphs[stage].print_readable(print_output=False))


def _cut_off(reports: list[GraphReport], first: GraphReport) -> str | None:
    """Report graphs with weights that ran every row without token ids, if there are any.

    Those that did not run again since the graph with token ids did are of an earlier state of the model.
    """
    since = first.last_call if first.has_tokens else 0
    weighted = [report for report in reports if any(weight.dim() > 1 for weight in report.parameters)]
    runs = [report for report in weighted if report.last_call >= since]
    blind = [report for report in runs if report.ran == "ordinary" and not report.has_tokens]
    breaks = dict.fromkeys(report.cut for report in blind if report.cut is not None)
    if breaks and not first.has_tokens:
        return "; ".join(breaks)
    if blind and len(reports) == 1:
        return NO_IDS
    if not blind:
        return None
    if first.way == "converted":
        return f"{len(blind)} of {len(runs)} graphs with weights {_BEHIND}"
    why = "; ".join(breaks) or "TORCH_LOGS=graph_breaks shows where"
    return (
        f"{len(blind)} of {len(runs)} graphs with weights get no token ids and ran every row, because Dynamo cut the "
        f"model: {why}"
    )


def _latest_of_each_frame(graphs: list[Run]) -> list[Run]:
    """Of the graphs that Dynamo compiled from the same function, the one that ran last."""
    latest: dict[object, Run] = {}
    for graph in graphs:
        key = graph.graph if graph.report.frame is None else graph.report.frame
        known = latest.get(key)
        if known is None or known.report.last_call < graph.report.last_call:
            latest[key] = graph
    return [graph for graph in graphs if graph in latest.values()]


def _of_the_last_call(graphs: list[Run]) -> list[Run]:
    """Those no weight of which went into a graph with token ids since.

    Dynamo may cut one call of a model and not the next, or cut it elsewhere. A graph with token ids begins a call, so
    earlier runs on its weights belong to another one. Pieces of a call run after it, with its weights where they are
    tied.
    """
    begins = [run.report for run in graphs if run.report.has_tokens]
    return [run for run in graphs if not any(_supersedes(later, run.report) for later in begins)]


def _with_tokens(graphs: list[Run]) -> Run:
    """Return the graph whose figures are those of a call: of the layers, rather than of embeddings or of a head.

    Graphs come in the order they were compiled, and Dynamo may compile the layers again, behind a head that stays.
    """
    begins = [graph for graph in graphs if graph.report.has_tokens]
    begins.sort(key=lambda graph: (graph.report.feeds_others, not graph.report.attention_layers))
    return begins[0] if begins else graphs[0]


def _supersedes(later: GraphReport, report: GraphReport) -> bool:
    return later.last_call > report.last_call and any(weight in later.parameters for weight in report.parameters)


def _by_stage(report: GraphReport) -> dict[str, fx.GraphModule]:
    return {stage: report.graphs[stage] for stage in STAGES if stage in report.graphs}


class _Sources(NamedTuple):
    """Hold the sources of the compiled graphs."""

    traced: fx.GraphModule
    """The captured graph in ATen."""
    rewritten: Rewritten


def sources_of(run: Run) -> _Sources | None:
    """Return the sources of the last packed graph; None without any."""
    last = run.report.graphs.get("rewritten")
    for rewritten in run.graph.rewrites:
        if rewritten.gm is last:
            return _Sources(rewritten.traced, rewritten)
    return None


def _of_step(report: GraphReport) -> dict[str, Any]:
    """Summarise the last optimizer step: calls, their sharing, and that of all rows together."""
    counted = report.way != "forest" and not (report.ran == "ordinary" and report.fallback)
    step = report.steps.last(version_of(report.parameters)) if counted else None
    if step is None:
        return {"step_calls": 0, "step_repeats": 0, "step_sharing_ratio": None, "sharing_possible": None}
    return {
        "step_calls": step.calls,
        "step_repeats": step.repeats,
        "step_sharing_ratio": step.ratio,
        "sharing_possible": step.possible,
    }


def _of_tokens(latest: list[GraphReport], first: GraphReport) -> dict[str, Any]:
    """The tokens of the last call: those that ran, and the distinct ones among them."""
    rows = (report.counts for report in (first, *latest) if not report.has_tokens or report is first)
    counts = next((item for item in rows if item is not None), None)
    ordinary = first.ran == "ordinary"
    raw_tokens = counts.raw_tokens if ordinary and counts is not None else first.raw_tokens
    tokens = raw_tokens if ordinary else first.tokens
    ratio = raw_tokens / tokens if tokens and raw_tokens else 1.0
    seen = next((report for report in latest if report.rows is not None and counts is report.rows.counts), first)
    return {
        "raw_tokens": raw_tokens,
        "tokens": tokens,
        "distinct_tokens": None if counts is None else counts.distinct_tokens,
        "head_tokens": first.head_tokens,
        "sharing_ratio": ratio,
        "overlap_ratio": 1.0 - 1.0 / ratio,
        "possible_ratio": None if counts is None else counts.ratio,
        "counted_call": None if seen.rows_of_call in (0, seen.calls) or seen.ran == "packed" else seen.rows_of_call,
    }


def _of_images(everything: list[GraphReport]) -> dict[str, int | None]:
    """Count the images of the last call of a tower in front of the graphs, and those that it ran on."""
    images = images_run(weight for report in everything for weight in report.parameters)
    return {
        "images": None if images is None else images.given,
        "images_run": None if images is None else images.run,
    }


def _analysed(latest: list[GraphReport]) -> Iterator[GraphReport]:
    """Select reports with expansions: packed graphs, and graphs with a reason for rows."""
    return (item for item in latest if item.ran == "packed" or item.fallback is not None and not item.feeds_others)


def statistics(
    everything: list[GraphReport], latest: list[GraphReport], first: GraphReport, config: Config, name: str = ""
) -> dict[str, Any]:
    """The figures of ``Inspection.stats``.

    Args:
        everything: Reports of all graphs of a model.
        latest: Those of the last call.
        first: The one that the token ids enter.
        config: The options.
        name: Of the model's class.
    """
    seconds: dict[str, float] = {}
    for report in everything:
        for stage, value in report.seconds.items():
            seconds[stage] = seconds.get(stage, 0.0) + value
    stated = next((item.fallback for item in latest if item.fallback is not None and not item.feeds_others), None)
    cut = _cut_off(latest, first)
    reasons = [reason for reason in (stated, cut) if reason is not None]
    reason = next((report.reason for report in latest if report.reason is not None), None)
    unseen = Cause.NO_TOKENS if cut == NO_IDS else Cause.GRAPH_BREAK
    code = reason.code if reason is not None else code_of_cause(unseen.name)
    packed = [report for report in latest if report.ran == "packed"]
    return {
        **(_of_tokens(latest, first) | _of_images(everything)),
        **_of_step(first),
        "ran": first.ran,
        "way": first.way,
        "attention_layers": sum(report.attention_layers for report in latest),
        "attention_rewritten": sum(report.attention_rewritten for report in packed),
        "recurrences_rewritten": sum(report.recurrences_rewritten for report in packed),
        "expansions": [dict(item) for report in _analysed(latest) for item in report.expansions],
        "fallback": cut if stated is not None and cut is not None and stated in cut else "; ".join(reasons) or None,
        "fallback_code": code if reasons else "",
        "warned": any(report.warned for report in latest),
        "uncompiled": given_up(report.frame for report in everything),
        "graphs": len(latest),
        "compiles": sum(report.compiles for report in everything),
        "calls": sum(report.calls for report in everything),
        "shapes": sum(report.shapes for report in everything),
        "seconds": seconds,
        "inner": config.inner,
        "min_sharing": config.min_sharing,
        "on_unsupported": config.on_unsupported,
        "model": name,
        "devices": sorted({str(weight.device) for weight in first.parameters}),
        "treefx": installed_version(),
        "torch": torch.__version__,
    }
