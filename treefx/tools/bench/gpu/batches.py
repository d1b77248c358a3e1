"""Batches whose rows share what trainers' rollouts share, of random tokens."""

from itertools import accumulate
from typing import Any

import numpy as np
import torch

from treefx.data import Batch
from treefx.tools.bench.attention.trees import Tree
from treefx.tools.bench.gpu.scale import Scale

__all__ = ["FRESH", "SHARING", "Rows", "make_batch", "shortened", "tree_of", "varied"]

FRESH = 6
"""Batches of one kind that are drawn after the first: more than the tries that a process keeps."""

Rows = tuple[tuple[tuple[int, int], ...], ...]
"""Of every row its pieces: a number that names the piece among those that follow the same ones, and its tokens."""


def _overlap(percent: int, length: int = 2048) -> Rows:
    prefix = length * percent // 100
    return tuple(((0, prefix), (row, length - prefix)) for row in range(8))


def _groups(prompts: int, answers: int, prompt_tokens: int, answer_tokens: int) -> Rows:
    return tuple(
        ((prompt, prompt_tokens), (answer, answer_tokens)) for prompt in range(prompts) for answer in range(answers)
    )


SHARING: dict[str, Rows] = {
    "overlap 60 %": _overlap(60),
    "overlap 0 %": _overlap(0),
    "tau-bench, 8 turns": tuple(tuple((0, 400) for _ in range(turn)) for turn in range(2, 10)),
    "GRPO 2 x 8": _groups(2, 8, 512, 512),
    "overlap 92 %": _overlap(92),
    "overlap 20 %": _overlap(20),
    "ToolBench, 4 x 2 branches": tuple(((0, 1200), (a, 500), (b, 300)) for a in range(4) for b in range(2)),
    "GRPO 8 x 8": _groups(8, 8, 256, 128),
}
"""The rows by what they are like, the most telling first. As many tokens as inductor has memory for on 80 GB."""


def shortened(rows: Rows) -> Rows:
    """Return rows with the same sharing and a hundredth of the tokens; row lengths match."""
    return tuple(_shortened(row) for row in rows)


def _shortened(row: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
    ends = [end // 100 for end in accumulate(length for _, length in row)]
    return tuple((number, end - start) for (number, _), start, end in zip(row, [0, *ends], ends, strict=False))


def varied(rows: Rows, number: int) -> Rows:
    """Return rows of the same lengths with other forks, if all have a prefix and a rest.

    Forks move to either side in turn, so that the batches have as many distinct tokens on average.

    Args:
        rows: a kind of batch.
        number: of the batch; 0 leaves the rows as they are.
    """
    if any(len(row) != 2 for row in rows):
        return rows
    moved = (number + 1) // 2 * min(row[0][1] + row[1][1] for row in rows) // 256 * (-1) ** number
    if any(min(row[0][1], row[1][1]) < 2 * abs(moved) for row in rows):
        return rows
    return tuple(((prefix, length - moved), (rest, others + moved)) for (prefix, length), (rest, others) in rows)


def tree_of(rows: Rows) -> Tree:
    """Return the tree of the rows' pieces, each once."""
    places: dict[Any, int] = {(): -1}
    nodes: list[tuple[int, int]] = []
    for row in rows:
        kept = tuple(piece for piece in row if piece[1])
        for number, (_, length) in enumerate(kept):
            if kept[: number + 1] not in places:
                places[kept[: number + 1]] = len(nodes)
                nodes.append((places[kept[:number]], length))
    return Tree(f"{len(rows)} rows", tuple(nodes))


def make_batch(scale: Scale, rows: Rows, vocabulary: int, seed: int = 0) -> Batch:
    """Pad rows on the right; equal numbers behind equal pieces give equal tokens."""
    drawn = [_tokens(row, vocabulary, seed) for row in rows]
    width = max(map(len, drawn))
    ids, mask = (torch.zeros(len(drawn), width, dtype=torch.int64) for _ in range(2))
    for number, row in enumerate(drawn):
        ids[number, : len(row)], mask[number, : len(row)] = torch.from_numpy(row), 1
    ids, mask = ids.to(scale.device), mask.to(scale.device)
    return Batch(ids, mask, ids.masked_fill(mask == 0, -100))


def _tokens(row: tuple[tuple[int, int], ...], vocabulary: int, seed: int) -> Any:
    pieces = []
    for place, (number, length) in enumerate(row):
        random = np.random.default_rng([seed, *(known for known, _ in row[:place]), number])
        piece = random.integers(1, vocabulary, length)
        if length:
            piece[0] = 1 + number  # or pieces may begin alike by chance
        pieces.append(piece)
    return np.concatenate(pieces)
