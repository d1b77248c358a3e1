"""Store a tree of parts as columns: sizes, steps and memory without an object per part.

Parts are numbered depth first, so that a part's descendants are the parts [i + 1, end). The bytes that ancestors hold
are a sum over such intervals: one addition where an interval begins, one subtraction where it ends.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from treefx.planning.cost.model import CostModel
from treefx.planning.search.blocks import Counts, IntArray, above_sums
from treefx.planning.search.draft import Draft, find_ends, parents_of
from treefx.planning.search.part import Keep, Part, Schedule, Step, StepKind, spans

__all__ = ["KEEPS", "KINDS", "Layout", "PartSizes", "Play", "count_states", "measure_layout", "play", "to_schedule"]

FloatArray = npt.NDArray[np.float64]

KEEPS: tuple[Keep, ...] = ("keep", "recompute", "offload")
KINDS: tuple[StepKind, ...] = ("forward", "kv", "backward", "offload", "fetch")
_FORWARD, _KV, _BACKWARD, _OFFLOAD, _FETCH = range(5)
_ENTER = ((_FORWARD,), (_KV,), (_KV, _OFFLOAD))
_LEAVE = ((_BACKWARD,), (_FORWARD, _BACKWARD), (_FETCH, _FORWARD, _BACKWARD))
"""Steps before and after the children of a part, by its place in `KEEPS`."""


@dataclass(frozen=True, eq=False)
class Layout:
    """Hold parts and their tokens.

    Attributes:
        parent: int64 [P], the part above, -1 at the topmost.
        end: int64 [P], exclusive end of the part's descendants.
        keep: int64 [P], places in `KEEPS`.
        owner, start, stop: int64 [S], tokens [start, stop) are the part's, ascending by start.
    """

    parent: IntArray
    end: IntArray
    keep: IntArray
    owner: IntArray
    start: IntArray
    stop: IntArray

    @classmethod
    def of_drafts(cls, roots: Sequence[Draft]) -> "Layout":
        """Number drafts depth first; a part without children always has mode "keep"."""
        drafts, parent = parents_of(roots)
        end = find_ends(parent)
        keep = [KEEPS.index(draft.keep) if draft.children else 0 for draft in drafts]
        owner = np.repeat(np.arange(len(drafts)), [len(draft.ranges) for draft in drafts])
        ranges = np.array([span for draft in drafts for span in draft.ranges], dtype=np.int64)
        return cls._sorted(np.array(parent), np.array(end), np.array(keep), owner, ranges[:, 0], ranges[:, 1])

    @classmethod
    def of_parts(cls, parts: Sequence[Part]) -> "Layout":
        """Read finished parts."""
        above = [-1 if part.parent is None else part.parent for part in parts]
        both = [spans(part) for part in parts]
        owner = np.repeat(np.arange(len(parts)), [len(start) for start, _ in both])
        start, stop = (np.concatenate(side) for side in zip(*both, strict=True))
        keep = np.array([KEEPS.index(part.keep) for part in parts])
        return cls._sorted(np.array(above), np.array(find_ends(above)), keep, owner, start, stop)

    @classmethod
    def _sorted(cls, parent: Any, end: Any, keep: Any, owner: Any, start: Any, stop: Any) -> "Layout":
        order = np.argsort(start)
        return cls(parent, end, keep, owner[order], start[order], stop[order])

    def __len__(self) -> int:
        return len(self.parent)


@dataclass(frozen=True, eq=False)
class PartSizes:
    """Hold the `Size` of all parts as columns, int64 [P] each."""

    tokens: IntArray
    boundary: IntArray
    edges: IntArray
    outgoing: IntArray
    pairs: IntArray
    mask: IntArray
    entering: IntArray
    leaving: IntArray
    chains: IntArray


def measure_layout(counts: Counts, layout: Layout) -> PartSizes:
    """Compute the exact size of every part, without masks.

    A part hangs on tokens outside of it. Its boundary is their paths to the root. The outgoing tokens of another part
    are those tokens of these paths that lie in it. Tokens on several paths are counted once: of two neighbouring
    tokens in packed order, the second adds only its path below their lowest common ancestor.
    """
    size = len(layout)

    def total(column: IntArray) -> IntArray:
        amounts = column[layout.stop] - column[layout.start]
        return np.bincount(layout.owner, weights=amounts, minlength=size).astype(np.int64)

    part, above, owner, top = _hanging(counts, layout)
    tokens = np.arange(len(counts.parent) + 1)
    boundary = _on_paths(counts, part, above, np.zeros_like(above), size)
    outgoing = _on_paths(counts, owner, above, top, size)
    nothing = np.zeros(size, dtype=np.int64)
    return PartSizes(
        total(tokens), boundary, total(counts.edges), outgoing, total(counts.pairs), nothing, nothing, nothing, nothing
    )


def count_states(counts: Counts, layout: Layout, sizes: PartSizes) -> PartSizes:
    """Add the states that enter and leave each part, and its chains, to the sizes."""
    size = len(layout)

    def distinct(part: IntArray, token: IntArray) -> IntArray:
        pairs = np.unique(np.stack([part, token]), axis=1)
        return np.bincount(pairs[0], minlength=size).astype(np.int64)

    part, above, owner, _ = _hanging(counts, layout)
    begins = np.union1d(counts.runs, layout.start)
    chains = np.bincount(layout.owner[np.searchsorted(layout.start, begins, side="right") - 1], minlength=size)
    leaving = distinct(owner, above)
    return replace(sizes, entering=distinct(part, above), leaving=leaving, chains=chains - 1 + leaving)


def _hanging(counts: Counts, layout: Layout) -> tuple[IntArray, IntArray, IntArray, IntArray]:
    """Find tokens that have children in another part.

    Returns the part of the children, the token, the token's part, and the depth at which its piece begins.

    Pieces are runs without a head in one part; connected pieces of one part have one topmost piece.
    """
    start = np.union1d(counts.heads, layout.start)
    owner = layout.owner[np.searchsorted(layout.start, start, side="right") - 1]
    above = counts.parent[start]
    piece = np.searchsorted(start, above, side="right") - 1
    is_inner = (above >= 0) & (owner[piece] == owner)
    top = np.where(is_inner, piece, np.arange(len(start)))
    while (top[top] != top).any():
        top = top[top]
    hangs = np.flatnonzero((above >= 0) & ~is_inner)
    return owner[hangs], above[hangs], owner[piece[hangs]], counts.depth[start[top[piece[hangs]]]]


def _on_paths(counts: Counts, part: IntArray, token: IntArray, least: IntArray, parts: int) -> IntArray:
    """Count, per part, the distinct tokens on the paths from its tokens up to a least depth."""
    key = np.unique(part * np.int64(len(counts.parent)) + token, return_index=True)[1]
    part, token, least = part[key], token[key], least[key]
    known = np.full(len(part), -1)
    follows = np.flatnonzero(part[1:] == part[:-1]) + 1
    if len(follows):
        known[follows] = counts.common_depth(token[follows - 1], token[follows])
    added = counts.depth[token] - np.maximum(known, least - 1)
    return np.bincount(part, weights=added, minlength=parts).astype(np.int64)


@dataclass(frozen=True, eq=False)
class Play:
    """Hold all steps in execution order as columns, [T] each.

    `kind` is a place in `KINDS`; the other columns are the part, and bytes and seconds of moments.
    """

    kind: IntArray
    part: IntArray
    held: FloatArray
    peak: FloatArray
    left: FloatArray
    seconds: FloatArray


def steps_of(layout: Layout) -> tuple[IntArray, IntArray]:
    """Order all steps: every part is entered before its children and left after them."""
    keep, number = layout.keep, np.arange(len(layout))
    entered = np.array([len(kinds) for kinds in _ENTER])[keep]
    left = np.array([len(kinds) for kinds in _LEAVE])[keep]
    leaving = np.lexsort((-number, layout.end))  # the order in which parts are left
    enters = np.concatenate(([0], np.cumsum(entered)))
    leaves = np.concatenate(([0], np.cumsum(left[leaving])))
    enter_at = enters[:-1] + leaves[np.searchsorted(layout.end[leaving], number, side="right")]
    leave_at = np.empty_like(number)
    leave_at[leaving] = leaves[:-1] + enters[layout.end[leaving]]
    kind, part = np.empty(enters[-1] + leaves[-1], dtype=np.int64), np.empty(enters[-1] + leaves[-1], dtype=np.int64)
    for begin, table in ((enter_at, _ENTER), (leave_at, _LEAVE)):
        for mode, kinds in enumerate(table):
            chosen = np.flatnonzero(keep == mode)
            for offset, code in enumerate(kinds):
                kind[begin[chosen] + offset], part[begin[chosen] + offset] = code, chosen
    return kind, part


def play(layout: Layout, sizes: PartSizes, cost: CostModel, order: tuple[IntArray, IntArray] | None = None) -> Play:
    """Simulate memory and time of every step under the full cost model.

    Args:
        layout: the parts.
        sizes: of the parts.
        cost: of the model.
        order: kinds and parts of the steps; by default `steps_of` the layout.
    """
    kind, part = steps_of(layout) if order is None else order
    saved, runs = _run_bytes(sizes, cost)
    mask = cost.mask_element_bytes * sizes.mask
    kv, store = cost.kv_bytes_per_token * sizes.outgoing, cost.store_bytes_per_token * sizes.outgoing
    tangents = cost.kv_tangent_bytes_per_token * sizes.outgoing
    gradients = store - kv
    if cost.states is not None:
        more = cost.states.run_bytes(sizes)
        saved, runs = saved + more["saved"], {name: runs[name] + more[name] for name in runs}
        kv = kv + cost.states.handed_bytes(sizes)
        gradients = gradients + cost.states.sum_bytes(sizes)
        store = kv + gradients
    keeps = layout.keep == 0
    # A forward hands out K/V: the store, or a second copy of the K/V in it.
    handed = np.where(keeps, store, kv)
    nothing = np.zeros(len(layout))
    peaks = (
        runs["forward"] + handed + mask,
        runs["kv"] + store + mask,
        runs["backward"] - saved + tangents + mask,
        nothing,
        store,
    )
    changes = (saved + handed, store, -saved - store - np.where(keeps, 0.0, kv), -store, store)
    change, peak = np.stack(changes)[kind, part], np.stack(peaks)[kind, part]
    left = np.cumsum(np.concatenate(([cost.resident_bytes], change)))
    held = left[:-1]
    return Play(kind, part, held, held + np.maximum(peak, 0.0), left[1:], _seconds(layout, sizes, cost)[kind, part])


def _run_bytes(sizes: PartSizes, cost: CostModel) -> tuple[FloatArray, dict[str, FloatArray]]:
    shape = sizes.tokens, sizes.boundary, sizes.edges
    return cost.saved.of(*shape), {name: getattr(cost, name).of(*shape) for name in ("forward", "backward", "kv")}


def _seconds(layout: Layout, sizes: PartSizes, cost: CostModel) -> FloatArray:
    """Compute the seconds of every kind of step of every part, [5, P].

    They include copies of K/V and their gradients from and to host memory.
    """
    fits = cost.forward_seconds, cost.backward_seconds, cost.kv_seconds
    forward, backward, kv = (fit.of(sizes.tokens, sizes.pairs) for fit in fits)
    out = back = np.zeros(len(layout))
    if cost.host_bytes_per_second is not None:
        far = above_sums(layout.end, np.where(layout.keep == 2, sizes.outgoing, 0))
        values = far * cost.kv_bytes_per_token / cost.host_bytes_per_second
        forward, kv = np.add(forward, values), np.add(kv, values)
        backward = np.add(backward, far * cost.kv_grad_bytes_per_token / cost.host_bytes_per_second)
        moved = sizes.outgoing / cost.host_bytes_per_second
        out, back = out + cost.kv_bytes_per_token * moved, back + cost.kv_grad_bytes_per_token * moved
    return np.stack([forward, kv, backward, out, back])


def to_schedule(layout: Layout) -> Schedule:
    """Build the parts as objects, and their steps.

    Steps go depth first, so that only one path of parts holds memory.
    """
    order = np.argsort(layout.owner, kind="stable")
    spans_of = np.searchsorted(layout.owner[order], np.arange(len(layout) + 1)).tolist()
    start, stop = layout.start[order].tolist(), layout.stop[order].tolist()
    tokens = torch.arange(max(stop))
    parents, keeps = layout.parent.tolist(), layout.keep.tolist()
    children: list[list[int]] = [[] for _ in parents]
    for number, parent in enumerate(parents):
        if parent >= 0:
            children[parent].append(number)
    parts: list[Part] = []
    for number, parent in enumerate(parents):
        first, last = spans_of[number], spans_of[number + 1]
        own = [tokens[a:b] for a, b in zip(start[first:last], stop[first:last], strict=True)]
        joined = own[0] if len(own) == 1 else torch.cat(own)
        ancestors = () if parent < 0 else (*parts[parent].ancestors, parent)
        below, keep = tuple(children[number]), KEEPS[keeps[number]]
        parts.append(Part(number, joined, None if parent < 0 else parent, ancestors, below, keep))
    kind, part = steps_of(layout)
    return Schedule(tuple(parts), tuple(map(Step, [KINDS[k] for k in kind.tolist()], part.tolist())))
