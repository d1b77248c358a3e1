"""List the tiles of attention that a kernel must visit, by intervals of key blocks.

Key j is seen by the queries ``low[j] <= q < high[j]``; a token's own key has ``low = j, high = subtree_end[j]``.
For a block of keys the queries that meet it are one interval of query blocks, and those that meet *only* visible
pairs are another, inside the first:

* nonempty iff ``min(low) <= q1`` and ``max(high) > q0`` (exact for own keys, conservative for others);
* full iff ``max(low) <= q0`` and ``min(high) > q1``.

So the lists need no matrix of blocks: time and memory are linear in the tokens plus the listed tiles. A condition of
the score is decided per tile by :mod:`treefx.kernels.tiles.tile_bounds`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import starmap
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from treefx.kernels.memory import Known, host_copies, is_on_device, lasting, send_together
from treefx.kernels.score import Expr, loads
from treefx.kernels.tiles.key_programs import KeyPrograms, cut_lists
from treefx.kernels.tiles.streams import Made
from treefx.kernels.tiles.tile_bounds import Extrema, decide_tiles

__all__ = [
    "Keys",
    "TileLists",
    "TreeBlocks",
    "build_blocks",
    "find_blocks",
    "find_intervals",
    "find_node_length",
    "forget_blocks",
    "keep",
    "recall",
    "remembered",
]

_CACHED = 48
_OVERWRITTEN = (
    "a tensor that describes the forest was overwritten without a new version (through .data, or by a custom "
    "kernel): no CUDA call of this process works after this; give the new forest in a new tensor"
)
_PAIRS_AT_ONCE = 1 << 22
"""Tiles that are decided in one go: bounds the memory of the conditions."""


@dataclass(frozen=True)
class Keys:
    """The keys of one launch.

    Attributes:
        high: exclusive last query that sees each key, int32 ``[K]``; not above ``low`` where none does.
        low: first query that sees each key, int32 ``[K]``; ``None``: the key's own index.
        base: index of the first key in score expressions.
        query_base: index of the first query in score expressions.
    """

    high: Tensor
    low: Tensor | None = None
    base: int = 0
    query_base: int = 0


@dataclass(frozen=True)
class TileLists:
    """The tiles of one side for every block of the other side, in CSR form, all int32.

    Attributes:
        order: blocks, those with the longest lists first ``[blocks]``.
        start: first entry of each block ``[blocks + 1]``.
        middle: exclusive end of each block's full tiles, which come before its partial ones ``[blocks]``.
        tiles: block numbers of the other side ``[entries]``.
    """

    order: Tensor
    start: Tensor
    middle: Tensor
    tiles: Tensor


@dataclass(frozen=True)
class TreeBlocks:
    """Hold tile lists in both directions, and the inputs of partial tiles' masks.

    Attributes:
        query_block: rows per block of queries.
        key_block: keys per block.
        low: as in :class:`Keys`, and zeros up to a whole block.
        size: ``high - low``, 0 for unseen keys, int32 ``[K]`` and zeros up to a whole block: q sees key j iff
            ``unsigned(q - low[j]) < size[j]``.
        by_query: key blocks of each query block (forward, dq).
        by_key: query blocks of each key block (dk, dv); a ragged block of queries is not full.
        key_programs: programs that visit them.
    """

    query_block: int
    key_block: int
    low: Tensor | None
    size: Tensor
    by_query: TileLists
    by_key: TileLists
    key_programs: KeyPrograms


def build_blocks(
    keys: Keys,
    queries: int,
    query_block: int,
    key_block: int,
    visible: Expr | None = None,
    buffers: Sequence[Tensor] = (),
    group: int = 1,
) -> TreeBlocks:
    """Build the tile lists; on a CUDA device the host waits twice, thrice with a condition.

    Args:
        keys: the keys, on the device that the lists shall be on.
        queries: number of queries.
        query_block: rows per tile of queries.
        key_block: keys per tile.
        visible: extra condition of the score; tiles where it is provably false are left out, and only those where
            it is provably true count as full.
        buffers: tensors that the condition loads.
        group: rows of every query, one below the other: the query heads that share a key head.
    """
    device = keys.high.device
    own = torch.arange(len(keys.high), device=device, dtype=torch.int32)
    low = own if keys.low is None else keys.low
    rows = queries * group
    first, end = low.to(torch.int64) * group, keys.high.to(torch.int64) * group
    begin, stop, full_begin, full_stop = find_intervals(first, end, rows, query_block, key_block)
    key_tile, query_tile = _pairs(begin, stop)
    full = (query_tile >= full_begin[key_tile]) & (query_tile < full_stop[key_tile])
    if visible is not None:
        query = torch.arange(rows, device=device) // group + keys.query_base
        query_extrema = Extrema("q", query, query_block, buffers)
        key_extrema = Extrema("k", own.to(torch.int64) + keys.base, key_block, buffers)
        never, always = _decide(visible, query_extrema, key_extrema, query_tile, key_tile)
        kept = (~never).nonzero()[:, 0]
        key_tile, query_tile, full = key_tile[kept], query_tile[kept], (full & always)[kept]
    by_query, _, _ = _lists(query_tile, key_tile, full, -(-rows // query_block))
    # A program of a block of keys reads the rows of a full tile unbounded: all of them must be there.
    by_key, start, middle = _lists(key_tile, query_tile, full & (query_tile < rows // query_block), len(begin))
    return TreeBlocks(
        query_block,
        key_block,
        None if keys.low is None else _up_to_blocks(low, key_block),
        _up_to_blocks((keys.high - low).clamp(min=0), key_block),  # as an unsigned number
        by_query,
        by_key,
        cut_lists(start, middle),
    )


def find_intervals(
    low: Tensor, high: Tensor, rows: int, query_block: int, key_block: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the query blocks [begin, stop) that each key block meets, and that it fills.

    Args:
        low: first row that sees each key, int64 ``[K]``.
        high: exclusive last row, int64 ``[K]``.
        rows: of all queries.
        query_block: rows per block.
        key_block: keys per block.
    """
    blocks = -(-len(low) // key_block)
    padding = blocks * key_block - len(low)

    def padded(values: Tensor, filler: int) -> Tensor:
        return torch.nn.functional.pad(values, (0, padding), value=filler).view(blocks, key_block)

    begin = padded(low, rows).amin(1).clamp(0, rows) // query_block
    last = padded(high, 0).amax(1).clamp(0, rows)
    stop = (last + query_block - 1) // query_block
    # Keys that do not exist are never seen, so a ragged block of keys is never full.
    full_begin = (padded(low, rows).amax(1).clamp(min=0) + query_block - 1) // query_block
    smallest = padded(high, 0).amin(1)
    total = -(-rows // query_block)
    full_stop = torch.where(smallest >= rows, total, smallest // query_block)  # the last query block may be ragged
    return begin, torch.maximum(stop, begin), full_begin, full_stop


def _pairs(begin: Tensor, stop: Tensor) -> tuple[Tensor, Tensor]:
    """Return every (key block, query block) of the intervals, by key block."""
    counts = stop - begin
    first = counts.cumsum(0) - counts
    key_tile = torch.repeat_interleave(torch.arange(len(begin), device=begin.device), counts)
    query_tile = torch.arange(len(key_tile), device=begin.device) - first[key_tile] + begin[key_tile]
    return key_tile, query_tile


def _decide(
    visible: Expr, queries: Extrema, keys: Extrema, query_tile: Tensor, key_tile: Tensor
) -> tuple[Tensor, Tensor]:
    parts = [
        decide_tiles(visible, queries, keys, rows, columns)
        for rows, columns in zip(*(torch.split(tile, _PAIRS_AT_ONCE) for tile in (query_tile, key_tile)), strict=True)
    ]
    never, always = zip(*parts, strict=True)
    return torch.cat(never), torch.cat(always)


def _lists(block: Tensor, tile: Tensor, full: Tensor, blocks: int) -> tuple[TileLists, Tensor, Tensor]:
    """Group tiles by block, full ones first, ascending; return the bounds as int64 too."""
    entry, by_block = torch.sort(2 * block + (~full).to(torch.int64), stable=True)
    bounds = torch.searchsorted(entry, torch.arange(2 * blocks + 1, device=block.device))
    start, middle = bounds[::2], bounds[1::2]
    lists = TileLists(
        torch.argsort(start[1:] - start[:-1], descending=True, stable=True).to(torch.int32),
        start.to(torch.int32),
        middle.to(torch.int32),
        tile[by_block].to(torch.int32),
    )
    return lists, start, middle


@dataclass(frozen=True)
class _Entry:
    settings: tuple[object, ...]
    given: tuple[Known, ...]
    """The caller's tensors, which may belong to the memory of a captured graph: nothing of that is kept."""
    copies: tuple[Tensor | None, ...]
    """Of those that the host has sent ``None``; nothing where it has sent all."""
    on_device: bool
    made: Made | None
    """When, on a device with streams."""
    value: Any

    def wait(self) -> None:
        """Make the current stream wait for values of another one."""
        if self.made is not None:
            self.made.use((self.value, self.copies))


_recent: list[_Entry] = []
_lock = Lock()


def find_blocks(
    keys: Keys,
    queries: int,
    query_block: int,
    key_block: int,
    visible: Expr | None = None,
    buffers: Sequence[Tensor] = (),
    group: int = 1,
) -> TreeBlocks:
    """Return :func:`build_blocks`, shared by layers, forward and backward of one step.

    A forest with vectors from the host has its lists made there, without synchronizing.

    On the CPU a hit is verified by content. On a CUDA device it goes by the identity and version of the tensors; of
    tensors that the host has not sent, the device itself checks the content and stops the program if one was
    overwritten behind autograd's back.
    """
    read = [buffers[number] for number in loads(visible)]
    given = tuple(x for x in (keys.high, keys.low, *read) if x is not None)
    settings = (queries, group, query_block, key_block, repr(visible), keys.base, keys.query_base, keys.low is None)

    def build() -> TreeBlocks:
        hosts = host_copies(given) if is_on_device(keys.high) else None
        if hosts is None:
            return build_blocks(keys, queries, query_block, key_block, visible, buffers, group)
        known = dict(zip(map(id, given), hosts, strict=True))
        copies = [known.get(id(buffer), buffer) for buffer in buffers]
        here = replace(keys, high=known[id(keys.high)], low=None if keys.low is None else known[id(keys.low)])
        made = build_blocks(here, queries, query_block, key_block, visible, copies, group)
        return _sent(made, keys.high.device)

    blocks: TreeBlocks = remembered(settings, given, build)
    return blocks


def _up_to_blocks(numbers: Tensor, block: int) -> Tensor:
    """Pad numbers of keys with zeros to whole blocks, as int32."""
    return torch.nn.functional.pad(numbers.to(torch.int32), (0, -len(numbers) % block)).contiguous()


def _sent(blocks: TreeBlocks, device: torch.device) -> TreeBlocks:
    """Return lists that were made on the host on a device."""
    parts = {name: vars(getattr(blocks, name)) for name in ("by_query", "by_key", "key_programs")}
    vectors = [x for part in parts.values() for x in part.values() if isinstance(x, Tensor)]
    of_keys = [x for x in (blocks.size, blocks.low) if x is not None]
    there = iter(send_together([*of_keys, *vectors], device))
    size = next(there)
    low = None if blocks.low is None else next(there)
    found: dict[str, dict[str, Any]] = {
        name: {key: next(there) if isinstance(x, Tensor) else x for key, x in part.items()}
        for name, part in parts.items()
    }
    return replace(
        blocks,
        low=low,
        size=size,
        by_query=TileLists(**found["by_query"]),
        by_key=TileLists(**found["by_key"]),
        key_programs=KeyPrograms(**found["key_programs"]),
    )


def forget_blocks() -> None:
    """Drop the lists that are kept, so that they take no memory while other forests run."""
    with _lock:
        _recent.clear()


def find_node_length(subtree_end: Tensor) -> int:
    """Return the mean node length of a forest, rounded down to a power of two; cached.

    Args:
        subtree_end: int32 ``[N]``. A token goes on the node of the token before it iff their subtrees end alike.
    """

    def count() -> int:
        (ends,) = host_copies([subtree_end]) or [subtree_end]
        return _mean_length(ends)

    length: int = remembered(("node length",), (subtree_end,), count)
    return length


def _mean_length(subtree_end: Tensor) -> int:
    """Return the mean length of nodes, without the single-token trees of padding."""
    alone = subtree_end - torch.arange(len(subtree_end), device=subtree_end.device) == 1
    ends = subtree_end[: len(subtree_end) + 1 - max(1, int(alone.flip(0).cumprod(0).sum()))]
    return 1 << (max(1, len(ends) // (1 + int((ends[1:] != ends[:-1]).sum()))).bit_length() - 1)


def remembered(settings: tuple[object, ...], given: tuple[Tensor, ...], build: Callable[[], Any]) -> Any:
    """Return the cached result of ``build``; a hit is verified as in :func:`find_blocks`."""
    with _lock:  # backward runs in separate threads
        entry = _recall(settings, given)
        if entry is None:
            with lasting():
                entry = _keep(settings, given, build())
    return entry.value


def recall(settings: tuple[object, ...], given: tuple[Tensor, ...]) -> Any:
    """Return the value of :func:`keep` for these settings and tensors, or ``None``."""
    with _lock:
        entry = _recall(settings, given)
    return None if entry is None else entry.value


def keep(settings: tuple[object, ...], given: tuple[Tensor, ...], value: Any) -> None:
    """Cache a value for settings and tensors that were looked up without a result."""
    with _lock, lasting():
        _keep(settings, given, value)


def _recall(settings: tuple[object, ...], given: tuple[Tensor, ...]) -> _Entry | None:
    for position, entry in enumerate(_recent):
        if entry.settings == settings and _same(entry, given):
            _recent.insert(0, _recent.pop(position))
            return entry
    return None


def _keep(settings: tuple[object, ...], given: tuple[Tensor, ...], value: Any) -> _Entry:
    known = [is_on_device(tensor) and host_copies([tensor]) is not None for tensor in given]
    copies = tuple(None if sent else tensor.clone() for sent, tensor in zip(known, given, strict=True))
    made = Made.now(given[0].device)
    held = () if all(known) else copies
    new = _Entry(settings, tuple(map(Known.of, given)), held, is_on_device(given[0]), made, value)
    _recent[:] = [new, *(entry for entry in _recent if not _is_over(entry))][:_CACHED]
    return new


def _is_over(entry: _Entry) -> bool:
    """Return whether an entry's sources are freed, so that it cannot be found any more."""
    return (entry.on_device or not entry.copies) and any(known.is_gone() for known in entry.given)


def _same(entry: _Entry, given: tuple[Tensor, ...]) -> bool:
    if entry.copies and (not is_on_device(given[0]) or any(tensor.is_inference() for tensor in given)):
        entry.wait()
        return all(starmap(_is_content, zip(entry.given, entry.copies, given, strict=True)))
    if not all(known.is_still(new) for known, new in zip(entry.given, given, strict=True)):
        return False
    entry.wait()
    for copy, new in zip(entry.copies, given, strict=bool(entry.copies)):
        if copy is not None:
            torch._assert_async((copy == new).all(), _OVERWRITTEN)
    return True


def _is_content(known: Known, copy: Tensor | None, new: Tensor) -> bool:
    return known.is_still(new) if copy is None else _alike(copy, new) and torch.equal(copy, new)


def _alike(first: Tensor, second: Tensor) -> bool:
    return first.shape == second.shape and first.dtype == second.dtype and first.device == second.device
