"""Draw the README's picture: rows that share prefixes, and the tree that runs instead.

``python -m treefx.tools.rows_picture docs`` (``make docs``) writes ``rows-to-tree.svg``. The tree, its token counts and
its colours come from ``treefx.Forest``.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from treefx.forests.draw import place_lanes
from treefx.forests.forest import Forest

__all__ = ["draw_rows"]

_ROWS = (
    "What is 7 x 8 ? 7 x 8 = 56",  # words: quoted
    "What is 7 x 8 ? 7 x 8 = 58",  # words: quoted
    "What is 7 x 8 ? It is 56 .",  # words: quoted
    "What is 7 x 8 ? It is 54 .",  # words: quoted
)
_WIDTH, _HEIGHT, _GAP = 38, 24, 10  # pixels of a token, and between two lanes
_TOP, _MARGIN = 44, 16
_COLOURS = {1: "#dbe7f5", 2: "#8fb8e0", 4: "#2f6fb3"}
"""Colour of a token by the number of rows that share it."""
_STYLE = "font:12px system-ui,sans-serif;text-anchor:middle;dominant-baseline:central"


def draw_rows(rows: Sequence[str] = _ROWS) -> str:
    """Draw rows of words as SVG, with the tree of their prefixes next to them."""
    words = [row.split() for row in rows]
    vocabulary = {word: number for number, word in enumerate(dict.fromkeys(sum(words, [])))}
    forest = Forest.from_sequences([[vocabulary[word] for word in row] for row in words])
    text = {number: word for word, number in vocabulary.items()}
    middle = _MARGIN * 3 + max(map(len, words)) * _WIDTH
    width = middle + (int(forest.depth.max()) + 1) * _WIDTH + _MARGIN
    height = _TOP + len(rows) * (_HEIGHT + _GAP) + _MARGIN
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">',
        f"<title>{len(rows)} rows of {forest.raw_tokens} tokens become a tree of {forest.num_tokens}</title>",
        f'<rect width="{width}" height="{height}" rx="8" fill="#ffffff"/>',
        _label(_MARGIN, f"the batch: {len(rows)} rows, {forest.raw_tokens} tokens"),
        _label(middle, f"what runs: one tree, {forest.num_tokens} tokens"),
    ]
    shared = forest.multiplicity[forest.padded_token_of()].tolist()
    for lane, row in enumerate(words):
        parts += [_token(_MARGIN + _WIDTH * i, lane, word, shared[lane][i]) for i, word in enumerate(row)]
    return "\n".join([*parts, *_tree(forest, text, middle), "</svg>", ""])


def _tree(forest: Forest, text: dict[int, str], left: int) -> Iterator[str]:
    nodes = forest.nodes
    lanes = place_lanes(nodes.parent.cpu().numpy())
    start, stop, parent = (values.tolist() for values in (nodes.start, nodes.stop, nodes.parent))
    depth, rows, ids = (values.tolist() for values in (forest.depth, forest.multiplicity, forest.tokens))
    for node, first in enumerate(start):
        if parent[node] >= 0:
            x, y, above = left + depth[first] * _WIDTH, _y(lanes[node]), _y(lanes[parent[node]])
            yield f'<path d="M{x} {above} V{y} H{x + 4}" stroke="#555" fill="none"/>'
        for token in range(first, stop[node]):
            yield _token(left + depth[token] * _WIDTH, lanes[node], text[ids[token]], rows[token])


def _y(lane: float) -> float:
    return _TOP + lane * (_HEIGHT + _GAP) + _HEIGHT / 2


def _label(x: int, text: str) -> str:
    return f'<text x="{x}" y="24" style="font:bold 14px system-ui,sans-serif" fill="#222">{text}</text>'


def _token(x: float, lane: float, word: str, rows: int) -> str:
    ink = "#ffffff" if rows >= 4 else "#222222"
    box = f'x="{x + 2}" y="{_y(lane) - _HEIGHT / 2}" width="{_WIDTH - 4}" height="{_HEIGHT}" rx="4"'
    return (
        f'<rect {box} fill="{_COLOURS[rows]}"/>'
        f'<text x="{x + _WIDTH / 2}" y="{_y(lane)}" style="{_STYLE}" fill="{ink}">{word}</text>'
    )


if __name__ == "__main__":
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "docs")
    (folder / "rows-to-tree.svg").write_text(draw_rows(), encoding="utf-8")
