"""The figures of the first compiled call of a model, as one line of text."""

from __future__ import annotations

from treefx.inspection.inspector import sources_of, statistics
from treefx.inspection.report.operators import account_operators
from treefx.inspection.report.verdict import judge
from treefx.inspection.reported import material_of
from treefx.reason_codes import LITTLE_SHARING, with_code
from treefx.runtime.records import GraphReport, ReportingGraph, Run

__all__ = ["describe_first_call"]


def describe_first_call(graph: ReportingGraph, report: GraphReport, name: str) -> str:
    """Describe a packed call by ratio, coverage in FLOPs and seconds.

    A call on rows gets the reason and its code.

    Args:
        graph: That has run.
        report: Of the model that ran it.
        name: Of the model.
    """
    stats = statistics([report], [report], report, graph.config, name)
    took = f"compiled in {sum(stats['seconds'].values()):.1f} s"
    if report.ran != "packed":
        little = f"its rows share less than min_sharing={graph.config.min_sharing}"
        text, code = (little, LITTLE_SHARING) if report.reason is None else (report.reason.text, report.reason.code)
        return f"{name} runs every row separately, {took}: {with_code(text, code)}"
    sources = sources_of(Run(graph, report))
    rewritten = None if sources is None else sources.rewritten
    analysis = getattr(graph, "analysis", None) if rewritten is None else rewritten.analysis
    graphs = {stage: gm for stage, gm in report.graphs.items() if stage in ("captured", "rewritten")}
    material = material_of(report, [report], analysis, rewritten, graphs, stats, "", ())
    coverage = judge(material, account_operators(material)).coverage
    return (
        f"{name} runs {report.tokens:,} distinct tokens instead of {report.raw_tokens:,} (sharing ratio "
        f"{report.sharing_ratio:.2f}), {100 * coverage.share:.1f} % of FLOPs once per distinct token or once for the "
        f"batch, {took}"
    )
