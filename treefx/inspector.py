"""``treefx.inspect``: what the backend did with a model."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn

from treefx.config import Config
from treefx.errors import InputError
from treefx.graph_diff import OperatorChange, diff_operators
from treefx.inspection_html import render_page
from treefx.inspection_text import mark_restorations, summarise
from treefx.passes.restore_gradients import restorations
from treefx.report import GraphReport, find
from treefx.runtime import CompiledGraph
from treefx.score_text import describe_attentions

__all__ = ["STAGES", "Inspection", "inspect"]

STAGES = ("captured", "rewritten", "forward", "backward")
"""From Dynamo, after the passes, and as the inner compiler gets them."""


def inspect(compiled: Any) -> Inspection:
    """Tell what treefx did with a compiled model, up to now.

    Args:
        compiled: What ``torch.compile(..., backend="treefx")`` returned for a model or for a function that uses one, or
            a model compiled in place with ``model.compile(backend="treefx")``; called at least once.

    Raises:
        InputError: It is no model or function, is not compiled, or no graph of treefx has run with its parameters.
    """
    modules = _modules_of(compiled)
    if not modules:
        raise InputError(
            f"treefx.inspect expects a compiled model, or a compiled function that uses a model, got {type(compiled).__name__}; "
            "pass what torch.compile(model, backend='treefx') returned"
        )
    graphs = find({id(parameter) for module in modules for parameter in module.parameters()})
    if graphs:
        return Inspection(graphs)
    name = type(getattr(modules[0], "_orig_mod", modules[0])).__name__
    if not _is_compiled(compiled):
        raise InputError(
            f"treefx.inspect expects a compiled model, got {name}, which is not compiled; "
            "use torch.compile(model, backend='treefx') or model.compile(backend='treefx'), then call it"
        )
    raise InputError(
        f"treefx.inspect expects a model that treefx has compiled and run, got {name}, with whose parameters no graph of treefx "
        "has run; call it once first, and if that is done, compile it with backend='treefx' instead of another one"
    )


def _is_compiled(compiled: Any) -> bool:
    if isinstance(compiled, nn.Module):
        return any(hasattr(module, "_orig_mod") or module._compiled_call_impl is not None for module in compiled.modules())
    return hasattr(compiled, "_torchdynamo_orig_callable")


def _modules_of(value: Any) -> list[nn.Module]:
    """The modules that a compiled thing uses: itself, or what its function is bound to, closes over or names."""
    found, seen, waiting = [], set(), [value]
    while waiting:
        item = waiting.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, nn.Module):
            found.append(item)
        elif isinstance(item, functools.partial):
            waiting += [item.func, *item.args, *item.keywords.values()]
        elif callable(item):
            waiting += _used_by(getattr(item, "_torchdynamo_orig_callable", item))
    return found


def _used_by(function: Callable[..., Any]) -> Iterator[Any]:
    owner = getattr(function, "__self__", None)
    yield owner
    yield from (item for item in getattr(owner, "__dict__", {}).values() if isinstance(item, nn.Module))
    for cell in getattr(function, "__closure__", None) or ():
        try:
            yield cell.cell_contents
        except ValueError:  # a variable that was never assigned
            continue
    names = getattr(getattr(function, "__code__", None), "co_names", ())
    known = getattr(function, "__globals__", {})
    yield from (known[name] for name in names if isinstance(known.get(name), nn.Module))


class Inspection:
    """What treefx did with one model, as of the moment of ``treefx.inspect``.

    A model may consist of several graphs of Dynamo: one a piece where Dynamo breaks, and another for each recompilation.
    Figures of a call are those of the graphs that ran last; ``graphs`` shows the one that holds the token ids.

    Attributes:
        reports: One per graph that ran last of its piece, in the order they were compiled.
    """

    def __init__(self, graphs: list[CompiledGraph]) -> None:
        everything = [graph.report for graph in graphs]
        latest = _latest_of_each_frame(graphs)
        first = next((graph for graph in latest if graph.report.has_tokens), latest[0])
        self.reports = [replace(graph.report, graphs=dict(graph.report.graphs)) for graph in latest]
        self._first = self.reports[latest.index(first)]
        self._traced = _traced_graph(first)
        self.stats = _statistics(everything, self.reports, self._first, first.config)

    def __repr__(self) -> str:
        stats = self.stats
        done = f"{stats['raw_tokens']} -> {stats['tokens']} tokens, {stats['attention_rewritten']} attentions rewritten"
        return f"Inspection({stats['ran']}, {done}, {len(stats['expansions'])} expansions, fallback={stats['fallback']!r})"

    @property
    def graphs(self) -> dict[str, fx.GraphModule]:
        """The stages of the graph with the tokens: those of "captured", "rewritten", "forward", "backward" that exist so far."""
        return _by_stage(self._first)

    @property
    def all_graphs(self) -> list[dict[str, fx.GraphModule]]:
        """``graphs`` of every piece of the model, in the order they were compiled."""
        return [_by_stage(report) for report in self.reports]

    @property
    def kernels(self) -> dict[str, str]:
        """What each tree attention computes, as mathematics, with the line and module it comes from, by node name."""
        graphs = self.graphs
        return describe_attentions(graphs["captured"], graphs["rewritten"]) if "rewritten" in graphs else {}

    @property
    def restorations(self) -> list[fx.Node]:
        """The nodes of the backward graph that sum the gradients of all rows through a token."""
        return restorations(self.graphs["backward"]) if "backward" in self.graphs else []

    @property
    def operator_changes(self) -> list[OperatorChange]:
        """How the rewriting changed the operators of the captured graph, both counted in ATen's operators."""
        rewritten = self.graphs.get("rewritten")
        return [] if rewritten is None or self._traced is None else diff_operators(self._traced, rewritten)

    def summary(self) -> str:
        """What happened, for people: tokens, attention, expansions with the user's lines, fallback, timings."""
        return summarise(self.stats, self.graphs, self.restorations)

    def readable(self, stage: str) -> str:
        """One graph as code with types and the user's lines; gradient restorations are marked.

        Args:
            stage: A key of ``graphs``.

        Raises:
            InputError: There is no such graph so far.
        """
        graphs = self.graphs
        if stage not in graphs:
            raise InputError(
                f"stage must be one of {', '.join(graphs)}, got {stage!r}; a backward graph exists after the first backward, "
                "a rewritten one after the first packed call"
            )
        return mark_restorations(graphs[stage].print_readable(print_output=False))

    def to_html(self, path: str | Path) -> Path:
        """Write everything into one page that needs nothing else, and return its path."""
        page = render_page(self.summary(), self.stats, self.graphs, self.kernels, self.operator_changes)
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(page, encoding="utf-8")
        return target


def _latest_of_each_frame(graphs: list[CompiledGraph]) -> list[CompiledGraph]:
    """Of the graphs that Dynamo compiled from the same function, the one that ran last."""
    latest: dict[object, CompiledGraph] = {}
    for graph in graphs:
        key = graph if graph.report.frame is None else graph.report.frame
        known = latest.get(key)
        if known is None or known.report.last_call < graph.report.last_call:
            latest[key] = graph
    return [graph for graph in graphs if graph in latest.values()]


def _by_stage(report: GraphReport) -> dict[str, fx.GraphModule]:
    return {stage: report.graphs[stage] for stage in STAGES if stage in report.graphs}


def _traced_graph(graph: CompiledGraph) -> fx.GraphModule | None:
    """The ATen graph from which the rewritten one was made."""
    rewritten = graph.report.graphs.get("rewritten")
    for shape in graph._shapes.values():
        if not isinstance(shape, str):
            executables = [item for items in shape.executables.values() for item in items]
            if any(item.rewritten.gm is rewritten for item in executables):
                return shape.analysis.gm
    return None


def _statistics(
    everything: list[GraphReport], latest: list[GraphReport], first: GraphReport, config: Config
) -> dict[str, Any]:
    seconds: dict[str, float] = {}
    for report in everything:
        for name, value in report.seconds.items():
            seconds[name] = seconds.get(name, 0.0) + value
    return {
        "raw_tokens": first.raw_tokens,
        "tokens": first.tokens,
        "sharing_ratio": first.sharing_ratio,
        "overlap_ratio": 1.0 - 1.0 / first.sharing_ratio,
        "ran": first.ran,
        "attention_rewritten": sum(report.attention_rewritten for report in latest if report.fallback is None),
        "expansions": [dict(item) for report in latest for item in report.expansions],
        "fallback": next((report.fallback for report in latest if report.fallback is not None), None),
        "graphs": len(latest),
        "compiles": sum(report.compiles for report in everything),
        "calls": sum(report.calls for report in everything),
        "shapes": sum(report.shapes for report in everything),
        "seconds": seconds,
        "inner": config.inner,
        "min_sharing": config.min_sharing,
        "on_unsupported": config.on_unsupported,
        "torch": torch.__version__,
    }
