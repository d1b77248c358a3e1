"""Print ``treefx doctor --zoo``: a table, Markdown or JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict

from treefx.output import console, count, make_table, print_json, print_line
from treefx.tools.bench.zoo.run import VERDICTS, ZooRow

__all__ = ["show_zoo"]

_HEADINGS = (
    "model", "result", "loss error", "gradient error", "tokens run", "FLOPs packed", "with mixers", "expanded",
    "compiled",
)  # fmt: skip
_NARROW_HEADINGS = (
    "model", "result", "loss\nerror", "grad.\nerror", "tokens\nrun", "FLOPs\npacked", "with\nmixers", "on\nrows",
    "com-\npiled",
)  # fmt: skip
"""The same for a terminal of 80 columns."""
_LEGEND = """\
errors: largest relative difference of loss and gradients. FLOPs packed: share
of attention, projections, MLPs, experts and heads that ran once per distinct
token; with mixers: other causal mixers counted, too. on rows: operators whose
inputs are expanded, in brackets those that are packed again behind. compiled:
compilations; "3 + 1": one of them in the second half of many batches."""


def show_zoo(
    rows: Sequence[ZooRow], conditions: Mapping[str, str], *, json: bool = False, markdown: bool = False
) -> None:
    """Print what the models did, and what with.

    The share "with mixers" also counts products between values of tokens that are no attention. "expanded" counts the
    operators that read rows; those in brackets are causal mixers, behind which values are packed again. "compiled"
    counts compilations; "3 + 1" of many batches: one in their second half.
    """
    if json:
        print_json([asdict(row) for row in rows], "treefx.doctor.zoo/1")
        return
    made_with = ", ".join(f"{name} {value}" for name, value in conditions.items() if name != "batches")
    if markdown:
        print_line(f"Made with {made_with}; batches of {conditions['batches']}.\n")
        _print_markdown(rows)
    else:
        cells = [[cell.replace(" of ", "/") for cell in _cells(row)] for row in rows]
        console.print(make_table("treefx doctor --zoo", _NARROW_HEADINGS, cells, tight=True))
        print_line(_LEGEND)
        for row in rows:
            if why := _why(row):
                print_line(f"{row.model}: {why}")
        print_line(f"{made_with}; batches of {conditions['batches']}")
    print_line(_summary(rows))


def _print_markdown(rows: Sequence[ZooRow]) -> None:
    for cells in [(*_HEADINGS, "why"), ["---"] * (len(_HEADINGS) + 1), *[(*_cells(row), _why(row)) for row in rows]]:
        print_line(f"| {' | '.join(cell.replace('|', ' ') for cell in cells)} |")
    print_line("")


def _cells(row: ZooRow) -> tuple[str, ...]:
    if row.loss_error is None or row.gradient_error is None:
        return (row.model, row.verdict, *[""] * (len(_HEADINGS) - 2))
    contracted = sum(bool(item.get("contracted")) for item in row.expansions)
    others = len(row.expansions) - contracted
    expanded = " ".join([str(others)] * bool(others) + [f"({contracted})"] * bool(contracted))
    tokens = f"{row.tokens} of {row.raw_tokens}"
    shares = (f"{row.packed_share:.0%}", f"{row.packed_share_of_all:.0%}")
    errors = (f"{row.loss_error:.0e}", f"{row.gradient_error:.0e}")
    return (row.model, row.verdict, *errors, tokens, *shares, expanded, _compiled(row))


def _compiled(row: ZooRow) -> str:
    """Return compilations after the first half of the batches, and of the second half."""
    counts = [batch.compiles for batch in row.batches]
    half = max(counts[: (len(counts) + 1) // 2], default=0)
    added = row.compiles - half
    return f"{half} + {added}" if added and len(counts) > 2 else str(row.compiles)


def _why(row: ZooRow) -> str:
    """Explain operators on rows: one reason, or the first operator and a count; rounding."""
    parts = [row.note] if row.note is not None else []
    if row.note is None and row.expansions:
        first = min(row.expansions, key=lambda item: bool(item.get("contracted")))
        more = f" (and {len(row.expansions) - 1} more)" if len(row.expansions) > 1 else ""
        again = ", and is packed again behind it" if first.get("contracted") else ""
        parts.append(f"{first['op']} {first['reason']}{again}{more}")
    if row.float64_errors is not None:
        treefx, eager = row.float64_errors
        parts.append(f"gradients are off from float64 by {treefx:.1e}, eager's by {eager:.1e}")
    return "; ".join(parts)


def _summary(rows: Sequence[ZooRow]) -> str:
    ran = [row for row in rows if row.loss_error is not None]
    said = ", ".join(f"{count} {verdict}" for verdict, count in Counter(row.verdict for row in rows).items())
    named = {verdict: [row.model for row in rows if row.verdict == verdict] for verdict in VERDICTS[1:]}
    names = "".join(f"; {verdict}: {', '.join(models)}" for verdict, models in named.items() if models)
    worst = max((max(row.loss_error or 0.0, row.gradient_error or 0.0) for row in ran), default=0.0)
    seconds = sum(row.seconds for row in rows)
    models = count(len(rows), "model")
    return f"{models} in {seconds:.0f} s: {said}; largest difference from eager float32 {worst:.1e}{names}"
