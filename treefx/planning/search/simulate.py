"""Simulate a schedule under the full cost model, to check that its peak keeps the limit."""

from collections.abc import Sequence
from itertools import starmap
from typing import NamedTuple

import numpy as np

from treefx.forests.forest import Forest
from treefx.kernels.cpu.rectangles import mask_elements
from treefx.planning.cost.model import CostModel, Size
from treefx.planning.search.blocks import Counts
from treefx.planning.search.layout import KINDS, Layout, PartSizes, Play, count_states, measure_layout, play
from treefx.planning.search.part import Part, Schedule, Step

__all__ = ["Moment", "measure_final", "measure_parts", "simulate", "to_moments", "to_sizes"]


class Moment(NamedTuple):
    """Hold the prediction of one step of a schedule.

    Attributes:
        step: the step.
        held_bytes: allocated bytes when it starts, resident ones included.
        peak_bytes: most allocated bytes while it runs.
        left_bytes: allocated bytes when it has ended.
        seconds: predicted time.
    """

    step: Step
    held_bytes: float
    peak_bytes: float
    left_bytes: float
    seconds: float


def measure_parts(counts: Counts, parts: Sequence[Part]) -> list[Size]:
    """Compute the exact size of every part."""
    return to_sizes(measure_layout(counts, Layout.of_parts(parts)))


def measure_final(forest: Forest, parts: Sequence[Part], sizes: Sequence[Size], cost: CostModel) -> list[Size]:
    """Add to the sizes what depends on the places of forks: elements of masks, states and chains."""
    found = list(sizes)
    if cost.states is not None:
        layout = Layout.of_parts(parts)
        found = to_sizes(count_states(Counts(forest), layout, to_columns(sizes)))
    if cost.mask_element_bytes:
        ends = forest.subtree_end.cpu().numpy()
        tokens = (part.tokens.numpy() for part in parts)
        elements = (mask_elements(np.searchsorted(own, ends[own])) for own in tokens)
        found = [size._replace(mask=mask) for size, mask in zip(found, elements, strict=True)]
    return found


def to_columns(sizes: Sequence[Size]) -> PartSizes:
    """Turn a `Size` per part into columns."""
    return PartSizes(*(np.array(column) for column in zip(*sizes, strict=True)))


def to_sizes(sizes: PartSizes) -> list[Size]:
    """Build a `Size` per part."""
    columns = (getattr(sizes, name).tolist() for name in Size._fields)
    return list(starmap(Size, zip(*columns, strict=True)))


def simulate(schedule: Schedule, sizes: Sequence[Size], cost: CostModel) -> list[Moment]:
    """Simulate the steps of a schedule.

    Args:
        schedule: the parts and their steps.
        sizes: of the parts, from `measure_parts`.
        cost: of the model.

    Returns:
        One moment per step.
    """
    kind = np.array([KINDS.index(step.kind) for step in schedule.steps])
    part = np.array([step.part for step in schedule.steps])
    found = play(Layout.of_parts(schedule.parts), to_columns(sizes), cost, (kind, part))
    return to_moments(found, schedule.steps)


def to_moments(found: Play, steps: Sequence[Step]) -> list[Moment]:
    """Build a `Moment` per step."""
    columns = (found.held, found.peak, found.left, found.seconds)
    return list(starmap(Moment, zip(steps, *(column.tolist() for column in columns), strict=True)))
