"""Render a report as one self-contained page of HTML, without external files.

The verdict, the advice and the figures are written out; large parts (graphs, modules, the rollout tree) are drawn by
the page's script, when it is opened, from data inside the page.
"""

from __future__ import annotations

import html
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from string import Template
from typing import Any

from treefx.inspection.graph_diff import OperatorChange, order_changes
from treefx.inspection.page import page_part, page_script
from treefx.inspection.report.call_records import ForestNode, LayerMemory
from treefx.inspection.report.codec import as_plain
from treefx.inspection.report.records import AttentionAccount, GraphNode, Mask
from treefx.inspection.report.report import Report
from treefx.inspection.text import none_expanded, shown_expansions

__all__ = ["render_page", "write_report"]

_MATHML = re.compile(r"(?:[^<>&]|</?m[a-z]+(?: [a-z]+=(?:'[a-z]*'|\"[a-z]*\"))*/?>|&#?\w+;)*")
"""Allowed content of a formula: a report may come from a file of others."""
_LAYER = re.compile(r".*?\.\d+(?=\.|$)")
"""Path of a layer of a list of modules."""
_MOST_TEXT = 400
_NO_OPERATORS = {"placeholder", "output", "get_attr", "getitem"}


def render_page(report: Report, tokenizer: Any = None) -> str:
    """The whole page.

    Args:
        report: The source of the page.
        tokenizer: Decodes the tokens of the rollout tree, by a method ``decode`` of a list of ids.
    """
    stats, verdict = report.stats, report.verdict
    return Template(page_part("page.html")).substitute(
        style=page_part("page.css"),
        script=page_script(),
        model=html.escape(stats.get("model") or "the model"),
        made=html.escape(_made(stats)),
        verdict=html.escape(verdict.sentence),
        advice=f'<p class="advice" id="advice">{html.escape(verdict.advice)}</p>' if verdict.advice else "",
        figures="".join(_figures(stats)),
        coverage=_coverage(report),
        losses=_losses(report),
        expansions=_table(("operator", "reason", "line"), _expansion_rows(stats))
        or f"<p>{html.escape(none_expanded(stats))}</p>",
        attention=_attentions(report) or "<p>None.</p>",
        restoration=_table(("node", "operator", "gradient of", "shape", "tokens x rows", "line"), _restored(report))
        or "<p>No node of a backward graph restores gradients.</p>",
        memory=_memory(report),
        summary=html.escape(report.summary()),
        changes="".join(f"<code>{html.escape(str(change))}</code>" for change in _changes(report)) or "None.",
        data=_embedded(_data(report, tokenizer)),
    )


def _made(stats: Mapping[str, Any]) -> str:
    """Name the model and versions of the report; those read from a file may lack some."""
    versions = [f"{name} {stats[key]}" for name, key in (("treefx", "treefx"), ("PyTorch", "torch")) if stats.get(key)]
    inner = [f"inner compiler {stats['inner']}"] if stats.get("inner") else []
    return ", ".join([stats.get("model") or "a model", *stats.get("devices", ()), *versions, *inner])


def write_report(report: Report, path: str | Path, tokenizer: Any = None) -> Path:
    """Write the page of a report, and return its path."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(render_page(report, tokenizer), encoding="utf-8")
    return target


def _changes(report: Report) -> list[OperatorChange]:
    """How the rewriting changed the operators of the captured graph."""
    stages = (report.nodes.get(stage, ()) for stage in ("captured", "rewritten"))
    before, after = (Counter(node.op for node in nodes if node.op not in _NO_OPERATORS) for nodes in stages)
    return order_changes(before, after) if after else []


def _embedded(value: Any) -> str:
    """JSON that no text in it can end: every ``<`` is written as an escape."""
    return json.dumps(value, separators=(",", ":")).replace("<", "\\u003c").replace("\u2028", "\\u2028")


def _data(report: Report, tokenizer: Any) -> dict[str, Any]:
    """Return the data for the script; modules and lines of nodes are indices into two lists."""
    modules: dict[str, int] = {"": 0}
    lines: dict[str, int] = {"": 0}

    def packed(node: GraphNode) -> list[Any]:
        module = modules.setdefault(node.module, len(modules))
        line = lines.setdefault(node.line or "", len(lines))
        return [node.name, node.op, node.inputs, node.type, module, line, node.sources, node.mark, node.code]

    nodes = {stage: [packed(node) for node in items] for stage, items in report.nodes.items()}
    forest = None if report.forest is None else as_plain(report.forest)
    if forest is not None and report.forest is not None:
        forest["nodes"] = [
            {**item, "text": _text(node, tokenizer)}
            for item, node in zip(forest["nodes"], report.forest.nodes, strict=True)
        ]
    accounts = {o.name: (o.ran, o.code, o.reason, o.flops_before, o.flops_after) for o in report.operators}
    return {
        "forest": forest, "modules": as_plain(report.modules), "nodes": nodes, "modules_of": list(modules),
        "lines": list(lines), "operators": accounts, "passes": as_plain(report.passes), "calls": as_plain(report.calls),
        "masks": as_plain(report.masks), "parts": list(_parts(report.plan)),
    }  # fmt: skip


def _parts(plan: Mapping[str, Any] | None) -> Iterator[list[list[int]]]:
    """Yield each part's intervals [start, stop) of packed tokens; files may be malformed."""
    parts = (plan or {}).get("parts")
    for part in parts if isinstance(parts, list) else ():
        found = part.get("intervals") if isinstance(part, dict) else None
        pairs = [item for item in found if isinstance(item, list) and len(item) == 2] if isinstance(found, list) else []
        yield [[start, stop] for start, stop in pairs if isinstance(start, int) and isinstance(stop, int)]


def _text(node: ForestNode, tokenizer: Any) -> str:
    """The tokens of a run, decoded where a tokenizer is given."""
    more = "" if len(node.ids) == node.tokens else " ..."
    if not node.ids:
        return ""
    if tokenizer is None:
        return ", ".join(map(str, node.ids)) + more
    return str(tokenizer.decode(list(node.ids)))[:_MOST_TEXT] + more


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


def _coverage(report: Report) -> str:
    """One bar: once per distinct token, once for the batch, per row."""
    found = report.verdict.coverage
    parts = {"token": found.token, "batch": found.batch, "row": found.row}
    names = {"token": "once per distinct token", "batch": "once for the batch", "row": "once per row"}
    total = sum(parts.values())
    if not total:
        return "<p>No products of matrices were counted.</p>"
    bars = "".join(f'<i class="{kind}" style="width:{100 * n / total:.2f}%"></i>' for kind, n in parts.items() if n)
    legend = "".join(
        f'<span><b class="{kind}"></b>{names[kind]}: {100 * n / total:.1f} %</span>' for kind, n in parts.items()
    )
    return f'<div class="bar" role="img" aria-label="coverage">{bars}</div><p class="legend">{legend}</p>'


def _losses(report: Report) -> str:
    total = max(1, report.verdict.coverage.token + report.verdict.coverage.batch + report.verdict.coverage.row)
    rows = [
        (loss.code, f"{loss.operator} {loss.reason}".strip(), f"{100 * loss.flops / total:.1f} %", loss.line or "",
         loss.way_out)
        for loss in report.verdict.losses
    ]  # fmt: skip
    return _table(("code", "what keeps it on rows", "FLOPs", "line", "way out"), rows)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    body = "".join(f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    titles = "".join(f"<th>{title}</th>" for title in head)
    return f"<table><tr>{titles}</tr>{body}</table>" if body else ""


def _expansion_rows(stats: Mapping[str, Any]) -> Iterator[Sequence[str]]:
    for item in shown_expansions(stats):
        yield item["op"], f"{item['reason']} [{item['code']}]", item["line"] or ""


def _attentions(report: Report) -> str:
    """List each distinct formula with its layers, and each distinct source, behind a fold."""
    groups: dict[tuple[str, ...], list[AttentionAccount]] = {}
    for item in report.attention:
        groups.setdefault((item.mathml, item.score, item.visible, item.shapes, item.kernel, str(item.mask)), []).append(
            item
        )
    return "".join(_formula(items, report.masks) for items in groups.values()) + "".join(
        f"<details><summary>Triton source {i + 1} of {len(report.sources)}, as on a GPU</summary>"
        f"<pre>{html.escape(source)}</pre></details>"
        for i, source in enumerate(report.sources)
    )


def _formula(items: Sequence[AttentionAccount], masks: Sequence[Mask]) -> str:
    first = items[0]
    names = ", ".join(item.module or item.name for item in items[:4])
    layers = f"{len(items)} layers: {names}, ..." if len(items) > 4 else names
    drawn = first.mathml if _MATHML.fullmatch(first.mathml) else ""
    counts = f"\npairs of query and key: {first.pairs:,} on the tree, {first.pairs_on_rows:,} on rows"
    if first.tiles:
        counts += f"\ntiles of 128 by 128 with a visible pair: {first.tiles:,} of {first.tiles_of_all:,}"
    pairs = counts if first.pairs else ""
    text = (
        f"softmax over k of {first.score}\nwhere {first.visible}\nquery, key, value {first.shapes}\n"
        f"kernel: {first.kernel}{pairs}"
    )
    formula = f"<div>{drawn}<pre>{html.escape(text)}</pre></div>"
    return f'<h3>{html.escape(layers)}</h3><div class="formula">{formula}{_picture(first.mask, masks)}</div>'


def _picture(number: int, masks: Sequence[Mask]) -> str:
    """An empty canvas with its caption; the script draws the cells."""
    if not 0 <= number < len(masks):
        return ""
    mask = masks[number]
    words = f"{mask.tokens:,} tokens of the last forest: queries down, keys to the right" + (
        mask.note and f"; {mask.note}"
    )
    label = html.escape(f"the mask over {words}")
    return (
        f'<figure><canvas class="mask" data-mask="{number}" role="img" aria-label="{label}"></canvas>'
        f"<figcaption>{html.escape(words)}</figcaption></figure>"
    )


def _restored(report: Report) -> Iterator[Sequence[str]]:
    for item in report.restoration:
        times = ", ".join(f"{tokens:,} x {rows}" for tokens, rows in item.multiplicities)
        yield item.name, item.op, item.of, item.shape, times, item.line or ""


def _memory(report: Report) -> str:
    """List the bytes each layer keeps, its modules behind a fold."""
    memory = report.memory
    if not memory.layers:
        return f"<p>{html.escape(memory.note or 'Nothing.')}</p>"
    layers: dict[str, list[LayerMemory]] = {}
    for item in memory.layers:
        found = _LAYER.match(item.module)
        layers.setdefault(found[0] if found else item.module, []).append(item)
    sums = sorted(layers.items(), key=lambda entry: -sum(item.bytes for item in entry[1]))
    largest = max(1, sum(item.bytes for item in sums[0][1]))
    rows = f"; on rows it would keep {memory.bytes_on_rows:,}" if memory.bytes_on_rows else ""
    return f"<p>{memory.bytes:,} bytes{rows}.</p>" + "".join(_layer(name, items, largest) for name, items in sums)


def _layer(name: str, items: Sequence[LayerMemory], largest: int) -> str:
    row = _kept(name or "outside of modules", sum(i.bytes for i in items), sum(i.values for i in items), largest)
    if len(items) == 1:
        return row
    inner = "".join(_kept(item.module, item.bytes, item.values, largest) for item in items)
    return f"<details><summary>{row}</summary><div>{inner}</div></details>"


def _kept(name: str, size: int, values: int, largest: int) -> str:
    bar = f'<i style="width:{100 * size / largest:.1f}%"></i>'
    return (
        f'<div class="kept"><span>{html.escape(name)}</span><span>{bar}</span><span>{size:,} bytes</span>'
        f"<span>{values} value{'s' if values != 1 else ''}</span></div>"
    )
