"""One line in the log, at level INFO, about the first call of a model that was compiled."""

from __future__ import annotations

import logging

from treefx.runtime.lost_sharing.graph_breaks import object_of_entry
from treefx.runtime.records import GraphReport, ReportingGraph
from treefx.views import find_view

__all__ = ["announce"]

_log = logging.getLogger("treefx")


def announce(graph: ReportingGraph, report: GraphReport) -> None:
    """Log the first compiled call of a model: ratio, coverage in FLOPs, seconds.

    Above level INFO of the logger ``treefx``, the default, it only notes the call.
    """
    report.steps.is_announced = True
    if not _log.isEnabledFor(logging.INFO):
        return
    owner = object_of_entry()
    name = "a model" if owner is None else getattr(owner, "__qualname__", type(owner).__name__)
    try:
        text = find_view("describe_first_call")(graph, report, name)
    except Exception as error:  # a line of the log never changes a run
        text = f"{name} was compiled; its figures failed: {type(error).__name__}: {error}"
    _log.info("%s", text)
