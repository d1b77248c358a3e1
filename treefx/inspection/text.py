"""An inspection as plain text."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import fx

__all__ = ["describe_step", "mark_restorations", "summarise"]

Graphs = Mapping[str, fx.GraphModule]
"""By stage."""
RESTORATION = "treefx.restore"
"""How the names of the restoring operators begin."""
_MARK = "  # <-- gradient restoration: the gradients of all rows through a token, summed"
_INDENT = 14
_MUCH_LOST = 1.1
"""Possible sharing over what there was, above which the order of rows is worth a line."""
_LINES = {
    "trl.trainer.base_trainer": "treefx.integrations.trl.keep_groups(trainer)",
    "transformers.trainer": "treefx.integrations.transformers.keep_groups(trainer)",
}
"""By what a program that uses a trainer has loaded, the one built on others first."""
_LINE_OF_LOOPS = "DataLoader(dataset, batch_sampler=treefx.data.TreeBatchSampler(sequences, max_tokens=...))"


def mark_restorations(code: str) -> str:
    """Mark the lines of a readable graph that restore gradients."""
    return "\n".join(line + _MARK if RESTORATION in line else line for line in code.splitlines()) + "\n"


def summarise(stats: Mapping[str, Any], graphs: Graphs, restorations: Sequence[fx.Node]) -> str:
    """The text of ``Inspection.summary``."""
    times = (
        _count(stats["calls"], "call"),
        _count(stats["shapes"], "shape"),
        _count(stats["compiles"], "compilation"),
    )
    sizes = ", ".join(f"{stage} {len(gm.graph.nodes)}" for stage, gm in graphs.items())
    seconds = ", ".join(f"{name} {value:.2f}" for name, value in stats["seconds"].items())
    lines = {
        "tokens": _tokens(stats),
        "step": "\n".join(describe_step(stats)),
        "ran": f"{stats['ran']} (inner={stats['inner']!r}, min_sharing={stats['min_sharing']})",
        "fallback": stats["fallback"] or "none",
        "uncompiled": stats["uncompiled"] or "none",
        "attention": f"{_count(stats['attention_rewritten'], 'layer')} rewritten to tree attention",
        "recurrences": f"{_count(stats['recurrences_rewritten'], 'layer')} rewritten to run along the tree",
        "expansions": "\n".join(_expansions(stats["expansions"])),
        "restoration": _restoration(stats, graphs, restorations),
        "graphs": f"{stats['graphs']}; nodes: {sizes}",
        "counts": ", ".join(times),
        "seconds": seconds or "none",
    }
    return "\n".join(f"{label:<{_INDENT}}{_hanging(text)}" for label, text in lines.items())


def _tokens(stats: Mapping[str, Any]) -> str:
    if not stats["tokens"]:
        return "none: no token ids enter the graph, or it has not run packed"
    ratio, overlap = stats["sharing_ratio"], stats["overlap_ratio"]
    return (
        f"{stats['raw_tokens']:,} -> {stats['tokens']:,} distinct: "
        f"sharing ratio {ratio:.2f}, potential overlap ratio {overlap:.1%}"
    )


def describe_step(stats: Mapping[str, Any]) -> Iterator[str]:
    """What the calls of the last optimizer step shared of what they could have shared, and the way out."""
    possible, ratio = stats["sharing_possible"], stats["step_sharing_ratio"]
    if possible is None:
        yield "none: no call with gradients of rows [B, T]"
        return
    calls = _count(stats["step_calls"], "call")
    yield f"{calls}: sharing ratio {ratio:.2f}, of {possible:.2f} with all rows in one call"
    if possible > _MUCH_LOST * ratio:
        yield "rows that share prefixes came in different calls; what keeps them together, as far as a call has room:"
        yield f"    {_line_to_change()}"


def _line_to_change() -> str:
    """What keeps rows together in the trainer that this program has loaded."""
    return next((line for module, line in _LINES.items() if module in sys.modules), _LINE_OF_LOOPS)


def _expansions(expansions: Sequence[Mapping[str, str | None]]) -> Iterator[str]:
    """Equal ones, as every layer has them, once."""
    if not expansions:
        yield "none: everything runs once per distinct token, up to the loss"
    counted = Counter((item["op"], item["reason"], item["line"]) for item in expansions)
    for (op, reason, line), times in counted.items():
        yield f"{op} {reason}" + (f" ({times} times)" if times > 1 else "")
        if line:
            yield f"    {line}"


def _restoration(stats: Mapping[str, Any], graphs: Graphs, nodes: Sequence[fx.Node]) -> str:
    if stats["ran"] != "packed":
        return "none: the last call ran every row separately"
    if "backward" not in graphs:
        return "none so far: there was no backward, or inner='eager' has no graph of it"
    if not nodes:
        return "outside the graph, where packed outputs are expanded for the caller"
    return f"{_count(len(nodes), 'node')} of the backward graph: {', '.join(node.name for node in nodes)}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _hanging(text: str) -> str:
    return text.replace("\n", "\n" + " " * _INDENT)
