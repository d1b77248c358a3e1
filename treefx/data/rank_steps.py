"""Cut the rows of an epoch into steps of many ranks, in depth-first order.

``treefx.scale`` splits each step over the ranks.

Trees, and subtrees below a node, stand in random order. A step takes the next rows, as many as the ranks can hold once
they are split evenly. So a prefix is on several ranks only where that evens out a step, and in several steps only where
a tree stands across their border.
"""

from __future__ import annotations

import numpy as np

from treefx.forests.forest import Forest
from treefx.scale.outline import Outline
from treefx.scale.price import Cost
from treefx.scale.split import split

__all__ = ["deal_rows", "shuffled_outline"]

Step = list[list[int]]
"""Row numbers by rank."""


def deal_rows(forest: Forest, ranks: int, max_tokens: int, cost: Cost, random: np.random.Generator) -> list[Step]:
    """Every row in one step on one rank.

    Args:
        forest: of all rows.
        ranks: at least 2.
        max_tokens: most distinct tokens of a rank in a step; no row has more.
        cost: cost that the ranks of a step are balanced by; None: distinct tokens.
        random: the order of trees and branches.

    Returns:
        The steps. Every rank has a row in each but the last, and in that one too unless too few rows are left for it
        and the step before.
    """
    outline = shuffled_outline(forest, random)
    added = np.cumsum(outline.length - outline.shared)
    steps: list[Step] = []
    start = 0
    while start < len(outline):
        before = added[start - 1] if start else 0
        room = ranks * max_tokens - int(outline.shared[start])  # a step has its first row's prefix as well
        rows = int(np.searchsorted(added, before + room, side="right")) - start
        steps.append(_next_step(outline, start, rows, ranks, max_tokens, cost))
        start += sum(map(len, steps[-1]))
    missing = ranks - sum(map(len, steps[-1]))
    if missing > 0 and len(steps) > 1 and sum(map(len, steps[-2])) >= ranks + missing:
        moved = outline.row[-ranks:].tolist()
        steps[-2:] = [_without_idle([[row for row in own if row not in moved] for own in steps[-2]]), _one_each(moved)]
    return steps


def shuffled_outline(forest: Forest, random: np.random.Generator) -> Outline:
    """Return the rows depth first, with siblings in random order."""
    nodes = forest.nodes
    length = (nodes.stop - nodes.start).tolist()
    parent = nodes.parent.tolist()
    last = forest.flat_token_of[forest.row_offsets[1:] - 1].cpu().numpy()
    ends = np.searchsorted(nodes.start.cpu().numpy(), last, side="right") - 1
    rows_of: list[list[int]] = [[] for _ in parent]
    for row, node in enumerate(ends.tolist()):
        rows_of[node].append(row)
    children: list[list[int]] = [[] for _ in range(len(parent) + 1)]  # the last entry is for -1, above the roots
    for node in random.permutation(len(parent)).tolist():
        children[parent[node]].append(node)
    order, added, entered, waiting = [], [], 0, children[-1]
    while waiting:
        node = waiting.pop()
        entered += length[node]
        for row in rows_of[node]:
            order.append(row)
            added.append(entered)
            entered = 0
        waiting += children[node]
    lengths = forest.row_lengths.cpu().numpy()[order].astype(np.int64)
    return Outline(lengths, lengths - np.array(added, dtype=np.int64), np.array(order, dtype=np.int64))


def _next_step(outline: Outline, start: int, rows: int, ranks: int, max_tokens: int, cost: Cost) -> Step:
    """The longest run of rows from ``start`` that is found to fit, ``rows`` at most."""
    while rows > ranks:
        stop = start + rows
        shared = np.concatenate([[0], outline.shared[start + 1 : stop]])
        found = split(Outline(outline.length[start:stop], shared, outline.row[start:stop]), ranks, cost)
        most = int(found.tokens.max())
        if most <= max_tokens:
            return _without_idle([own.tolist() for own in found.rows])
        rows = min(rows - 1, max(ranks, rows * max_tokens // most))
    own_rows = outline.row[start : start + ranks].tolist()
    return [*_one_each(own_rows), *([] for _ in range(ranks - len(own_rows)))]


def _one_each(rows: list[int]) -> Step:
    return [[row] for row in rows]


def _without_idle(step: Step) -> Step:
    """Give every rank a row, if there are enough; a moved row makes no rank's work more."""
    while not all(step):
        step[step.index([])].append(max(step, key=len).pop())
    return step
