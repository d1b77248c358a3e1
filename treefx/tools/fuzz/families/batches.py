"""Draw padded batches that share prefixes: forks, duplicates, padding on every side."""

from __future__ import annotations

from random import Random

from treefx.tools.fuzz.program import Batch

__all__ = ["PADDINGS", "draw_batch"]

PADDINGS = ("none", "right", "left", "holes", "both", "a row", "one row right", "mask alone")


def draw_batch(rng: Random, rows: int, columns: int, vocabulary: int, padding: str) -> Batch:
    """Make a batch [rows, columns] with padding of token 0, or (mask alone) other tokens."""
    ids = _rows(rng, rows, columns, vocabulary)
    mask = [_mask(rng, columns, padding, row) for row in range(rows)]
    if padding in ("left", "both"):
        ids = [_moved(tokens, row) for tokens, row in zip(ids, mask, strict=True)]
    if padding != "mask alone":
        ids = [[token * kept for token, kept in zip(*pair, strict=True)] for pair in zip(ids, mask, strict=True)]
    return Batch(tuple(map(tuple, ids)), tuple(map(tuple, mask)), rng.randrange(1000))


def _rows(rng: Random, rows: int, columns: int, vocabulary: int) -> list[list[int]]:
    def tokens(count: int) -> list[int]:
        return [rng.randrange(1, vocabulary) for _ in range(count)]

    found = [tokens(columns)]
    while len(found) < rows:
        kind = rng.random()
        shared = 0 if kind < 0.1 else columns if kind < 0.25 else rng.randint(1, columns)
        found.append(rng.choice(found)[:shared] + tokens(columns - shared))
    rng.shuffle(found)
    return found


def _mask(rng: Random, columns: int, padding: str, row: int) -> list[int]:
    short = rng.randint(1, columns)
    if padding in ("right", "mask alone"):
        return [int(column < short) for column in range(columns)]
    if padding == "left":
        return [int(column >= columns - short) for column in range(columns)]
    if padding == "holes":
        return [int(rng.random() < 0.8) for _ in range(columns)]
    if padding == "both":
        return [int(columns - short <= 2 * column < columns + short) for column in range(columns)]
    if padding == "a row" and row == 0:
        return [0] * columns
    if padding == "one row right" and row == 0:
        return [int(column < short) for column in range(columns)]
    return [1] * columns


def _moved(tokens: list[int], mask: list[int]) -> list[int]:
    """The row's first tokens where its padding leaves room: rows keep their shared prefixes."""
    rest = iter(tokens)
    return [next(rest) if kept else 0 for kept in mask]
