"""The forest of the last call: runs of tokens with the same rows."""

from __future__ import annotations

from typing import Any

import numpy as np

from treefx.inspection.report.call_records import ForestAccount, ForestNode
from treefx.inspection.report.material import Material, Rows

__all__ = ["MOST_IDS", "MOST_NODES", "TILE", "account_forest", "count_tokens", "visible_pairs", "visited_tiles"]

TILE = 128
"""Queries and keys of a tile."""

MOST_NODES = 2000
"""That a report lists; the largest forests have more than a page can show."""
MOST_IDS = 64
"""Token ids that are kept of a node."""


def account_forest(material: Material) -> ForestAccount | None:
    """The nodes in packed order; None where the trie of the last call is gone."""
    rows = material.rows
    if rows is None or not material.stats["tokens"]:
        return None
    count = count_tokens(rows)
    starts = _starts(rows, count)
    node_of = np.cumsum(np.isin(np.arange(count), starts)) - 1
    parents = _parents(rows.subtree_end[:count])
    through = _rows_through(rows, node_of, len(starts))
    ends = np.append(starts[1:], count)
    nodes = tuple(
        ForestNode(
            int(start), int(end - start), int(rows.depth[start]),
            int(node_of[parents[start]]) if parents[start] >= 0 else -1, through[i],
            () if rows.ids is None else tuple(int(x) for x in rows.ids[start : min(end, start + MOST_IDS)]),
            None if rows.weights is None or parents[start] < 0 else float(rows.weights[start]),
        )
        for i, (start, end) in enumerate(zip(starts[:MOST_NODES], ends, strict=False))
    )  # fmt: skip
    kept = int((rows.token_of >= 0).sum())
    return ForestAccount(kept, count, len(rows.token_of), nodes, max(0, len(starts) - MOST_NODES))


def visible_pairs(rows: Rows) -> tuple[int, int]:
    """Pairs of query and key that the tree shows, and the same of the rows."""
    count = count_tokens(rows)
    seen = rows.depth[:count] + 1
    return int(seen.sum()), int((seen * rows.multiplicity[:count]).sum())


def visited_tiles(rows: Rows, size: int = TILE) -> tuple[int, int]:
    """Tiles of ``size`` queries and keys in which the tree shows a pair, and all tiles.

    Query q sees key k where k <= q < end(k). So of a tile below the diagonal the first query is seen by the keys whose
    subtree ends last, or by none: one comparison per tile.
    """
    count = count_tokens(rows)
    blocks = -(-count // size)
    last = np.maximum.reduceat(rows.subtree_end[:count], np.arange(0, count, size)) if count else np.zeros(0)
    below = (np.arange(blocks)[:, None] > np.arange(blocks)) & (last > size * np.arange(blocks)[:, None])
    return blocks + int(below.sum()), blocks**2


def count_tokens(rows: Rows) -> int:
    """Distinct tokens, without the filler behind them."""
    kept = rows.token_of[rows.token_of >= 0]
    return int(kept.max()) + 1 if kept.size else len(rows.subtree_end)


def _starts(rows: Rows, count: int) -> Any:
    """Packed indices where a run begins: another parent than the token before, or other rows."""
    depth, times = rows.depth[:count], rows.multiplicity[:count]
    follows = np.zeros(count, dtype=bool)
    follows[1:] = (depth[1:] == depth[:-1] + 1) & (times[1:] == times[:-1])
    return np.flatnonzero(~follows)


def _parents(end: Any) -> list[int]:
    found, stack = [], list[int]()
    for k in range(len(end)):
        while stack and end[stack[-1]] <= k:
            stack.pop()
        found.append(stack[-1] if stack else -1)
        stack.append(k)
    return found


def _rows_through(rows: Rows, node_of: Any, nodes: int) -> list[tuple[int, ...]]:
    row, _ = np.nonzero(rows.token_of >= 0)
    pairs = np.unique(np.stack([node_of[rows.token_of[rows.token_of >= 0]], row], 1), axis=0)
    found: list[list[int]] = [[] for _ in range(nodes)]
    for node, which in pairs.tolist():
        found[node].append(which)
    return [tuple(items) for items in found]
