"""Rectangles of the tree mask: which queries meet which keys, under which additive mask."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from treefx.kernels.common import Inputs, accumulation_dtype
from treefx.kernels.memory import lasting
from treefx.kernels.tiles.structure import Column, Group, IntArray, Ranges, Structure, count_tokens, joined
from treefx.kernels.tiles.tile_keys import to_tensor, tree_condition

__all__ = [
    "MIN_ROWS",
    "SMALL_TILE",
    "Tile",
    "UNSPLIT_KEYS",
    "add_keys",
    "attend_tile",
    "differentiate_tile",
    "flash",
    "flash_backward",
    "mask_elements",
    "plain_tiles",
    "rows_per_tile",
    "take_keys",
]

MIN_ROWS = 128
"""Smaller nodes are merged until a group has this many queries."""
MIN_COLUMN_KEYS = 256
"""Groups that share this many keys attend to them in one call: few rows per call take twice the time."""
UNSPLIT_KEYS = 512
"""Up to this many shared keys are taken under the mask of the group's own block: one call instead of two."""
SMALL_TILE = 1 << 17
"""Below this many pairs the kernel's 16-bit backward is up to three times slower than its float32 one."""
TILE_ELEMENTS = 1 << 21
"""Elements of one tile's eager scores, over batch and heads: more than the caches hold takes longer."""
_KEPT_ELEMENTS = 1 << 22
"""Elements of masks and ranges that are kept for a forest's next layer."""
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


def rows_per_tile(inputs: Inputs, structure: Structure, elements: int = TILE_ELEMENTS) -> int:
    """Return how many queries a tile with a number per batch, head, query and key may have."""
    per_row = inputs.q.shape[0] * inputs.q.shape[1] * structure.longest_path
    return max(16, min(2 * MIN_ROWS, elements // max(1, per_row)))


def plain_tiles(inputs: Inputs, structure: Structure) -> Iterable[Tile]:
    """Return tiles of the bare tree condition, shared by all layers unless big."""
    key = ("plain tiles", accumulation_dtype(inputs.q), MIN_ROWS, MIN_COLUMN_KEYS, UNSPLIT_KEYS)
    kept: list[Tile] | None = structure.kept.get(key)
    if kept is not None:
        return kept
    made, elements = [], 0
    rest = _make_plain_tiles(inputs, structure)
    for tile in rest:
        made.append(tile)
        elements += len(tile.keys) + (0 if tile.mask is None else tile.mask.numel())
        if elements > _KEPT_ELEMENTS:
            return chain(made, rest)
    structure.kept[key] = made
    return made


def mask_elements(subtree_end: IntArray) -> int:
    """Return the elements of all masks of :func:`plain_tiles`, or of those held at a time."""
    if (subtree_end == len(subtree_end)).all():  # a chain
        return 0
    _, groups = _split(Structure.from_ends(subtree_end))
    masked = [(group.stop - group.start, keys) for group in groups for _, keys in [_split_keys(group)]]
    elements = [rows * count_tokens(keys) for rows, keys in masked if keys is not None]
    return min(sum(elements), _KEPT_ELEMENTS + max(elements, default=0))


def _split(structure: Structure) -> tuple[Sequence[Column], Sequence[Group]]:
    """Groups of queries, and the keys that several of them attend to in one call."""
    tokens = len(structure.subtree_end)
    # A second call takes longer than the pairs that it saves; the more so, the more threads share the pairs.
    if 2 * tokens <= (3 if torch.get_num_threads() == 1 else 4) * MIN_ROWS:
        return (), (structure.group(0, tokens),)
    return structure.columns(MIN_ROWS, MIN_COLUMN_KEYS)


def _make_plain_tiles(inputs: Inputs, structure: Structure) -> Iterator[Tile]:
    columns, groups = _split(structure)
    for group in groups:
        yield from _group_tiles(inputs, group)
    for column in columns:
        yield Tile(column.start, column.stop, column.keys)


def _split_keys(group: Group) -> tuple[Ranges, Ranges | None]:
    """Return a group's keys without a mask, and those under one; None for a chain."""
    shared, partial = group.shared, group.partial
    if group.causal and not len(partial):
        return shared, None
    alone = count_tokens(shared) > UNSPLIT_KEYS
    return (shared, joined(partial, group.block)) if alone else (shared[:0], joined(shared, partial, group.block))


def _group_tiles(inputs: Inputs, group: Group) -> Iterator[Tile]:
    unmasked, masked = _split_keys(group)
    if len(unmasked):
        yield Tile(group.start, group.stop, unmasked)
    if masked is None:
        yield Tile(group.start, group.stop, group.block, causal=True)
        return
    with lasting():  # autograd saves the mask where torch's own attention runs the tile
        mask = _additive(tree_condition(inputs, group, to_tensor(masked)), inputs)
    yield Tile(group.start, group.stop, masked, mask=mask)


def take_keys(tensor: Tensor, ranges: Ranges) -> Tensor:
    """Return the tokens in ``ranges`` of ``[B, H, N, D]``: a view for one range."""
    if len(ranges) <= 1:
        start, stop = ranges[0].tolist() if len(ranges) else (0, 0)
        return tensor[:, :, start:stop]
    if len(ranges) <= _COPIED_RANGES:
        return torch.cat([tensor[:, :, start:stop] for start, stop in ranges.tolist()], dim=2)
    return tensor.index_select(2, to_tensor(ranges))


def add_keys(total: Tensor, ranges: Ranges, part: Tensor) -> None:
    """Add ``part`` to the tokens in ``ranges`` of ``total``, in place."""
    if len(ranges) > _COPIED_RANGES:
        total.index_add_(2, to_tensor(ranges), part.to(total.dtype))
        return
    offset = 0
    for start, stop in ranges.tolist():
        total[:, :, start:stop] += part[:, :, offset : offset + stop - start]
        offset += stop - start


def _additive(seen: Tensor, inputs: Inputs) -> Tensor:
    zero = torch.zeros((), dtype=accumulation_dtype(inputs.q))
    return torch.where(seen, zero, -torch.inf)


flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def attend_tile(q: Tensor, keys: Tensor, values: Tensor, tile: Tile, factor: float) -> tuple[Tensor, Tensor]:
    """Attend from a tile's queries to its keys.

    Args:
        q: the tile's queries ``[B, H, Q, D]``.
        keys: ``[B, Hkv, K, D]``.
        values: ``[B, Hkv, K, D]``.
        tile: its mask.
        factor: of q.k.

    Returns:
        Output ``[B, H, Q, D]`` and log-sum-exp ``[B, H, Q]``.
    """
    mask = _kernel_mask(tile, q, keys)
    out, lse = flash(q, keys, values, 0.0, tile.causal, attn_mask=mask, scale=factor)
    if tile.dead is not None:  # the kernel reports 0 there
        lse = lse.masked_fill(tile.dead, -torch.inf)
    return out, lse


def differentiate_tile(
    row_tensors: Sequence[Tensor], keys: Tensor, values: Tensor, tile: Tile, factor: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return a tile's share of the gradients of its queries, keys and values.

    Args:
        row_tensors: gradient of the output, queries, output and log-sum-exp (over all tiles) of the tile's queries.
        keys: as in the forward.
        values: as in the forward.
        tile: its mask.
        factor: of q.k.
    """
    grad_out, q, out, lse = row_tensors
    if q.dtype != lse.dtype and q.shape[2] * keys.shape[2] < SMALL_TILE:
        grad_out, q, keys, values, out = (x.to(lse.dtype) for x in (grad_out, q, keys, values, out))
    mask = _kernel_mask(tile, q, keys)
    result: tuple[Tensor, Tensor, Tensor] = flash_backward(
        grad_out, q, keys, values, out, lse, 0.0, tile.causal, attn_mask=mask, scale=factor
    )
    return result


def _kernel_mask(tile: Tile, q: Tensor, keys: Tensor) -> Tensor | None:
    if tile.mask is None:
        return None
    mask = tile.mask
    while mask.ndim < 4:
        mask = mask[None]
    return mask.expand(-1, -1, q.shape[2], keys.shape[2])
