"""Build parts: a tree of token ranges with a known peak at every step."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
import torch

from treefx.planning.cost.model import CostModel, Size
from treefx.planning.search.part import Keep, Part, Schedule, Step

__all__ = ["Draft", "demand_of", "held_bytes", "in_order", "part_seconds", "peak_bytes", "to_schedule", "total_seconds"]


@dataclass(eq=False, slots=True)
class Draft:
    """A part that may still change.

    Attributes:
        ranges: its tokens, disjoint intervals of packed indices.
        size: how big it is; the boundary and the outgoing tokens may be too large here, never too small.
        keep: values that stay while its children run.
        above: the token that its topmost tokens hang on, -1 at roots; None where there are several.
        children: the parts below.
        demand: peak of the part and everything below it, on top of bytes held by its ancestors; set while merging.
    """

    ranges: list[tuple[int, int]]
    size: Size
    keep: Keep = "keep"
    above: int | None = None
    children: "list[Draft]" = field(default_factory=list)
    demand: float = 0.0


def held_bytes(cost: CostModel, size: Size, keep: Keep) -> float:
    """h(p, mode): bytes a part holds while its children run."""
    if keep == "offload":
        return 0.0
    store = cost.store_bytes_per_token * size.outgoing
    return store + (cost.saved(size.tokens, size.boundary, size.edges) if keep == "keep" else 0.0)


def peak_bytes(cost: CostModel, size: Size, keep: Keep) -> float:
    """Return r(p, mode): the largest of the part's runs.

    Its store is held when its backward, or a second forward, runs.

    Its store is held when its backward, or a second forward, runs.
    """
    own = cost.run_bytes(size.tokens, size.boundary, size.edges)
    if keep != "keep":
        own = max(own, cost.kv(size.tokens, size.boundary, size.edges))
    return own + (cost.store_bytes_per_token + cost.extra_run_bytes_per_token(keep != "keep")) * size.outgoing


def part_seconds(cost: CostModel, size: Size, keep: Keep, hosted: int) -> float:
    """c(p, mode): seconds of all steps of a part.

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
    """Seconds of all parts, but for the way from host memory."""
    return sum(part_seconds(cost, part.size, part.keep if part.children else "keep", 0) for part, _ in in_order(roots))


def demand_of(cost: CostModel, size: Size, keep: Keep, children: Iterable[Draft]) -> float:
    """Return D(p): the larger of own peak, and held bytes plus the largest child's demand.

    A part fits iff bytes held by its ancestors plus its demand are within the budget.
    """
    below = max((child.demand for child in children), default=0.0)
    return max(peak_bytes(cost, size, keep), held_bytes(cost, size, keep) + below)


def in_order(roots: Iterable[Draft]) -> Iterator[tuple[Draft, Draft | None]]:
    """Iterate over drafts with their parents, parents first, depth first.

    Iterative, as chains may be long.
    """
    stack: list[tuple[Draft, Draft | None]] = [(root, None) for root in reversed(list(roots))]
    while stack:
        draft, parent = stack.pop()
        yield draft, parent
        stack += [(child, draft) for child in reversed(draft.children)]


def to_schedule(roots: Iterable[Draft]) -> Schedule:
    """Number the parts depth first, and order their steps.

    Only one path of parts holds memory.
    """
    drafts = list(in_order(roots))
    index = {id(draft): number for number, (draft, _) in enumerate(drafts)}
    parts: list[Part] = []
    for number, (draft, parent) in enumerate(drafts):
        above = None if parent is None else parts[index[id(parent)]]
        parts.append(
            Part(
                index=number,
                tokens=_tokens(draft.ranges),
                parent=None if above is None else above.index,
                ancestors=() if above is None else (*above.ancestors, above.index),
                children=tuple(index[id(child)] for child in draft.children),
                keep=draft.keep if draft.children else "keep",
            )
        )
    return Schedule(tuple(parts), tuple(_steps(parts)))


def _steps(parts: list[Part]) -> Iterator[Step]:
    """Enter every part before its children, leave it after them."""
    waiting: list[int] = []
    for part in parts:
        while waiting and waiting[-1] != part.parent:
            yield from _leave(parts[waiting.pop()])
        yield from _enter(part)
        waiting.append(part.index)
    while waiting:
        yield from _leave(parts[waiting.pop()])


def _enter(part: Part) -> Iterator[Step]:
    yield Step("forward" if part.keep == "keep" else "kv", part.index)
    if part.keep == "offload":
        yield Step("offload", part.index)


def _leave(part: Part) -> Iterator[Step]:
    if part.keep == "offload":
        yield Step("fetch", part.index)
    if part.keep != "keep":
        yield Step("forward", part.index)
    yield Step("backward", part.index)


def _tokens(ranges: list[tuple[int, int]]) -> torch.Tensor:
    return torch.from_numpy(np.concatenate([np.arange(start, stop) for start, stop in sorted(ranges)]))
