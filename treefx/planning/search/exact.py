"""Find the fastest plan of connected parts for a forest of few blocks.

Dynamic programming over all ways to cut and keep.

f(v, H) is the least seconds for v's subtree where the cut is above v and ancestors hold H bytes: the minimum over all
connected sets S of blocks with v on top, and over the modes of S. The oracle of the heuristic, and used itself where
there are at most `MOST_BLOCKS` blocks.
"""

from collections.abc import Iterator
from functools import cache

from treefx.planning.cost.model import CostModel, Size
from treefx.planning.search.blocks import Blocks
from treefx.planning.search.draft import Draft, held_bytes, part_seconds, peak_bytes
from treefx.planning.search.part import Keep

__all__ = ["MOST_BLOCKS", "solve_exactly"]

MOST_BLOCKS = 9

Solution = tuple[float, tuple[Draft, ...]]


def solve_exactly(blocks: Blocks, cost: CostModel, budget: float) -> list[Draft] | None:
    """Find the topmost parts of the fastest plan, or None if no plan fits.

    Args:
        blocks: few; the time is exponential in their number.
        cost: of the model.
        budget: bytes that parts may use.
    """
    sets = [list(_connected(blocks, top)) for top in range(len(blocks))]
    modes: list[Keep] = ["keep", "recompute"]
    if cost.host_bytes_per_second is not None:
        modes.append("offload")

    @cache
    def best(top: int, held: float, hosted: int) -> Solution | None:
        found: Solution | None = None
        for inside in sets[top]:
            below = [child for block in inside for child in blocks.children(block) if child not in inside]
            size = _size(blocks, inside, below)
            for mode in modes if below else modes[:1]:
                candidate = complete(inside, size, sorted(below), mode, held, hosted)
                if candidate is not None and (found is None or candidate[0] < found[0]):
                    found = candidate
        return found

    def complete(
        inside: frozenset[int], size: Size, below: list[int], mode: Keep, held: float, hosted: int
    ) -> Solution | None:
        """Return the set as one part, with the best plans for the subtrees below it."""
        if held + peak_bytes(cost, size, mode) > budget:
            return None
        total = part_seconds(cost, size, mode, hosted)
        children: list[Draft] = []
        for child in below:
            hosted_below = hosted + (size.outgoing if mode == "offload" else 0)
            part = best(child, held + held_bytes(cost, size, mode), hosted_below)
            if part is None:
                return None
            total += part[0]
            children += part[1]
        ranges = [(int(blocks.start[block]), int(blocks.stop[block])) for block in sorted(inside)]
        return total, (Draft(ranges, size, mode, int(blocks.counts.parent[ranges[0][0]]), children),)

    roots = [best(root, 0.0, 0) for root in blocks.roots]
    return None if any(root is None for root in roots) else [draft for root in roots if root for draft in root[1]]


def _connected(blocks: Blocks, top: int) -> Iterator[frozenset[int]]:
    """Yield all connected sets of blocks with `top` as the topmost block."""
    yield from _grow(blocks, frozenset([top]), tuple(blocks.children(top)))


def _grow(blocks: Blocks, inside: frozenset[int], border: tuple[int, ...]) -> Iterator[frozenset[int]]:
    if not border:
        yield inside
        return
    block, *rest = border
    yield from _grow(blocks, inside, tuple(rest))
    yield from _grow(blocks, inside | {block}, (*rest, *blocks.children(block)))


def _size(blocks: Blocks, inside: frozenset[int], below: list[int]) -> Size:
    """Measure a part of these blocks; the blocks above a cut are outgoing."""
    counts = blocks.counts
    sizes = [counts.size(int(blocks.start[block]), int(blocks.stop[block])) for block in sorted(inside)]
    above = set()
    for block in (int(blocks.parent[child]) for child in below):
        while block in inside and block not in above:
            above.add(block)
            block = int(blocks.parent[block])
    return Size(
        tokens=sum(size.tokens for size in sizes),
        boundary=sizes[0].boundary,
        edges=sum(size.edges for size in sizes),
        outgoing=sum(int(blocks.stop[block] - blocks.start[block]) for block in above),
        pairs=sum(size.pairs for size in sizes),
    )
