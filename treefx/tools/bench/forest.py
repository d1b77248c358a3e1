"""Time building forests at the sizes of a training step."""

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch

from treefx.forests.forest import Forest
from treefx.output import watch

__all__ = ["run"]

_ROWS, _LENGTH, _GROUP, _VOCABULARY = 64, 8192, 8, 150_000
_REPEATS = 5

Build = Callable[[], Forest]


def run(json: bool = False) -> list[dict[str, Any]]:
    """Time `Forest.from_sequences` and `Forest.from_padded`, each the best of several runs.

    Args:
        json: a program reads the result, so no progress bar is shown.

    Returns:
        One record per case: `case`, `rows`, `raw_tokens`, `tokens` (distinct), `build_ms` (the forest alone)
        and `edges_ms` (the row sets of its edges on top, which only row means and policy losses ask for).
    """
    cases = watch(list(_cases()), "building forests", quiet=json)
    return [_time_case(name, build) for name, build in cases]


def _cases() -> Iterator[tuple[str, Build]]:
    """Name and construction of every case; the inputs are made before the clock starts."""
    groups, distinct = _make_groups(_LENGTH // 2), _make_groups(0)
    size = f"{_ROWS} x {_LENGTH}"
    for name, batch in ((f"{size}, 8 prompts x 8", groups), (f"{size}, nothing shared", distinct)):
        lists, tensor = batch.tolist(), torch.from_numpy(batch)
        mask = torch.ones_like(tensor)
        yield f"{name}, lists", partial(Forest.from_sequences, lists)
        yield f"{name}, tensors", partial(Forest.from_sequences, list(tensor))
        yield f"{name}, padded", partial(Forest.from_padded, tensor, mask)
    whole = _make_groups(0)[0]
    turns = [whole[:stop] for stop in range(len(whole) // _ROWS, len(whole) + 1, len(whole) // _ROWS)]
    yield f"conversation of {_LENGTH}, {_ROWS} turns", partial(Forest.from_sequences, turns)
    nested = [whole[:stop] for stop in range(2000, 0, -1)]
    yield "2000 nested prefixes", partial(Forest.from_sequences, nested)


def _make_groups(shared: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Rows in shuffled order, whose groups of 8 share their first `shared` tokens."""
    random = np.random.default_rng(0)
    batch = random.integers(0, _VOCABULARY, (_ROWS, _LENGTH))
    for start in range(0, _ROWS, _GROUP):
        batch[start : start + _GROUP, :shared] = batch[start, :shared]
    return random.permutation(batch)


def _time_case(name: str, build: Build) -> dict[str, Any]:
    build_s, edges_s = float("inf"), float("inf")
    for _ in range(_REPEATS):
        start = time.perf_counter()
        forest = build()
        built = time.perf_counter()
        _ = forest.edges.row_weight
        edges_s = min(edges_s, time.perf_counter() - built)
        build_s = min(build_s, built - start)
    return {
        "case": name,
        "rows": len(forest),
        "raw_tokens": forest.raw_tokens,
        "tokens": forest.num_tokens,
        "build_ms": round(build_s * 1e3, 2),
        "edges_ms": round(edges_s * 1e3, 2),
    }
