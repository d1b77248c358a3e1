"""Rectangles of the tree mask: which queries meet which keys, under which additive mask."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from treefx.kernels.common import Inputs, accumulation_dtype
from treefx.kernels.score import Expr, evaluate
from treefx.kernels.structure import Group, Ranges, Structure, count_tokens, indices_of, ranges_of

__all__ = [
    "Tile",
    "add_keys",
    "evaluate_tile",
    "find_tile_keys",
    "plain_tiles",
    "rows_per_tile",
    "scored_tiles",
    "take_keys",
]

_MIN_ROWS = 128
"""Smaller nodes are merged until a group has this many queries."""
_MIN_COLUMN_KEYS = 256
"""Groups that share this many keys attend to them in one call: few rows per call take twice the time."""
_UNSPLIT_KEYS = 512
"""Up to this many shared keys are taken under the mask of the group's own block: one call instead of two."""
_TILE_ELEMENTS = 1 << 23
"""Elements of one tile's scores or mask, over batch and heads."""
_COPIED_RANGES = 16
"""Up to this many ranges are copied one by one, more of them through an index."""


@dataclass(frozen=True)
class Tile:
    """One call of the flash kernel: queries [start, stop) and some of their keys.

    Attributes:
        start: first query.
        stop: exclusive last query.
        keys: the key ranges, in packed order.
        causal: whether the keys are the queries' own tokens, each seeing those before it.
        mask: additive mask that broadcasts to ``[B, H, Q, K]``, or ``None``.
        dead: rows of the tile without a visible key, broadcasts to ``[B, H, Q]``, or ``None``.
    """

    start: int
    stop: int
    keys: Ranges
    causal: bool = False
    mask: Tensor | None = None
    dead: Tensor | None = None


def rows_per_tile(inputs: Inputs, structure: Structure) -> int:
    """Return how many queries a tile of eager scores may have."""
    per_row = inputs.q.shape[0] * inputs.q.shape[1] * structure.longest_path
    return max(16, min(2 * _MIN_ROWS, _TILE_ELEMENTS // max(1, per_row)))


def plain_tiles(inputs: Inputs, structure: Structure) -> Iterator[Tile]:
    """Yield the tiles of the bare tree condition."""
    columns, groups = structure.columns(_MIN_ROWS, _MIN_COLUMN_KEYS)
    for group in groups:
        yield from _group_tiles(inputs, group)
    for column in columns:
        yield Tile(column.start, column.stop, column.keys)


def _group_tiles(inputs: Inputs, group: Group) -> Iterator[Tile]:
    block = ((group.start, group.stop),)
    causal = group.causal and not group.partial
    alone = bool(group.shared) and (causal or count_tokens(group.shared) > _UNSPLIT_KEYS)
    if alone:
        yield Tile(group.start, group.stop, group.shared)
    if causal:
        yield Tile(group.start, group.stop, block, causal=True)
        return
    keys = (() if alone else group.shared) + group.partial + block
    mask = _additive(_tree_condition(inputs, group, _to_tensor(keys)), inputs)
    yield Tile(group.start, group.stop, keys, mask=mask)


def scored_tiles(inputs: Inputs, structure: Structure, bias: Expr | None, visible: Expr | None) -> Iterator[Tile]:
    """Yield the tiles of the tree condition, an extra condition and a bias; keys nobody sees are left out."""
    rows = rows_per_tile(inputs, structure)
    for group in structure.groups(min(_MIN_ROWS, rows), rows):
        keys, seen = find_tile_keys(inputs, group, visible)
        if bias is None:
            full = seen.flatten(0, -2).all(dim=0)
            if full.any():
                yield Tile(group.start, group.stop, _to_ranges(keys[full]))
            keys, seen = keys[~full], seen[..., ~full]
            mask = _additive(seen, inputs)
        else:
            added = evaluate_tile(bias, inputs, group, keys).to(accumulation_dtype(inputs.q))
            mask = torch.where(seen, added, -torch.inf)
        if keys.numel():
            dead = (mask == -torch.inf).all(dim=-1)
            yield Tile(group.start, group.stop, _to_ranges(keys), mask=mask, dead=dead)


def find_tile_keys(inputs: Inputs, group: Group, visible: Expr | None) -> tuple[Tensor, Tensor]:
    """Return the keys ``[K]`` that any query of the group sees, and who sees them ``[..., Q, K]``."""
    keys = _to_tensor((*group.shared, *group.partial, (group.start, group.stop)))
    seen = _tree_condition(inputs, group, keys)
    if visible is not None:
        seen = seen & evaluate_tile(visible, inputs, group, keys).to(torch.bool)
    kept = seen.flatten(0, -2).any(dim=0)
    return keys[kept], seen[..., kept]


def evaluate_tile(expr: Expr, inputs: Inputs, group: Group, keys: Tensor, dot: Tensor | None = None) -> Tensor:
    """Evaluate an expression for the queries of a group and the given keys."""
    q, _, head, batch = inputs.indices(group.start, group.stop)
    if dot is None:
        dot = torch.zeros((), dtype=accumulation_dtype(inputs.q))
    return evaluate(expr, dot=dot, q=q, k=keys[None, :], head=head, batch=batch, buffers=inputs.buffers)


def take_keys(tensor: Tensor, ranges: Ranges) -> Tensor:
    """Return the tokens in ``ranges`` of a ``[B, H, N, D]`` tensor: a view if they are one range."""
    if len(ranges) <= 1:
        start, stop = ranges[0] if ranges else (0, 0)
        return tensor[:, :, start:stop]
    if len(ranges) <= _COPIED_RANGES:
        return torch.cat([tensor[:, :, start:stop] for start, stop in ranges], dim=2)
    return tensor.index_select(2, _to_tensor(ranges))


def add_keys(total: Tensor, ranges: Ranges, part: Tensor) -> None:
    """Add ``part`` to the tokens in ``ranges`` of ``total``, in place."""
    if len(ranges) > _COPIED_RANGES:
        total.index_add_(2, _to_tensor(ranges), part.to(total.dtype))
        return
    offset = 0
    for start, stop in ranges:
        total[:, :, start:stop] += part[:, :, offset : offset + stop - start]
        offset += stop - start


def _tree_condition(inputs: Inputs, group: Group, keys: Tensor) -> Tensor:
    queries = torch.arange(group.start, group.stop)[:, None]
    return (keys[None, :] <= queries) & (queries < inputs.subtree_end[keys][None, :])


def _additive(seen: Tensor, inputs: Inputs) -> Tensor:
    zero = torch.zeros((), dtype=accumulation_dtype(inputs.q))
    return torch.where(seen, zero, -torch.inf)


def _to_tensor(ranges: Ranges) -> Tensor:
    return torch.from_numpy(indices_of(ranges))


def _to_ranges(keys: Tensor) -> Ranges:
    return ranges_of(keys.numpy())
