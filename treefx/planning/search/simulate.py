"""Simulate memory over time of a schedule, which proves "peak <= limit"."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from treefx.forests.forest import Forest
from treefx.kernels.tiles.rectangles import mask_elements
from treefx.planning.cost.model import CostModel, Size
from treefx.planning.search.blocks import Counts, IntArray
from treefx.planning.search.part import Part, Schedule, Step, boundary, outgoing, spans

__all__ = ["Moment", "measure_masks", "measure_parts", "simulate"]


@dataclass(frozen=True, slots=True)
class Moment:
    """One step of a schedule.

    Attributes:
        step: the running step.
        held_bytes: memory held when it starts, everything resident included.
        peak_bytes: the most there is while it runs.
        left_bytes: memory held when it has ended.
        seconds: predicted time.
    """

    step: Step
    held_bytes: float
    peak_bytes: float
    left_bytes: float
    seconds: float


def measure_parts(counts: Counts, parts: Sequence[Part]) -> list[Size]:
    """The exact size of every part."""
    return [_measure(counts, parts, part) for part in parts]


def measure_masks(forest: Forest, parts: Sequence[Part], sizes: Sequence[Size]) -> list[Size]:
    """The sizes with the elements of masks in them."""
    ends = forest.subtree_end.cpu().numpy()
    tokens = (part.tokens.numpy() for part in parts)
    elements = (mask_elements(np.searchsorted(own, ends[own])) for own in tokens)
    return [size._replace(mask=mask) for size, mask in zip(sizes, elements, strict=True)]


def _measure(counts: Counts, parts: Sequence[Part], part: Part) -> Size:
    start, stop = spans(part)
    return Size(
        tokens=len(part),
        boundary=_boundary(counts, parts, part, _hangs_on(counts, start, stop)),
        edges=int((counts.edges[stop] - counts.edges[start]).sum()),
        outgoing=len(outgoing(counts.forest, part)) if part.children else 0,
        pairs=int((counts.pairs[stop] - counts.pairs[start]).sum()),
    )


def _hangs_on(counts: Counts, start: IntArray, stop: IntArray) -> IntArray:
    """Return tokens outside of the intervals [start, stop) that are parents of tokens inside.

    Each is listed once.
    """
    first, last = np.searchsorted(counts.heads, start), np.searchsorted(counts.heads, stop)
    inner = [counts.heads[a:b] for a, b in zip(first.tolist(), last.tolist(), strict=True)]
    above = np.unique(counts.parent[np.concatenate([start, *inner])])
    place = np.searchsorted(start, above, side="right") - 1
    is_inside = (place >= 0) & (above < stop[place])
    return above[(above >= 0) & ~is_inside]


def _boundary(counts: Counts, parts: Sequence[Part], part: Part, above: IntArray) -> int:
    """Tokens on the paths to `above`, the tokens outside that the part hangs on."""
    if len(above) > 1:
        return len(boundary(counts.forest, parts, part))
    return int(counts.depth[above[0]]) + 1 if len(above) else 0


def simulate(schedule: Schedule, sizes: Sequence[Size], cost: CostModel) -> list[Moment]:
    """Play the steps of a schedule.

    Args:
        schedule: the parts and their steps.
        sizes: of the parts, from `measure_parts`.
        cost: of the model.

    Returns:
        One moment per step.
    """
    return list(_play(schedule, sizes, cost))


def _play(schedule: Schedule, sizes: Sequence[Size], cost: CostModel) -> Iterator[Moment]:
    held = cost.resident_bytes
    for step in schedule.steps:
        part, size = schedule.parts[step.part], sizes[step.part]
        before = held
        shape = size.tokens, size.boundary, size.edges
        saved = cost.saved(*shape)
        kv, store = cost.kv_bytes_per_token * size.outgoing, cost.store_bytes_per_token * size.outgoing
        keeps = part.keep == "keep"
        mask = cost.mask_element_bytes * size.mask
        # A forward returns K/V: the store, or a second copy of it.
        handed = store if keeps else kv
        if step.kind == "forward":
            peak, change = cost.forward(*shape) + handed + mask, saved + handed
        elif step.kind == "kv":
            peak, change = cost.kv(*shape) + store + mask, store
        elif step.kind == "offload":
            peak, change = 0.0, -store
        elif step.kind == "fetch":
            peak, change = store, store
        else:
            tangents = cost.kv_tangent_bytes_per_token * size.outgoing
            peak, change = cost.backward(*shape) - saved + tangents + mask, -saved - store - (0.0 if keeps else kv)
        held = before + change
        yield Moment(step, before, before + max(peak, 0.0), held, _seconds(schedule, sizes, cost, step, kv, store))


def _seconds(schedule: Schedule, sizes: Sequence[Size], cost: CostModel, step: Step, kv: float, store: float) -> float:
    """Time of a step, with the way of K/V and their gradients from and to host memory."""
    part, size = schedule.parts[step.part], sizes[step.part]
    runs = {"forward": cost.forward_seconds, "backward": cost.backward_seconds, "kv": cost.kv_seconds}
    total = runs[step.kind](size) if step.kind in runs else 0.0
    if cost.host_bytes_per_second is None:
        return total
    if step.kind in runs:
        hosted = sum(sizes[index].outgoing for index in part.ancestors if schedule.parts[index].keep == "offload")
        moved = hosted * (cost.kv_grad_bytes_per_token if step.kind == "backward" else cost.kv_bytes_per_token)
    else:
        moved = kv if step.kind == "offload" else store - kv
    return total + moved / cost.host_bytes_per_second
