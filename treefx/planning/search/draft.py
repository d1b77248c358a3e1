"""Draft parts: a tree of token ranges whose peak is known at every step."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from treefx.planning.cost.model import CostModel, Size
from treefx.planning.search.part import Keep

__all__ = [
    "Draft",
    "find_ends",
    "demand_of",
    "held_bytes",
    "in_order",
    "parents_of",
    "part_seconds",
    "peak_bytes",
    "total_seconds",
]


@dataclass(eq=False, slots=True)
class Draft:
    """Hold a part that may still change.

    Attributes:
        ranges: its tokens, disjoint intervals of packed indices.
        size: its size; the boundary and the outgoing tokens may be too large here, never too small.
        keep: mode of the values that stay while its children run.
        above: parent token of its topmost tokens, -1 at roots; None where there are several.
        children: the parts below.
        demand: peak of the part and everything below it, without the bytes that its ancestors hold; set while merging.
    """

    ranges: list[tuple[int, int]]
    size: Size
    keep: Keep = "keep"
    above: int | None = None
    children: "list[Draft]" = field(default_factory=list)
    demand: float = 0.0


def held_bytes(cost: CostModel, size: Size, keep: Keep) -> float:
    """Compute h(p, mode): bytes a part holds while its children run."""
    if keep == "offload":
        return 0.0
    store = cost.store_bytes_per_token * size.outgoing
    return store + (cost.saved(size.tokens, size.boundary, size.edges) if keep == "keep" else 0.0)


def peak_bytes(cost: CostModel, size: Size, keep: Keep) -> float:
    """Compute r(p, mode): the peak of the part's own runs.

    Its store is allocated when its backward, or a second forward, runs.
    """
    own = cost.run_bytes(size.tokens, size.boundary, size.edges)
    if keep != "keep":
        own = max(own, cost.kv(size.tokens, size.boundary, size.edges))
    return own + (cost.store_bytes_per_token + cost.extra_run_bytes_per_token(keep != "keep")) * size.outgoing


def part_seconds(cost: CostModel, size: Size, keep: Keep, hosted: int) -> float:
    """Compute c(p, mode): seconds of all steps of a part.

    Args:
        cost: of the model.
        size: of the part.
        keep: its mode.
        hosted: boundary tokens whose K/V are in host memory.
    """
    total = cost.forward_seconds(size) + cost.backward_seconds(size)
    moved = cost.store_bytes_per_token * hosted
    if keep != "keep":
        total += cost.kv_seconds(size)
        moved += cost.kv_bytes_per_token * hosted
    if keep == "offload":
        moved += cost.store_bytes_per_token * size.outgoing
    return total + (moved / cost.host_bytes_per_second if cost.host_bytes_per_second is not None else 0.0)


def total_seconds(cost: CostModel, roots: Iterable[Draft]) -> float:
    """Sum the seconds of all parts, without copies from host memory."""
    return sum(part_seconds(cost, part.size, part.keep if part.children else "keep", 0) for part, _ in in_order(roots))


def demand_of(cost: CostModel, size: Size, keep: Keep, children: Iterable[Draft]) -> float:
    """Compute D(p) = max(r(p), h(p) + max over children c of D(c)).

    A part fits iff the bytes that its ancestors hold plus its demand are within the budget.
    """
    below = max((child.demand for child in children), default=0.0)
    return max(peak_bytes(cost, size, keep), held_bytes(cost, size, keep) + below)


def in_order(roots: Iterable[Draft]) -> Iterator[tuple[Draft, Draft | None]]:
    """Yield every draft with its parent, depth first; iteratively, as chains may be long."""
    stack: list[tuple[Draft, Draft | None]] = [(root, None) for root in reversed(list(roots))]
    while stack:
        draft, parent = stack.pop()
        yield draft, parent
        stack += [(child, draft) for child in reversed(draft.children)]


def find_ends(parents: Sequence[int]) -> list[int]:
    """Find the exclusive end of the descendants of every item of a tree.

    Items are in depth-first order; each has the number of its parent, or -1.
    """
    end = list(range(1, len(parents) + 1))
    for number in range(len(parents) - 1, -1, -1):
        parent = parents[number]
        if parent >= 0 and end[parent] < end[number]:
            end[parent] = end[number]
    return end


def parents_of(roots: Iterable[Draft]) -> tuple[list[Draft], list[int]]:
    """Return all drafts in order, and the place of the one above each, -1 at the topmost."""
    both = list(in_order(roots))
    place = {id(draft): number for number, (draft, _) in enumerate(both)}
    return [draft for draft, _ in both], [-1 if above is None else place[id(above)] for _, above in both]
