"""Profiles of hybrids: states of recurrences have a price, and predictions hold when parts run."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import treefx
from tests.backend.native import TakesCacheFlag
from tests.models import TinyLM
from tests.planning.cuts import every_node, random_cuts
from tests.planning.parts import reproducible as reproducible
from tests.spellings import SPELLINGS
from treefx.kernels.recurrence.tree_chunks import node_begins
from treefx.planning.cost.memory import install_allocator
from treefx.planning.cost.model import CostModel, Size
from treefx.planning.execution.boundary import Store, make_row
from treefx.planning.execution.profile import Profile
from treefx.planning.search.blocks import Counts
from treefx.planning.search.plan import Plan
from treefx.planning.search.simulate import measure_final, measure_parts, simulate
from treefx.tools.bench.parts import Runner

VOCABULARY, HEADS, WIDTH = 61, 2, 48


class WideRecurrence(nn.Module):
    """A gated delta rule whose state is as large as 96 tokens' keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs = nn.Linear(32, HEADS * (3 * WIDTH + 2))
        self.out = nn.Linear(HEADS * WIDTH, 32)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v, g = self.inputs(x).split([HEADS * WIDTH, HEADS * WIDTH, HEADS * WIDTH, 2 * HEADS], -1)
        q, k, v = (y.unflatten(-1, (HEADS, WIDTH)) for y in (q, F.normalize(k, dim=-1), v))
        decay, beta = -F.softplus(g[..., :HEADS]), g[..., HEADS:].sigmoid()
        return x + self.out(torch.ops.treefx.row_scan(q, k, v, decay, beta).flatten(2))


def forest_of(seed: int, count: int, spans: tuple[int, int]) -> treefx.Forest:
    random = np.random.default_rng(seed)
    rows: list[list[int]] = []
    for _ in range(count):
        source = rows[random.integers(len(rows))] if rows else []
        kept = source[: random.integers(1, len(source) + 1)] if source else []
        rows.append((kept + random.integers(0, VOCABULARY, random.integers(*spans)).tolist())[:1000])
    return treefx.Forest.from_sequences(rows)


LONG, SHORT, FORKED = (0, 8, (100, 400)), (1, 12, (40, 150)), (2, 60, (1, 40))


@pytest.fixture(scope="module")
def runner() -> Runner:
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True, warn_only=True)  # as inside of every test, or Dynamo compiles twice
    install_allocator()
    found = Runner.__new__(Runner)
    mixers = nn.Sequential(WideRecurrence(), WideRecurrence())
    found.model = TakesCacheFlag(TinyLM(SPELLINGS["sdpa_is_causal"], layers=1, positions=False, before=mixers))
    found.compiled = torch.compile(found.model, backend="treefx", options={"inner": "aot_eager"})
    found.profile = treefx.profile(found.compiled, forest_of(*LONG), lengths=(32, 128))
    found.model_bytes = sum(x.nbytes for x in found.model.parameters())
    return found


@pytest.mark.parametrize("drawn", [LONG, SHORT, FORKED], ids=["long rows", "short rows", "forks at every few tokens"])
def test_peaks_are_under_the_limits(runner: Runner, drawn: Any) -> None:
    forest = forest_of(*drawn)
    whole = runner.uncut_bytes(forest)
    for share in (1, 2, 3, 5):
        plan = treefx.plan(forest, runner.profile, whole // share)
        assert len(plan.parts) >= share
        assert runner.run([plan]).bytes <= plan.peak_bytes <= plan.memory_limit_bytes


@pytest.mark.parametrize("keep", ["keep", "recompute"])
def test_without_their_price_a_plan_takes_more_than_predicted(runner: Runner, keep: Any) -> None:
    forest = forest_of(*FORKED)
    plan, cost = every_node(forest, keeps=(keep,)), runner.profile.cost.for_forest(forest)
    sizes = measure_final(forest, plan.parts, measure_parts(Counts(forest), plan.parts), cost)
    assert _peak(plan, sizes, replace(cost, states=None)) < runner.run([plan]).bytes <= _peak(plan, sizes, cost)


def _peak(plan: Plan, sizes: list[Size], cost: CostModel) -> float:
    return max(moment.peak_bytes for moment in simulate(plan.schedule, sizes, cost))


def test_what_crosses_is_counted(runner: Runner) -> None:
    """As many states and chains as the parts get when they run; a chain that ends at an exit may count twice."""
    forest, cost = forest_of(3, 12, (1, 12)), runner.profile.cost
    for seed in range(20):
        parts = random_cuts(forest, seed, 0.2).parts
        sizes = measure_final(forest, parts, measure_parts(Counts(forest), parts), cost)
        store = Store(forest, parts, 1)
        for part, size in zip(parts, sizes, strict=True):
            row, exits = make_row(store, part, "train")[0], store.exits(part)
            doors = row.cut.doors
            assert size.entering == len(set(doors.entry.tolist()) - {doors.given})
            assert size.leaving == len(exits)
            ends = row.subtree_end.numpy().astype(np.int64)[: len(part)]
            begun = node_begins(ends, np.searchsorted(part.tokens.numpy(), exits.numpy())).sum()
            assert begun <= size.chains + 1 <= begun + size.leaving


def test_a_profile_with_states_survives_being_saved(runner: Runner) -> None:
    assert runner.profile.cost.states is not None
    assert Profile.from_json(runner.profile.to_json()).cost == runner.profile.cost
