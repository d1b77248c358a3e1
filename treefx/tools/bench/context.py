"""Split the tokens of a long tree over ranks: balance, and traffic against a ring.

Trees are depths and subtree ends without tokens, four shapes of long contexts. The cost is that of an 8B model, as in
``treefx bench assign``. Figures follow from the shapes alone and are the same on every machine, but for the time.
"""

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from treefx.scale.outline import IntArray
from treefx.scale.pieces import TokenSplit, preferred, split_places
from treefx.tools.bench.assign import QWEN3_8B, eight_billion

__all__ = ["RANKS", "TREES", "run"]

RANKS = (2, 8, 32)
Places = tuple[IntArray, IntArray]


def run() -> list[dict[str, Any]]:
    """Share every tree among every number of ranks.

    Returns:
        One record per tree and ranks: `tree`, `tokens`, `above` (mean ancestors over all tokens), `ranks`, the `way`
        taken, `balance` (the busiest rank's cost over the mean), `most_tokens` (the fullest rank's over the mean),
        `of_ring` (tokens received over those that a ring passes), `busiest_of_ring` (the same of the rank that receives
        most), `MB_per_layer` (of keys and values in bfloat16 that the busiest receives), `ms`, and of every way
        its balance and of_ring.
    """
    return [_measure(name, make(), ranks) for name, make in TREES.items() for ranks in RANKS]


def _measure(name: str, places: Places, ranks: int) -> dict[str, Any]:
    started = time.perf_counter()
    ways = split_places(*places, ranks, eight_billion())
    found = preferred(ways)
    seconds = time.perf_counter() - started
    sizes = np.array([len(own) for own in found.tokens])
    most, count = int(found.received.max()), int(sizes.sum())
    bytes_of_token = 2 * QWEN3_8B.kv_heads * QWEN3_8B.head_dim * QWEN3_8B.bytes_per_number
    return {
        "tree": name,
        "tokens": count,
        "above": round(float(places[0].mean() / count), 3),
        "ranks": ranks,
        "way": found.way,
        "balance": round(found.balance, 3),
        "most_tokens": round(float(sizes.max() / sizes.mean()), 3),
        "of_ring": round(found.of_ring, 3),
        "busiest_of_ring": round(most * ranks / ((ranks - 1) * count), 3),
        "MB_per_layer": round(most * bytes_of_token / 1e6),
        "ms": round(seconds * 1e3),
        **{way.way: _figures(way) for way in ways},
    }


def _figures(found: TokenSplit) -> str:
    return f"{found.balance:.2f} {found.of_ring:.2f}"


def chain(length: int = 262_144) -> Places:
    """One row."""
    return _of_nodes([(-1, length)])


def conversation(turns: int = 48, seed: int = 0) -> Places:
    """Make a conversation with long thoughts that the next turn drops: a leaf per turn."""
    random = np.random.default_rng(seed)
    nodes, above = [], -1
    for _ in range(turns):
        stem, leaf = random.lognormal(np.log([1950, 2300]), 0.5).astype(int).tolist()
        nodes.append((above, stem))
        above = len(nodes) - 1
        nodes.append((above, leaf))
    return _of_nodes(nodes)


def rollouts(prompt: int = 16_384, answers: int = 8, answer: int = 26_000) -> Places:
    """Long answers to one long prompt."""
    return _of_nodes([(-1, prompt), *((0, answer) for _ in range(answers))])


def search(branching: int = 3, levels: int = 5, node: int = 4_900) -> Places:
    """A search tree, every node of which has as many children down to the leaves."""
    nodes = [(-1, node)]
    first = 0
    for _ in range(levels - 1):
        last = len(nodes)
        nodes += [(above, node) for above in range(first, last) for _ in range(branching)]
        first = last
    return _of_nodes(nodes)


def _of_nodes(nodes: list[tuple[int, int]]) -> Places:
    """Return depth and subtree end of every token of nodes (parent or -1, length), in order."""
    children: dict[int, list[int]] = {}
    for number, (above, _) in enumerate(nodes):
        children.setdefault(above, []).append(number)
    size = [length for _, length in nodes]
    for number in range(len(nodes) - 1, -1, -1):
        if nodes[number][0] >= 0:
            size[nodes[number][0]] += size[number]
    depth, end, start = [], [], 0
    waiting = [(number, 0) for number in reversed(children[-1])]
    while waiting:
        number, above = waiting.pop()
        length = nodes[number][1]
        depth.append(np.arange(above, above + length))
        end.append(np.full(length, start + size[number]))
        start += length
        waiting += [(child, above + length) for child in reversed(children.get(number, []))]
    return np.concatenate(depth), np.concatenate(end)


TREES: dict[str, Callable[[], Places]] = {
    "chain": chain,
    "conversation, a leaf per turn": conversation,
    "8 answers to one prompt": rollouts,
    "search tree": search,
}
