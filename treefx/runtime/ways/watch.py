"""Look at the calls of a graph that share less than they could."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from treefx.config import Config
from treefx.reason_codes import code_of_cause
from treefx.runtime.call_plan import shares_enough
from treefx.runtime.lazy import name_of_input
from treefx.runtime.lost_sharing.distinct_tokens import CallRows, Counts
from treefx.runtime.lost_sharing.graph_breaks import call_of_entry, find_break, find_ending, object_of_entry
from treefx.runtime.lost_sharing.warned import is_warned, warn_once
from treefx.runtime.reason import Cause, Reason
from treefx.runtime.records import NO_IDS, GraphReport, find
from treefx.runtime.whole.towers import is_in_tower

__all__ = ["EVERY_ROW", "SharingWatch", "warn_of_rows"]

EVERY_ROW = "every row of {} separately"
PART = "a part of {} on every row"


class SharingWatch:
    """Keeps the token ids of calls on rows, and warns once per compiled object.

    Counting distinct tokens waits for the device: of the calls on rows, only those numbered 1, 2, 4, 8, ... are
    counted, and none after a warning. ``treefx.inspect`` counts the last one when it is asked.

    Args:
        gm: Dynamo's graph.
        roles: Role of each placeholder.
        config: The options.
        cached: Whether the graph continues from the cache of an earlier call.
    """

    def __init__(self, gm: fx.GraphModule, roles: Sequence[str], config: Config, *, cached: bool = False) -> None:
        breaks = find_break(gm), find_ending(gm)
        self._before, self._behind = (None if item is None else str(item) for item in breaks)
        nodes = list(zip(gm.graph.find_nodes(op="placeholder"), roles, strict=True))
        self._inputs = [(i, name_of_input(node)) for i, (node, role) in enumerate(nodes) if role in _OF_CALL]
        self._takes_flat_ids = any(_is_flat(node) for node, role in nodes if role in _OF_CALL)
        self._min_sharing, self._caches = config.min_sharing, cached or _returns_cache(gm)

    def look(self, report: GraphReport, args: Sequence[Any]) -> None:
        """Note the loss of a finished call."""
        report.cut = self._behind if report.has_tokens else self._before
        if report.cut is not None and _is(report, Cause.NO_ATTENTION) and not report.feeds_others:
            report.reason = Reason(Cause.GRAPH_BREAK, report.cut)
        if report.ran == "ordinary" and self._may_share(report):
            self._look_at_rows(report, {name: args[i] for i, name in self._inputs})
            return
        report.keep_rows(None)
        if report.ran != "packed":
            return
        what = _lost(report)
        if what:
            self._warn_of_expansions(report, what)
        report.is_settled = report.warned or not what

    def _look_at_rows(self, report: GraphReport, given: dict[str, Any]) -> None:
        """Keep the rows of a call and warn of them.

        Of a graph without token ids, those of the model's call.
        """
        report.calls_on_rows += 1
        is_looked_at = not report.calls_on_rows & (report.calls_on_rows - 1)
        if report.reason is not None or report.cut is None:
            report.keep_rows(CallRows.find(given))
        elif is_looked_at:
            rows = None if is_in_tower() else CallRows.find(call_of_entry())
            report.keep_rows(rows if rows is not None and rows.reach(given.values()) else None)
        if is_looked_at and not report.warned:
            owner = object_of_entry()
            packed = [] if report.reason is not None else _packed_reports(owner)
            if any(item.way == "converted" for item in packed):  # with head and loss on rows by design
                return
            reason = report.fallback or report.cut or NO_IDS
            warn_of_rows(report, PART if packed else EVERY_ROW, reason, self._min_sharing, owner)

    def _may_share(self, report: GraphReport) -> bool:
        if not torch.is_grad_enabled() and self._caches:  # a call of a generation
            return False
        if report.has_tokens:
            return report.reason is not None and not _is(report, *_SAID_ELSEWHERE)
        if report.reason is None:
            is_of_tokens = report.cut is not None or self._takes_flat_ids
            return is_of_tokens and any(weight.dim() > 1 for weight in report.parameters)
        return True

    def _warn_of_expansions(self, report: GraphReport, what: str) -> None:
        if report.warned or not report.expansions or report.tokens == report.raw_tokens:
            return
        report.warned = True
        causes = [item for item in report.expansions if not item["contracted"]] or report.expansions
        first = causes[0]
        line = f" ({first['line']})" if first["line"] else ""
        counts = Counts(report.raw_tokens, report.tokens)
        warn_once(object_of_entry(), what, f"{first['op']}: {first['reason']}{line}", counts, first["code"])


def _lost(report: GraphReport) -> str:
    """Describe the part of a packed call that runs on rows, with ``{}`` for the model.

    Empty if it is not worth a warning.
    """
    rows = report.attention_layers - report.attention_rewritten
    if rows and report.attention_rewritten:
        return f"{rows} of {report.attention_layers} attention layers of {{}} on rows"
    if not report.products_on_rows or all(item["contracted"] for item in report.expansions):
        return ""
    return f"a part of {{}} on rows (products with weights: {report.products_on_rows})"


_OF_CALL = ("input", "variable")
_SAID_ELSEWHERE = (Cause.NO_ATTENTION, Cause.MANY_SHAPES)
"""Of calls that lose nothing, and that have a warning of their own."""


def warn_of_rows(report: GraphReport, what: str, reason: str, min_sharing: float, owner: Any) -> None:
    """Warn once that calls run on rows that share prefixes; counts the tokens of the call.

    Args:
        report: of the model, with the rows of the call.
        what: `EVERY_ROW` or `PART`.
        reason: why this call ran on rows.
        min_sharing: the sharing ratio from which on sharing pays.
        owner: the object that the user compiled or converted; None if that is not known.
    """
    if is_warned(owner):
        report.warned = True
        return
    counts = None if report.rows is None else report.rows.counts
    if counts is None or counts.distinct_tokens == counts.raw_tokens:
        return
    if not shares_enough(counts.raw_tokens, counts.distinct_tokens, min_sharing):
        return
    report.warned = True
    warn_once(owner, what, reason, counts, _code(report))


def _code(report: GraphReport) -> str:
    """Return the code of a graph on rows: of its reason, or of a graph without token ids."""
    if report.reason is not None:
        return report.reason.code
    return code_of_cause((Cause.NO_TOKENS if report.cut is None else Cause.GRAPH_BREAK).name)


def _is(report: GraphReport, *causes: Cause) -> bool:
    return report.reason is not None and report.reason.cause in causes


def _packed_reports(owner: Any) -> list[GraphReport]:
    """List reports of other graphs or hooks of a model that ran on distinct tokens."""
    parameters = owner.parameters() if isinstance(owner, nn.Module) else ()
    return [run.report for run in find(parameters) if run.report.has_tokens and run.report.ran == "packed"]


def _is_flat(node: fx.Node) -> bool:
    """Whether an input may be token ids [T] without a dimension of rows."""
    x = node.meta.get("example_value")
    return isinstance(x, Tensor) and x.dim() == 1 and x.dtype in (torch.int32, torch.int64)


def _returns_cache(gm: fx.GraphModule) -> bool:
    """Whether keys and values may be among the outputs: floats [B, heads, T, width]."""
    outputs = [item for node in gm.graph.find_nodes(op="output") for item in node.all_input_nodes]
    values = [item.meta.get("example_value") for item in outputs]
    return any(isinstance(x, Tensor) and x.dim() == 4 and x.is_floating_point() for x in values)
