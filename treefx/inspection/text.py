"""An inspection as plain text."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import fx

from treefx.reason_codes import LITTLE_SHARING, UNCOMPILED, marked, with_code

__all__ = ["describe_step", "is_earlier", "line_to_change", "mark_restorations", "none_expanded", "summarise"]

Graphs = Mapping[str, fx.GraphModule]
"""By stage."""
RESTORATION = "treefx.restore"
"""How the names of the restoring operators begin."""
_MARK = "  # <-- gradient restoration: the gradients of all rows through a token, summed"
_INDENT = 14
_NONE_EXPANDED = {
    "rows": "none: everything runs once per distinct token, up to the loss",
    "forest": "none: everything runs once per token of the forest",
    "converted": "none: the module that takes the ids runs once per distinct token",
}
_RESTORED_OUTSIDE = {
    "forest": "none needed: the loss weighs every edge of the forest, and nothing is expanded to rows",
    "converted": "outside of graphs: where hidden states are expanded to rows, behind the module that takes the ids",
}
_NO_BACKWARD = "none: no graph of a backward was compiled, because no call needed gradients"
_WITHOUT_STEP = {
    "rows": "none: no call with gradients of rows [B, T]",
    "converted": "none: no call with gradients of rows [B, T]",
    "ordinary": "none: no call with gradients of rows [B, T]",
    "forest": "not counted: the caller gave a forest, which holds all rows of its step",
    "lost": "none: the last call shared nothing",
}
_MUCH_LOST = 1.1
"""Possible over actual sharing above which the order of rows is worth a line."""
_LINES = {
    "trl.trainer.base_trainer": "treefx.integrations.trl.keep_groups(trainer)",
    "transformers.trainer": "treefx.integrations.transformers.keep_groups(trainer)",
}
"""Loaded module of a trainer -> its remedy, trainers built on others first."""
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
    lines = {
        "tokens": _tokens(stats),
        "step": "\n".join(describe_step(stats)),
        "ran": _ran(stats),
        "fallback": with_code(stats["fallback"] or "none", stats.get("fallback_code", "")),
        "uncompiled": with_code(stats["uncompiled"], UNCOMPILED) if stats["uncompiled"] else "none",
        "attention": _attention(stats),
        "recurrences": f"{_count(stats['recurrences_rewritten'], 'layer')} rewritten to run along the tree",
        "expansions": "\n".join(_expansions(stats)),
        "restoration": _restoration(stats, graphs, restorations),
        "graphs": _graphs(stats, graphs),
        "counts": ", ".join(times),
        "seconds": ", ".join(f"{name} {value:.2f}" for name, value in stats["seconds"].items() if value >= 0.005),
    }
    if not stats["recurrences_rewritten"]:
        del lines["recurrences"]
    return "\n".join(f"{label:<{_INDENT}}{_hanging(text or 'none')}" for label, text in lines.items())


def _tokens(stats: Mapping[str, Any]) -> str:
    raw, distinct, possible = stats["raw_tokens"], stats["distinct_tokens"], stats["possible_ratio"]
    if stats["ran"] == "packed" and stats["tokens"]:
        return f"{raw:,} -> {stats['tokens']:,} distinct: sharing ratio {stats['sharing_ratio']:.2f}"
    if distinct is None:
        return "none counted: no token ids enter the graph" if not raw else f"{raw:,}, all of them on rows"
    call = f" in call {stats['counted_call']}" if stats["counted_call"] else ""
    if distinct == raw:
        return f"{raw:,}{call}, all of them distinct"
    return f"{raw:,}{call}, all of them on rows; {distinct:,} are distinct: sharing ratio {possible:.2f} is possible"


def _ran(stats: Mapping[str, Any]) -> str:
    if stats["ran"] != "packed":
        little = with_code(f"shares less than min_sharing={stats['min_sharing']}", LITTLE_SHARING)
        why = "for the reason below" if stats["fallback"] else little
        return f"{stats['ran']}: {why}" if stats["ran"] == "ordinary" else stats["ran"]
    if stats["way"] == "converted":
        return f"packed, by hooks of treefx.convert (min_sharing={stats['min_sharing']})"
    if stats["way"] == "forest":
        return f"packed, on the forest in use (inner={stats['inner']!r})"
    return f"packed (inner={stats['inner']!r}, min_sharing={stats['min_sharing']})"


def _attention(stats: Mapping[str, Any]) -> str:
    layers, rewritten = stats["attention_layers"], stats["attention_rewritten"]
    if layers == rewritten:
        return f"{_count(layers, 'layer')} rewritten to tree attention"
    return f"{rewritten} of {_count(layers, 'layer')} rewritten to tree attention, {layers - rewritten} on rows"


def _graphs(stats: Mapping[str, Any], graphs: Graphs) -> str:
    sizes = ", ".join(f"{stage} {len(gm.graph.nodes)}" for stage, gm in graphs.items())
    earlier = "; those behind the captured one are of an earlier call" if is_earlier(stats, graphs) else ""
    shown = "nodes" if stats["graphs"] == 1 else "nodes of one of them"
    return f"{stats['graphs']}; {shown}: {sizes}{earlier}"


def is_earlier(stats: Mapping[str, Any], graphs: Graphs) -> bool:
    """Return whether the rewritten graphs belong to an earlier call than the last one.

    The last one ran every row.
    """
    return stats["ran"] != "packed" and "rewritten" in graphs


def describe_step(stats: Mapping[str, Any]) -> Iterator[str]:
    """Describe actual and possible sharing of the last optimizer step, and the way out."""
    possible, ratio = stats["sharing_possible"], stats["step_sharing_ratio"]
    if possible is None:
        yield _WITHOUT_STEP[_kind(stats)]
        return
    calls = _count(stats["step_calls"], "call")
    if stats["step_repeats"]:
        calls += f", {stats['step_repeats']} of them of rows that came before"
    yield f"{calls}: sharing ratio {ratio:.2f}, of {possible:.2f} with all rows in one call"
    if possible > _MUCH_LOST * ratio:
        yield "rows that share prefixes came in different calls; larger calls hold more, this keeps groups together:"
        yield f"    {line_to_change()}"


def line_to_change() -> str:
    """Return the line that keeps rows together in the loaded trainer."""
    return next((line for module, line in _LINES.items() if module in sys.modules), _LINE_OF_LOOPS)


def _kind(stats: Mapping[str, Any]) -> str:
    """Return the kind of the last call, where texts differ by it."""
    return stats["way"] if stats["ran"] == "packed" else "lost" if stats["fallback"] else "ordinary"


def _expansions(stats: Mapping[str, Any]) -> Iterator[str]:
    """Equal ones, as every layer has them, once."""
    expansions = shown_expansions(stats)
    if not expansions:
        yield none_expanded(stats)
    counted = Counter((item["op"], item["reason"], item["line"], item["code"]) for item in expansions)
    for (op, reason, line, code), times in counted.items():
        yield f"{op}: {reason} {marked(code)}" + (f" ({times} times)" if times > 1 else "")
        if line:
            yield f"    {line}"


def shown_expansions(stats: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """Return the expansions of the last call; none on rows, where they are reasons."""
    expansions: Sequence[Mapping[str, Any]] = stats["expansions"] if stats["ran"] == "packed" else ()
    return expansions


def none_expanded(stats: Mapping[str, Any]) -> str:
    """Say of a call without expansions why there are none."""
    if stats["ran"] != "packed":
        return "none: the last call ran every row separately"
    if stats["fallback"]:
        return "none in the graph with the token ids"
    return _NONE_EXPANDED[stats["way"]]


def _restoration(stats: Mapping[str, Any], graphs: Graphs, nodes: Sequence[fx.Node]) -> str:
    if stats["ran"] != "packed":
        return "none: the last call ran every row separately"
    if stats["way"] in _RESTORED_OUTSIDE:
        return _RESTORED_OUTSIDE[stats["way"]]
    if "backward" not in graphs:
        return "not shown: inner='eager' has no graph of the backward" if stats["inner"] == "eager" else _NO_BACKWARD
    if not nodes:
        return "outside the graph, where packed outputs are expanded for the caller"
    return f"{_count(len(nodes), 'node')} of the backward graph: {', '.join(node.name for node in nodes)}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _hanging(text: str) -> str:
    return text.replace("\n", "\n" + " " * _INDENT)
