"""Print ``treefx explain``: the verdict, figures of the batch, operators on rows."""

from __future__ import annotations

import os
import textwrap
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from treefx.errors import shorten
from treefx.inspection.report.operators import NO_LOSS, origins
from treefx.inspection.report.records import Loss, OperatorAccount
from treefx.inspection.report.report import Report
from treefx.output import console, count, make_table, print_line
from treefx.planning.views.tables import format_bytes
from treefx.reason_codes import link_to

__all__ = ["show_explained"]

_WIDTH = 80
_MOST_LINES = 12
"""Of operators below one cause; ``--json`` has all."""


def show_explained(report: Report) -> None:
    """Print a dry run for people."""
    _paragraph(report.verdict.sentence)
    console.print(make_table("", ("this batch", "on rows", "distinct", "gain"), _figures(report), tight=True))
    _paragraph(_coverage(report))
    lost = [loss for loss in report.verdict.losses if loss.way_out]
    if not lost:
        print_line("On rows: nothing that could be shared.")
        return
    print_line("On rows, the largest cost first:", style="bold")
    for loss in lost:
        _show_loss(loss, report)


def _figures(report: Report) -> Iterator[tuple[str, ...]]:
    """A line per figure: on rows, on distinct tokens, and the ratio of both."""
    stats, verdict, memory = report.stats, report.verdict, report.memory
    forest = report.forest
    possible = stats["possible_ratio"]
    if verdict.ran == "packed":
        yield "tokens", f"{verdict.raw_tokens:,}", f"{verdict.tokens:,}", _ratio(verdict.raw_tokens, verdict.tokens)
    else:
        yield "tokens", f"{verdict.raw_tokens:,}", "not shared", f"possible {possible:.2f}x" if possible else ""
    if forest is not None:
        yield "rows, nodes of the tree", f"{forest.rows:,}", f"{len(forest.nodes) + forest.left_out:,}", ""
    before, after = verdict.flops_before, verdict.flops_after
    if before:
        yield "FLOPs of the forward", f"{before:,}", f"{after:,}", _ratio(before, after)
    root = next((item for item in report.modules if not item.path), None)
    if root is not None and root.seconds_after:
        taken = [f"{1e3 * seconds:.1f} ms" for seconds in (root.seconds_before, root.seconds_after)]
        yield "forward, operator by operator", *taken, f"{root.seconds_before / root.seconds_after:.2f}x"
    if memory.bytes:
        on_rows = memory.bytes_on_rows
        yield (
            "kept for the backward", format_bytes(on_rows) if on_rows else "unknown", format_bytes(memory.bytes),
            _ratio(on_rows, memory.bytes) if on_rows else "",
        )  # fmt: skip


def _ratio(before: int, after: int) -> str:
    return f"{before / after:.2f}x" if after else ""


def _coverage(report: Report) -> str:
    coverage = report.verdict.coverage
    total = coverage.token + coverage.batch + coverage.row
    if not total:
        return "Coverage: no FLOPs to count."
    token, batch, row = (100 * item / total for item in (coverage.token, coverage.batch, coverage.row))
    return (
        f"Coverage in FLOPs of the captured graph: {token:.1f} % once per distinct token, {batch:.1f} % once for the "
        f"batch, {row:.1f} % on rows."
    )


def _show_loss(loss: Loss, report: Report) -> None:
    total = report.verdict.flops_before
    share = f", {100 * loss.flops / total:.1f} % of FLOPs" if total and loss.flops else ""
    _paragraph(f"[{loss.code}] {loss.title}{share}", indent=2)
    about = f"{loss.operator} {loss.reason}" if loss.operator else loss.reason
    _paragraph(about, indent=4)
    _paragraph(f"Way out: {loss.way_out}", indent=4)
    _paragraph(f"See {link_to(loss.code)}, or treefx doctor --code {loss.code}", indent=4)
    found: dict[str, Counter[str]] = {}
    for item in _operators(loss, report):
        found.setdefault(item.line or "no line is known", Counter())[item.op] += 1
    for line, operators in list(found.items())[:_MOST_LINES]:
        _paragraph(shorten(line.removeprefix(f"{Path.cwd()}{os.sep}"), 150), indent=6)
        _paragraph(", ".join(f"{op} x{n}" if n > 1 else op for op, n in operators.items()), indent=8)
    if len(found) > _MOST_LINES:
        _paragraph(f"and {count(len(found) - _MOST_LINES, 'more line')}: --json has all", indent=6)


def _operators(loss: Loss, report: Report) -> Iterator[OperatorAccount]:
    """List the operators that run on rows for a loss.

    A loss of the whole call has those of its code.
    """
    started = origins(report.operators)
    for item in report.operators:
        if item.ran == "row" and item.code == loss.code and item.code not in NO_LOSS:
            origin = started[item.name]
            if not loss.operator or not item.since or (origin.line, item.reason) == (loss.line, loss.reason):
                yield item


def _paragraph(text: str, indent: int = 0) -> None:
    """Text folded at 80 columns; a path longer than that keeps its line."""
    space = " " * indent
    for line in textwrap.wrap(
        text, _WIDTH, initial_indent=space, subsequent_indent=space + "  ", break_long_words=False,
        break_on_hyphens=False,
    ):  # fmt: skip
        print_line(line)
