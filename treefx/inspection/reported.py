"""Collect the material of a report from the run time's record of one graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor, fx, nn

from treefx.forests.forest import Forest
from treefx.inspection.report.material import Material, Rows
from treefx.passes.analysis import Analysis, Rewritten
from treefx.reason_codes import LITTLE_SHARING
from treefx.runtime.call_log import LoggedCall
from treefx.runtime.call_plan import Batch, keys_of
from treefx.runtime.records import NO_IDS, GraphReport

__all__ = ["material_of", "rows_of_batch", "rows_of_forest"]


# Long: one argument a line.
def material_of(
    first: GraphReport,
    reports: Sequence[GraphReport],
    analysis: Analysis | None,
    rewritten: Rewritten | None,
    graphs: Mapping[str, fx.GraphModule],
    stats: Mapping[str, Any],
    summary: str,
    logs: Sequence[Sequence[LoggedCall]],
) -> Material:
    """Everything that the sections of a report are made of.

    Args:
        first: The graph that the token ids enter.
        reports: All graphs of the last call.
        analysis: Of that graph, None where it was never analysed.
        rewritten: The rewritten graph.
        graphs: By stage; empty where the last call ran on rows.
        stats: Figures.
        summary: Text.
        logs: Logged calls by graph.
    """
    code, text = _reason(first)
    batch, redundant = _trie(first)
    rows = None
    if isinstance(batch, Batch):
        rows = rows_of_batch(batch, analysis, redundant)
    elif isinstance(batch, Forest):
        rows = rows_of_forest(batch)
    others = [report for report in reports if report is not first and report.ran == "ordinary"]
    cut = [("TFX003", report.cut) for report in others if report.cut is not None and not report.has_tokens]
    return Material(
        stats, summary, first.graphs["captured"], analysis, rewritten if graphs else None, graphs, code, text, logs,
        rows, _extent(batch, first), list(dict.fromkeys(cut)),
    )  # fmt: skip


def _reason(first: GraphReport) -> tuple[str, str]:
    """Code and text of why the last call ran on rows."""
    if first.ran != "ordinary":
        return "", ""
    if first.reason is not None:
        return first.reason.code, first.reason.text
    if first.has_tokens:
        return LITTLE_SHARING, "the rows of the call share less than min_sharing"
    if first.cut is not None:
        return "TFX003", first.cut
    return "TFX001", NO_IDS + _float_ids(first.graphs["captured"])


def _float_ids(captured: fx.GraphModule) -> str:
    """A hint where an input that may hold ids is no integer."""
    for node in captured.graph.find_nodes(op="placeholder"):
        x = node.meta.get("example_value")
        if isinstance(x, Tensor) and x.dim() == 2 and x.is_floating_point() and not isinstance(x, nn.Parameter):
            return f"; {node.name} is {x.dtype} {list(x.shape)}, and token ids are integers (int64)"
    return ""


def _trie(first: GraphReport) -> tuple[Batch | Forest | None, Any]:
    if first.trie is None:
        return None, ()
    reference, redundant = first.trie
    return reference(), redundant


def rows_of_batch(batch: Batch, analysis: Analysis | None, redundant: Any = frozenset()) -> Rows:
    """Return the trie of a call on the host.

    Token ids are included while the inputs of the trie are alive.
    """
    row, column, end, token_of = batch.metadata
    ids, keys = None, keys_of(batch)
    if keys is not None and analysis is not None and analysis.tokens is not None and not analysis.tokens.made:
        place = analysis.identity_without(frozenset(redundant)).index(analysis.position_of_ids)
        if place < len(keys) and not analysis.tokens.ids.meta["val"].is_floating_point():
            ids = keys[place][row, column]
    return Rows.of_tensors(token_of, end, ids)


def rows_of_forest(forest: Forest) -> Rows:
    """The trie of a forest that the caller gave, with the weights of its edges."""
    paths = [path.cpu() for path in forest.token_of]
    width = max(map(len, paths), default=0)
    token_of = np.full((len(paths), width), -1, dtype=np.int64)
    for i, path in enumerate(paths):
        token_of[i, : len(path)] = path.numpy()
    weights = np.full(len(forest.tokens), np.nan)
    weights[forest.edges.target.cpu().numpy()] = forest.edges.weight.cpu().numpy()
    return Rows(token_of, forest.subtree_end.cpu().numpy(), forest.tokens.cpu().numpy(), weights)


def _extent(batch: Batch | Forest | None, first: GraphReport) -> tuple[int, int] | None:
    """Rows and columns of the last call."""
    if isinstance(batch, Batch):
        rows, columns = batch.metadata[3].shape
        return rows, columns
    ids = None if first.rows is None else first.rows.ids
    return (ids.shape[0], ids.shape[1]) if isinstance(ids, Tensor) and ids.dim() == 2 else None
