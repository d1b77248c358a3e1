"""Number blocks of tokens that see each other, so that the trie shares whole blocks only.

A token of a block sees the whole block, so two tokens are equal only if their blocks are. The key of each token is its
own values and the number of its block; equal blocks have one number. Two rows share a whole block or part before it::

    ids     7 # # 8 | 7 # # 9        images  A, A        or  A, B
    blocks  - 0 0 - | - 0 0 -                            or  - 0 0 - | - 1 1 -
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from treefx.forests.trie import combine_keys
from treefx.kernels.memory import on_host
from treefx.kernels.score import Expr
from treefx.passes.scores.blocks import Blocks
from treefx.runtime.padding import Grid

__all__ = ["number_blocks"]


def number_blocks(blocks: Blocks, grid: Grid, keep: Tensor | None, keys: Sequence[Tensor]) -> Tensor | None:
    """Number the block of each token; equal blocks get one number.

    A query must see a later key iff both are in one run of columns that are kept.

    Args:
        blocks: Conditions of the mask on a query and a later key.
        grid: The inputs of the call.
        keep: bool [B, T], the positions that run; None for all.
        keys: Other values [B, T] by which tokens differ.

    Returns:
        int64 [B, T], -1 outside of blocks. None if the mask is not one of blocks in this call.
    """
    shape = grid.rows, grid.columns
    kept = np.ones(shape, dtype=bool) if keep is None else on_host(keep).numpy()
    as_queries, as_keys = (_all(grid, items) & kept for items in (blocks.of_queries, blocks.of_keys))
    numbers = _numbers(grid, blocks)
    members = as_queries & as_keys
    starts = _starts(members, numbers)
    if _come_again(members, numbers, starts) or _meet_outside(as_queries, as_keys, numbers):
        return None
    codes = combine_keys([np.broadcast_to(on_host(x).numpy(), shape) for x in map(_comparable, keys)])
    return torch.from_numpy(_number_runs(members, starts, codes))


def _all(grid: Grid, conditions: Sequence[Expr]) -> np.ndarray:
    """Evaluate all conditions at each token, bool [B, T]."""
    met = np.ones((grid.rows, grid.columns), dtype=bool)
    for condition in conditions:
        met &= on_host(grid.at_tokens(condition)).numpy().astype(bool)
    return met


def _numbers(grid: Grid, blocks: Blocks) -> np.ndarray:
    """Combine the numbers of each token into one, int64 [B, T]."""
    found = [on_host(_comparable(grid.at_tokens(item))).numpy() for item in blocks.numbers]
    numbers: np.ndarray = combine_keys(found) if found else np.zeros((grid.rows, grid.columns), dtype=np.int64)
    return numbers


def _comparable(x: Tensor) -> Tensor:
    return x.view(torch.int16) if x.dtype is torch.bfloat16 else x


def _starts(members: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """Mark the first token of each run of members with equal numbers, bool [B, T]."""
    before = np.zeros_like(members)
    before[:, 1:] = members[:, :-1] & (numbers[:, :-1] == numbers[:, 1:])
    starts: np.ndarray = members & ~before
    return starts


def _come_again(members: np.ndarray, numbers: np.ndarray, starts: np.ndarray) -> bool:
    """Return True if two runs of one row have the same number."""
    rows, columns = np.nonzero(starts)
    pairs = np.stack([rows, numbers[rows, columns]], 1)
    return len(np.unique(pairs, axis=0)) < len(pairs)


def _meet_outside(as_queries: np.ndarray, as_keys: np.ndarray, numbers: np.ndarray) -> bool:
    """Return True if a query sees a later key of its number, but one of them is no member.

    A member is a token that meets the conditions both as a query and as a key.
    """
    for first, second in ((as_queries & ~as_keys, as_keys), (as_queries, as_keys & ~as_queries)):
        for row in np.flatnonzero(first.any(1) & second.any(1)):
            queries, keys = np.flatnonzero(first[row]), np.flatnonzero(second[row])
            last = {int(numbers[row, key]): int(key) for key in keys}
            if any(last.get(int(numbers[row, query]), -1) > query for query in queries):
                return True
    return False


def _number_runs(members: np.ndarray, starts: np.ndarray, codes: np.ndarray) -> np.ndarray:
    """Number runs by their codes, int64 [B, T]; runs of equal codes get one number."""
    result = np.full(members.shape, -1, dtype=np.int64)
    run = np.cumsum(starts[members]) - 1
    if not len(run):
        return result
    first = np.flatnonzero(starts[members])
    within = np.arange(len(run)) - first[run]
    contents = np.full((run[-1] + 1, within.max() + 2), -1, dtype=np.int64)
    contents[run, within] = codes[members]
    contents[:, -1] = np.bincount(run)
    result[members] = np.unique(contents, axis=0, return_inverse=True)[1].reshape(-1)[run]
    return result
