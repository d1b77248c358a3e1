"""Columns of all parts at once say what the definitions say part by part, and planning is bounded at every limit."""

from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.planning.costs import linear_cost
from tests.planning.cuts import KEEPS, every_node, random_cuts
from tests.strategies import Rows, row_batches
from treefx.forests.forest import Forest
from treefx.planning.cost.model import CostModel, Size
from treefx.planning.search.blocks import Blocks, Counts
from treefx.planning.search.infeasible import smallest_requirement
from treefx.planning.search.part import Schedule, boundary, edge_ids, outgoing
from treefx.planning.search.planner import plan
from treefx.planning.search.simulate import measure_parts, simulate
from treefx.tools.bench.plan import forked_rollouts, token_cost


def _sizes(forest: Forest, schedule: Schedule) -> list[Size]:
    """By the definitions."""
    return [
        Size(
            len(part),
            len(boundary(forest, schedule.parts, part)),
            len(edge_ids(forest, part)),
            len(outgoing(forest, part)),
            int((forest.depth[part.tokens] + 1).sum()),
        )
        for part in schedule.parts
    ]


def _peaks(schedule: Schedule, sizes: list[Size], cost: CostModel) -> list[float]:
    """Memory step by step."""
    held, peaks = cost.resident_bytes, []
    for step in schedule.steps:
        part, size = schedule.parts[step.part], sizes[step.part]
        shape = size.tokens, size.boundary, size.edges
        kv, store, saved = 0.1 * size.outgoing, 0.2 * size.outgoing, cost.saved(*shape)
        handed = store if part.keep == "keep" else kv
        most, change = {
            "forward": (cost.forward(*shape) + handed, saved + handed),
            "kv": (cost.kv(*shape) + store, store),
            "offload": (0.0, -store),
            "fetch": (store, store),
            "backward": (cost.backward(*shape) - saved, -saved - store - (0.0 if part.keep == "keep" else kv)),
        }[step.kind]
        peaks.append(held + most)
        held += change
    return peaks


@settings(max_examples=60, deadline=None)
@given(rows=row_batches(), seed=st.integers(0, 9), host=st.sampled_from([None, 2.0]))
def test_columns_are_what_the_definitions_say(rows: Rows, seed: int, host: float | None) -> None:
    """Cut anywhere, siblings in one part: parts hang on several tokens, in several parts above."""
    forest, cost = Forest.from_sequences(rows), linear_cost(copy=0.1, resident=5.0, host=host)
    schedule = random_cuts(forest, seed, keeps=KEEPS, join=0.5).schedule
    sizes = _sizes(forest, schedule)
    assert measure_parts(Counts(forest), schedule.parts) == sizes
    moments = simulate(schedule, sizes, cost)
    np.testing.assert_allclose([moment.peak_bytes for moment in moments], _peaks(schedule, sizes, cost))
    assert abs(moments[-1].left_bytes - cost.resident_bytes) < 1e-6


def test_the_work_is_bounded_at_every_limit() -> None:
    """Bound the cuts at the tightest limit of a large forest by its forks and a fixed number."""
    forest = Forest.from_sequences(forked_rollouts(np.random.default_rng(0), 40, 100))
    counts = Counts(forest)
    least = smallest_requirement(counts, token_cost()).limit_bytes
    finest = Blocks.of(counts, counts.shortest_block)
    assert counts.shortest_block > 4
    assert len(finest) <= 8_000 + 2 * len(forest.nodes)
    found = plan(forest, token_cost(), least)
    assert found.peak_bytes <= least
    assert len(found.parts) > 4000


def test_wrong_sizes_are_noticed() -> None:
    """Count outgoing tokens: parts without them would seem to fit."""
    forest, cost = Forest.from_sequences([[1, 2, 3, 4], [1, 2, 5, 6]]), linear_cost()
    schedule = every_node(forest).schedule
    sizes = measure_parts(Counts(forest), schedule.parts)
    blind = [size._replace(outgoing=0) for size in sizes]
    most = max(moment.peak_bytes for moment in simulate(schedule, sizes, replace(cost, resident_bytes=1.0)))
    assert max(moment.peak_bytes for moment in simulate(schedule, blind, replace(cost, resident_bytes=1.0))) < most
