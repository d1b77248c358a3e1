"""Which tokens of a forest run together in a chunked recurrence.

A chunk is a run of at most L tokens of one unary chain: it never crosses a fork, so its incoming state is that of one
chunk, its parent. Chunks are padded to one of a few lengths (halves of L), so that a short one at a fork costs little;
all chunks of a length run as one batch. Only states that some chunk reads are computed, level by level, a level being
the number of chunks above: as many steps as the longest row has chunks, for any number of rows.

In a part of a cut forest (``Doors``) chunks also end at exits, and the states of exits are computed.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from treefx.kernels.tiles.tree_blocks import remembered

__all__ = [
    "ChunkPlan", "Chunks", "Doors", "Segment", "find_chunk_plan", "find_part_plan", "node_begins",
    "nodes_above", "plan_chunks",
]  # fmt: skip

IntArray = npt.NDArray[np.int64]

_SHORTEST = 8
"""Chunks are not padded to less."""


@dataclass(frozen=True)
class Doors:
    """Name the tokens of a part at which states enter from parts above and leave to parts below.

    Attributes:
        given: number S of states that enter.
        entry: number of the state that a root starts from, S for zero, int64 ``[N]``; unused at other tokens.
        exits: tokens with leaving states, -1 for a state of zero, int64 ``[X]``.
    """

    given: int
    entry: Tensor
    exits: Tensor

    @property
    def vectors(self) -> tuple[Tensor, Tensor]:
        """Return both tensors."""
        return self.entry, self.exits


@dataclass(frozen=True)
class Chunks:
    """Hold the C chunks of one padded length L, those with a read state first, by slot.

    Attributes:
        tokens: packed tokens, int64 ``[C, L]``; where a chunk is shorter, any token.
        padding: bool ``[C, L]``, true where a chunk is shorter; None where none is.
        incoming: slot of the state that comes in, int64 ``[C]``; at roots that of a given state, or the last, of zero.
        slots: slots of the states that go out, int64 ``[I]``, of the first I chunks.
    """

    tokens: Tensor
    padding: Tensor | None
    incoming: Tensor
    slots: Tensor


@dataclass(frozen=True)
class Segment:
    """Name states of one step: slots [first, first + count), from ``chunks[number]``."""

    number: int
    start: int
    first: int
    count: int


@dataclass(frozen=True)
class ChunkPlan:
    """The chunks of a forest by length, and the order in which their states are computed.

    Slots of states: ``states`` computed ones, ``given`` ones that enter a part, and one of zero.
    """

    chunks: tuple[Chunks, ...]
    segments: tuple[Segment, ...]
    states: int
    given: int = 0
    exits: Tensor | None = None
    """Slots of the states that leave a part, int64 ``[X]``."""


def find_chunk_plan(subtree_end: Tensor, length: int) -> ChunkPlan:
    """Return :func:`plan_chunks`, shared by layers, forward and backward of one step."""
    plan: ChunkPlan = remembered(("chunks", length), (subtree_end,), lambda: plan_chunks(subtree_end, length))
    return plan


def find_part_plan(subtree_end: Tensor, length: int, doors: Doors) -> ChunkPlan:
    """Return :func:`plan_chunks` of a part, shared likewise."""
    given = (subtree_end, *doors.vectors)
    settings = ("chunks", length, doors.given)
    plan: ChunkPlan = remembered(settings, given, lambda: plan_chunks(subtree_end, length, doors=doors))
    return plan


def plan_chunks(subtree_end: Tensor, length: int, alone: Tensor | None = None, doors: Doors | None = None) -> ChunkPlan:
    """Cut a forest into chunks.

    Args:
        subtree_end: exclusive end of each token's subtree in packed order, int ``[N]``.
        length: L, the longest chunk.
        alone: bool ``[N]``, tokens that are chunks by themselves; then chunks of one token are not padded.
        doors: of a part of a forest.
    """
    ends = subtree_end.cpu().numpy().astype(np.int64)
    exits = np.zeros(0, dtype=np.int64) if doors is None else doors.exits.cpu().numpy()
    begins = _begins(ends, exits, None if alone is None else alone.cpu().numpy())
    head, size, above, level = _cut(ends, length, begins)
    last = np.searchsorted(head, exits, side="right") - 1  # the chunk of each exit, which ends there; -1 for none
    lengths = np.array([*([] if alone is None else [1]), *_padded_lengths(length)])
    kind = np.searchsorted(lengths, size)
    inner = np.zeros(len(head), dtype=bool)
    inner[above[above >= 0]] = inner[last[last >= 0]] = True
    order = np.flatnonzero(inner)
    order = order[np.lexsort((kind[order], level[order]))]
    states = len(order)
    given = 0 if doors is None else doors.given
    slot = np.full(len(head) + 1, states + given)  # the last entry is the state of zero
    slot[order] = np.arange(states)
    incoming = slot[above]
    if doors is not None:
        incoming = np.where(above < 0, states + doors.entry.cpu().numpy()[head], incoming)
    used = [k for k in range(len(lengths)) if (kind == k).any()]
    members = [np.concatenate([order[kind[order] == k], np.flatnonzero((kind == k) & ~inner)]) for k in used]
    chunks = tuple(
        _chunks(head[own], size[own], int(lengths[k]), incoming[own], slot[own[inner[own]]], subtree_end.device)
        for k, own in zip(used, members, strict=True)
    )
    leaving = None if doors is None else torch.from_numpy(slot[last]).to(subtree_end.device)
    return ChunkPlan(chunks, _segments(level[order], np.searchsorted(used, kind[order])), states, given, leaving)


def _padded_lengths(length: int) -> list[int]:
    """Ascending: L, its half, and so on."""
    found = [length]
    while found[0] % 2 == 0 and found[0] > _SHORTEST:
        found.insert(0, found[0] // 2)
    return found


def node_begins(ends: IntArray, exits: IntArray) -> npt.NDArray[np.bool_]:
    """Return whether each token begins a chain that ends at forks and exits, bool ``[N]``."""
    begins: npt.NDArray[np.bool_] = np.diff(ends, prepend=-1) != 0  # a token goes on iff its subtree ends alike
    behind = exits[exits >= 0] + 1
    begins[behind[behind < len(ends)]] = True
    return begins


def _begins(ends: IntArray, exits: IntArray, alone: npt.NDArray[np.bool_] | None) -> npt.NDArray[np.bool_]:
    begins = node_begins(ends, exits)
    if alone is not None:
        begins |= alone
        begins[1:] |= alone[:-1]
    return begins


def _cut(ends: IntArray, length: int, begins: npt.NDArray[np.bool_]) -> tuple[IntArray, IntArray, IntArray, IntArray]:
    """Return first token, length, parent (-1 at roots) and level of each chunk, in order."""
    start = np.flatnonzero(begins)
    count = np.diff(start, append=len(ends))
    pieces = -(-count // length)
    last = np.cumsum(pieces) - 1
    parent, depth = nodes_above(start.tolist(), ends[start].tolist(), pieces.tolist())
    node = np.repeat(np.arange(len(start)), pieces)
    place = np.arange(len(node)) - (last - pieces + 1)[node]
    head = start[node] + place * length
    size = np.minimum(length, (start + count)[node] - head)
    first_above = np.where(parent < 0, -1, last[parent]) if len(parent) else parent
    above = np.where(place > 0, np.arange(len(node)) - 1, first_above[node])
    return head, size, above, depth[node] + place


def nodes_above(starts: list[int], ends: list[int], pieces: list[int]) -> tuple[IntArray, IntArray]:
    """The parent of each node, and the number of chunks above it."""
    path: list[int] = []
    parent: list[int] = []
    depth: list[int] = []
    for number, start in enumerate(starts):
        while path and ends[path[-1]] <= start:
            path.pop()
        parent.append(path[-1] if path else -1)
        depth.append(depth[path[-1]] + pieces[path[-1]] if path else 0)
        path.append(number)
    return np.array(parent, dtype=np.int64), np.array(depth, dtype=np.int64)


def _chunks(
    head: IntArray, size: IntArray, length: int, incoming: IntArray, slots: IntArray, device: torch.device
) -> Chunks:
    offset = np.arange(length)
    padding = offset >= size[:, None]
    tokens = np.where(padding, head[:, None], head[:, None] + offset)
    tensors = [torch.from_numpy(x).to(device) for x in (tokens, padding, incoming, slots)]
    return Chunks(tensors[0], tensors[1] if padding.any() else None, tensors[2], tensors[3])


def _segments(level: IntArray, number: IntArray) -> tuple[Segment, ...]:
    """Runs of slots of one level and one length."""
    changes = np.flatnonzero((np.diff(level, prepend=-1) != 0) | (np.diff(number, prepend=-1) != 0))
    done: dict[int, int] = {}
    found = []
    for first, count in zip(changes.tolist(), np.diff(changes, append=len(level)).tolist(), strict=True):
        kind = int(number[first])
        found.append(Segment(kind, done.get(kind, 0), first, count))
        done[kind] = done.get(kind, 0) + count
    return tuple(found)
