"""An inspection as one page of html that needs no other file: no script, style or font from elsewhere."""

from __future__ import annotations

import html
from collections.abc import Iterable, Iterator, Mapping, Sequence
from string import Template
from typing import Any

from torch import fx

from treefx.inspection.graph_diff import OperatorChange, operator_name
from treefx.inspection.page import PAGE
from treefx.inspection.source_lines import module_of, type_of
from treefx.inspection.text import is_earlier, none_expanded, shown_expansions
from treefx.passes.labels.label_tokens import user_line

__all__ = ["render_page"]

_CLASSES = {
    "treefx.restore": "restore",
    "treefx.restore_pick": "restore",
    "treefx.tree_attention": "attention",
    "treefx.tree_attention_backward": "attention",
    "treefx.expand": "expand",
    "treefx.pick": "expand",
}
_KINDS = {"restore": "gradient restoration", "attention": "tree attention", "expand": "packed value read by rows"}
"""Legend of marked nodes. The loss reads packed values by rows too, so that these are not the operators that had to be
expanded."""
_LONGEST_TEXT = 48
"""Of a string among the arguments of a node; the score of an attention is told elsewhere."""


def render_page(
    summary: str,
    stats: Mapping[str, Any],
    graphs: Mapping[str, fx.GraphModule],
    kernels: Mapping[str, str],
    changes: Sequence[OperatorChange],
) -> str:
    """The whole page.

    Args:
        summary: Text for the top.
        stats: ``Inspection.stats``.
        graphs: Stages to show, in order.
        kernels: Attention expressions by node name.
        changes: Operators that the rewriting added or removed.
    """
    first = "rewritten" if "rewritten" in graphs else "captured"
    return Template(PAGE).substitute(
        figures="".join(_figures(stats)),
        summary=html.escape(summary),
        seconds=_bars(stats["seconds"]),
        expansions=_table(("operator", "reason", "line"), _expansion_rows(stats))
        or f"<p>{html.escape(none_expanded(stats))}</p>",
        earlier="<p>The last call ran every row: attentions and rewritten graphs below are of an earlier call.</p>"
        if is_earlier(stats, graphs)
        else "",
        kernels="".join(_kernel(name, text) for name, text in kernels.items()) or "<p>None.</p>",
        changes="".join(f"<code>{html.escape(str(change))}</code>" for change in changes) or "None.",
        tabs="".join(_tab(stage, gm, selected=stage == first) for stage, gm in graphs.items()),
        graphs="".join(_graph(stage, gm, shown=stage == first) for stage, gm in graphs.items()),
    )


def _share(part: int, whole: int) -> str:
    return str(part) if part == whole else f"{part} of {whole}"


def _figures(stats: Mapping[str, Any]) -> Iterator[str]:
    distinct, recurrences = stats["distinct_tokens"], stats["recurrences_rewritten"]
    figures = {
        "raw tokens": f"{stats['raw_tokens']:,}",
        "distinct tokens": "unknown" if distinct is None else f"{distinct:,}",
        "tokens that ran": f"{stats['tokens']:,}",
        "sharing ratio": f"{stats['sharing_ratio']:.2f}",
        "attention layers on the tree": _share(stats["attention_rewritten"], stats["attention_layers"]),
        **({"recurrences on the tree": str(recurrences)} if recurrences else {}),
        "expansions": str(len(shown_expansions(stats))),
        "last call ran": stats["ran"],
    }
    for name, value in figures.items():
        yield f"<div><b>{html.escape(value)}</b>{name}</div>"


def _bars(seconds: Mapping[str, float]) -> str:
    longest = max(seconds.values(), default=0.0) or 1.0
    rows = (
        f'<tr><td>{html.escape(name)}</td><td class="n">{value:.3f} s</td>'
        f'<td class="bar"><i style="width:{100 * value / longest:.1f}%"></i></td></tr>'
        for name, value in seconds.items()
    )
    return f"<table>{''.join(rows)}</table>"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    body = "".join(f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    titles = "".join(f"<th>{title}</th>" for title in head)
    return f"<table><tr>{titles}</tr>{body}</table>" if body else ""


def _expansion_rows(stats: Mapping[str, Any]) -> Iterator[Sequence[str]]:
    for item in shown_expansions(stats):
        yield item["op"], item["reason"], item["line"] or ""


def _kernel(name: str, text: str) -> str:
    return f"<h3>{html.escape(name)}</h3><pre>{html.escape(text)}</pre>"


def _tab(stage: str, gm: fx.GraphModule, *, selected: bool) -> str:
    return (
        f'<button role="tab" aria-selected="{str(selected).lower()}" data-stage="{stage}">'
        f"{stage} <small>{len(gm.graph.nodes)}</small></button>"
    )


def _graph(stage: str, gm: fx.GraphModule, *, shown: bool) -> str:
    counts = dict.fromkeys(_KINDS, 0)
    lines = []
    for node in gm.graph.nodes:
        kind = _kind(node)
        if kind:
            counts[kind] += 1
        lines.append(_line(node, kind))
    legend = "".join(
        f'<button class="{kind}" data-kind="{kind}">{count} {_KINDS[kind]}</button>'
        for kind, count in counts.items()
        if count
    )
    hidden = "" if shown else " hidden"
    return f'<section class="graph" id="{stage}"{hidden}><p>{legend}</p><ol>{"".join(lines)}</ol></section>'


def _kind(node: fx.Node) -> str:
    return _CLASSES.get(operator_name(node), "") if node.op == "call_function" else ""


def _line(node: fx.Node, kind: str) -> str:
    """One node: ``name: type = operator(arguments)``, with its module and the user's line as a tooltip."""
    origin = "\n".join(part for part in (_KINDS.get(kind), module_of(node), user_line(node)) if part)
    called = operator_name(node) if node.op.startswith("call_") else node.op
    arguments = [_argument(item) for item in node.args]
    arguments += [f"{key}={_argument(item)}" for key, item in node.kwargs.items()]
    if node.op == "placeholder":
        arguments = [str(node.target)]
    name, kind_of_value, listed = (html.escape(text) for text in (node.name, type_of(node), ", ".join(arguments)))
    return (
        f'<li class="{kind or node.op}" title="{html.escape(origin)}"><b>{name}</b><i>{kind_of_value}</i>'
        f" = <u>{html.escape(called)}</u>({listed})</li>"
    )


def _argument(value: Any) -> str:
    if isinstance(value, fx.Node):
        return value.name
    if isinstance(value, (list, tuple)):
        inner = ", ".join(_argument(item) for item in value)
        return f"[{inner}]" if isinstance(value, list) else f"({inner})"
    too_long = isinstance(value, str) and len(value) > _LONGEST_TEXT
    return repr(value[:_LONGEST_TEXT] + "...") if too_long else repr(value)
