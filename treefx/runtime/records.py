"""Collect reports of one graph's calls for the inspector."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, fx
from torch._guards import CompileContext

from treefx.forests.paths import Prefixes
from treefx.runtime.report import GraphReport, Reports
from treefx.runtime.shapes import Executable
from treefx.runtime.steps import version_of
from treefx.runtime.structured_log import log_compiled

__all__ = ["Records"]


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
