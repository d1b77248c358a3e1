"""Plans hold every token once, stay under the limit, and are as fast as brute force finds them."""

import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.planning.costs import all_plans, evaluate, linear_cost
from tests.strategies import Rows, row_batches
from treefx.errors import InputError, MemoryLimitError
from treefx.forests.forest import Forest
from treefx.planning.cost.model import Bytes, CostModel, Size
from treefx.planning.search import planner
from treefx.planning.search.blocks import Blocks, Counts
from treefx.planning.search.draft import in_order, part_seconds
from treefx.planning.search.exact import solve_exactly
from treefx.planning.search.infeasible import smallest_requirement
from treefx.planning.search.layout import Layout, to_schedule
from treefx.planning.search.part import boundary, edge_ids, outgoing
from treefx.planning.search.plan import Plan
from treefx.planning.search.planner import plan
from treefx.planning.search.recurrence import Needs, choose_modes, recompute_everything
from treefx.planning.search.siblings import batch_siblings
from treefx.planning.search.simulate import measure_parts, simulate
from treefx.tools.bench.plan import agent_rollouts, forked_rollouts, group_rollouts, token_cost

TOKEN = linear_cost(store=0.02, part_seconds=100.0)
"""A byte per token: limits are numbers of tokens."""


def random_tree(seed: int, rows: int, longest: int) -> Forest:
    """Rows that branch off earlier ones anywhere."""
    random = np.random.default_rng(seed)
    made: list[list[int]] = []
    for row in range(rows):
        source = made[random.integers(len(made))] if made else []
        kept = source[: random.integers(1, len(source) + 1)] if source else []
        made.append(kept + [1000 * row + i for i in range(int(random.integers(1, longest + 1)))])
    return Forest.from_sequences(made)


def least_limit(forest: Forest, cost: CostModel) -> int:
    """The smallest limit of any plan."""
    return smallest_requirement(Counts(forest), cost).limit_bytes


def check_plan(found: Plan, limit: float) -> None:
    """A plan is what it promises: a partition, closed upwards, run in a possible order, under the limit."""
    forest = found.forest
    assert torch.equal(torch.cat([part.tokens for part in found.parts]).sort().values, torch.arange(forest.num_tokens))
    part_of = torch.empty(forest.num_tokens, dtype=torch.int64)
    for part in found.parts:
        part_of[part.tokens] = part.index
        assert part.ancestors == (() if part.parent is None else (*found.parts[part.parent].ancestors, part.parent))
        assert all(found.parts[child].parent == part.index for child in part.children)
    for part in found.parts:
        seen = {int(part_of[token]) for token in boundary(forest, found.parts, part)}
        assert seen <= set(part.ancestors)
        own = set(part.tokens.tolist())
        parents = {int(forest.parent[token]) for token in own} - own - {-1}
        assert all(int(part_of[token]) in part.ancestors for token in parents)
    assert found.peak_bytes <= limit
    check_steps(found)


def check_steps(found: Plan) -> None:
    """Every part forward and backward once, readers after what they read, gradients after those of all readers."""
    place = {(step.kind, step.part): number for number, step in enumerate(found.steps)}
    assert len(place) == len(found.steps)
    for part in found.parts:
        keeps = part.keep == "keep"
        ready = place["forward" if keeps else "kv", part.index]
        assert place["forward", part.index] < place["backward", part.index]
        assert (("kv", part.index) in place) != keeps
        for child in part.children:
            assert ready < place["forward" if found.parts[child].keep == "keep" else "kv", child]
            assert place["backward", child] < place["backward", part.index]
            assert keeps or place["backward", child] < place["forward", part.index]


@settings(max_examples=60, deadline=None)
@given(
    rows=row_batches(), share=st.floats(0.0, 1.0), copy=st.sampled_from([0.0, 0.1]), host=st.sampled_from([None, 2.0])
)
def test_every_plan_keeps_its_promises(rows: Rows, share: float, copy: float, host: float | None) -> None:
    forest = Forest.from_sequences(rows)
    cost = linear_cost(copy=copy, host=host, part_seconds=3.0, resident=10.0)
    least = least_limit(forest, cost)
    limit = least + share * max(cost.resident_bytes + 1.2 * forest.num_tokens - least, 0)
    check_plan(plan(forest, cost, limit), int(limit))


@settings(max_examples=40, deadline=None)
@given(rows=row_batches())
def test_sizes_are_what_the_definitions_say(rows: Rows) -> None:
    forest = Forest.from_sequences(rows)
    found = plan(forest, linear_cost(), least_limit(forest, linear_cost()))
    end, parent = forest.subtree_end.tolist(), forest.parent.tolist()
    for part, size in zip(found.parts, found.sizes, strict=True):
        own = set(part.tokens.tolist())
        above = {k for k in range(forest.num_tokens) for q in own if k <= q < end[k]} - own
        crossing = [k for k in sorted(own) if any(q not in own for q in range(k, end[k]))]
        assert boundary(forest, found.parts, part).tolist() == sorted(above)
        assert outgoing(forest, part).tolist() == crossing
        assert [parent[int(forest.edges.target[e])] in own for e in edge_ids(forest, part)] == [True] * size.edges
        pairs = sum(k <= q < end[k] for q in own for k in range(forest.num_tokens))
        edges = sum(parent[t] in own for t in range(len(parent)))
        assert size == Size(len(own), len(above), edges, len(crossing), pairs)


@pytest.mark.parametrize("copy", [0.0, 0.15])
@pytest.mark.parametrize("seed", range(12))
def test_exact_planner_equals_brute_force(seed: int, copy: float) -> None:
    forest = random_tree(seed, rows=3, longest=7)
    blocks = Blocks.of(Counts(forest), 4)
    assert 3 <= len(blocks) <= 9
    cost = linear_cost(copy=copy, part_seconds=2.0, run=1.5)
    outcomes = [evaluate(blocks, cost, *choice) for choice in all_plans(blocks)]
    for share in (0.35, 0.5, 0.7, 0.9):
        limit = share * 1.5 * forest.num_tokens
        fitting = [seconds for peak, seconds in outcomes if peak <= limit]
        drafts = solve_exactly(blocks, cost, limit)
        assert (drafts is None) == (not fitting)
        if drafts is not None:
            total = sum(part_seconds(cost, draft.size, draft.keep, 0) for draft, _ in in_order(drafts))
            assert total == pytest.approx(min(fitting))


@pytest.mark.parametrize("seed", range(40))
def test_recurrence_recomputes_as_little_as_brute_force(seed: int) -> None:
    forest = random_tree(seed, rows=4, longest=6)
    blocks = Blocks.of(Counts(forest), 5)
    cost = linear_cost(run=1.25, store=0.25)  # multiples of 1/4: with as many steps, rounding is exact
    outcomes = {}
    for top, keep in all_plans(blocks):
        again = sum(int(blocks.stop[b] - blocks.start[b]) for b in range(len(blocks)) if keep[b] == "recompute")
        peak = evaluate(blocks, cost, top, keep)[0]
        outcomes[again] = min(peak, outcomes.get(again, np.inf))
    needs = Needs.of(blocks, cost)
    for limit in np.linspace(0.3, 1.0, 5) * 1.25 * forest.num_tokens:
        limit = 2.0 ** np.ceil(np.log2(limit)) if seed % 2 else np.floor(limit)
        fitting = [again for again, peak in outcomes.items() if peak <= limit]
        drafts = choose_modes(blocks, needs, limit)
        if drafts is None:
            drafts = recompute_everything(blocks, needs, limit)
        assert (drafts is None) == (not fitting)
        if drafts is not None:
            again = sum(draft.size.tokens for draft, _ in in_order(drafts) if draft.keep == "recompute")
            # One step of rounding of 2048 per block can cost a block.
            assert again == min(fitting) or (seed % 2 == 0 and again <= min(fitting) + 5)


@pytest.mark.parametrize("seed", range(8))
def test_heuristic_is_close_to_the_exact_time(seed: int) -> None:
    forest = random_tree(100 + seed, rows=4, longest=12)
    cost = linear_cost(part_seconds=1.0, copy=0.02)
    blocks = Blocks.of(Counts(forest), 8)
    limit = 0.5 * forest.num_tokens + 4
    exact = solve_exactly(blocks, cost, limit)
    if exact is None:
        with pytest.raises(MemoryLimitError):
            plan(forest, cost, least_limit(forest, cost) - 2)
        return
    total = sum(part_seconds(cost, draft.size, draft.keep, 0) for draft, _ in in_order(exact))
    assert plan(forest, cost, limit).seconds <= 1.05 * total


@pytest.mark.parametrize(("make", "minimum"), [(group_rollouts, 409_600), (agent_rollouts, 234_496)])
def test_64_rollouts_are_computed_once_at_every_limit_and_in_every_order(make, minimum: int) -> None:  # type: ignore[no-untyped-def]
    for seed in range(2):
        forest = Forest.from_sequences(make(np.random.default_rng(seed)))
        for limit in (16_384, 32_768, 65_536):
            found = plan(forest, TOKEN, limit)
            assert sum(len(part) for part in found.parts) + found.recomputed_tokens == minimum
            assert found.peak_bytes <= limit
            assert len(found.parts) <= 2 * minimum / limit


def test_one_long_chain_is_cut_inside() -> None:
    forest = Forest.from_sequences([range(65_536)])
    cost = linear_cost(store=0.02, copy=0.01, part_seconds=10.0)
    found = plan(forest, cost, 8192)
    check_plan(found, 8192)
    assert len(found.parts) > 8
    assert found.recomputed_tokens < 65_536
    assert max(len(part) for part in found.parts) <= 8192


def test_everything_is_one_part_where_it_fits() -> None:
    forest = Forest.from_sequences([[1, 2, 3], [1, 2, 4], [5]])
    found = plan(forest, linear_cost(part_seconds=1.0), 1000)
    assert [len(part) for part in found.parts] == [5]
    assert found.seconds == pytest.approx(1.0 + 5 + 1.0 + 10)


def test_small_trees_share_parts() -> None:
    forest = Forest.from_sequences([[100 * row + i for i in range(10)] for row in range(30)])
    assert len(plan(forest, linear_cost(part_seconds=1.0), 100).parts) == 3


@pytest.mark.parametrize("limit", [700, 760, 820])
def test_equal_inner_parts_share_calls_where_that_is_faster(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """16 small trees below one prompt: none fits whole with the prompt kept, so their upper nodes are parts."""
    levels = [(1, 256), (16, 64), (16, 32)]
    rows: list[list[int]] = [[]]
    for children, tokens in levels:
        nodes = [[1000 * child + place for place in range(tokens)] for child in range(children)]
        rows = [row + node for row in rows for node in nodes]
    forest = Forest.from_sequences(rows)
    together = plan(forest, TOKEN, limit)
    check_plan(together, limit)
    monkeypatch.setattr(planner, "_SIBLINGS", (1,))
    alone = plan(forest, TOKEN, limit)
    inner = [part for part in together.parts if part.children and part.parent is not None]
    assert len(together.parts) < len(alone.parts)
    assert together.seconds < alone.seconds
    assert any(int((~torch.isin(forest.parent[part.tokens], part.tokens)).sum()) > 1 for part in inner)


def test_the_work_of_planning_grows_as_the_forest_does() -> None:
    """Up to a fifth of the 10,000 rollouts that `treefx bench plan` times; work is counted in calls of functions."""
    few, many = (Forest.from_sequences(forked_rollouts(np.random.default_rng(0), prompts, 100)) for prompts in (5, 20))
    plan(few, token_cost(), 2000)  # imports and caches on first use
    calls_of_few, _ = counted_plan(few)
    calls_of_many, found = counted_plan(many)
    growth = many.num_tokens / few.num_tokens
    assert calls_of_many < 1.3 * growth * calls_of_few  # quadratic work would be 4 times that growth
    assert len(found.parts) > 300
    assert found.recomputed_tokens == 0
    check_steps(found)


def counted_plan(forest: Forest) -> tuple[int, Plan]:
    """A plan, and how many calls of Python's functions it took."""
    calls = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event == "call"

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        found = plan(forest, token_cost(), 2000)
    finally:
        sys.setprofile(before)
    return calls, found


def test_of_many_drafts_the_fewest_and_the_largest_groups_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    forest = Forest.from_sequences(forked_rollouts(np.random.default_rng(1), 4, 40))
    every = plan(forest, token_cost(), 2000)
    monkeypatch.setattr(planner, "_MANY_DRAFTS", 0)
    some = plan(forest, token_cost(), 2000)
    check_plan(some, 2000)
    assert every.seconds <= some.seconds <= 1.02 * every.seconds
    monkeypatch.setattr(planner, "_VERY_MANY_DRAFTS", 0)
    check_plan(plan(forest, token_cost(), 2000), 2000)


@settings(max_examples=60, deadline=None)
@given(rows=row_batches(), many=st.integers(1, 4), room=st.floats(1.0, 2.0))
def test_batches_of_siblings_hold_every_token_and_fit(rows: Rows, many: int, room: float) -> None:
    counts = Counts(Forest.from_sequences(rows))
    blocks = Blocks.of(counts, 3)
    budget = room * least_limit(counts.forest, TOKEN)
    drafts = recompute_everything(blocks, Needs.of(blocks, TOKEN), budget)
    if drafts is None:
        return
    before = sorted(span for draft, _ in in_order(drafts) for span in draft.ranges)
    batched = batch_siblings(drafts, TOKEN, budget, many)
    assert sorted(span for draft, _ in in_order(batched) for span in draft.ranges) == before
    schedule = to_schedule(Layout.of_drafts(batched))
    sizes = measure_parts(counts, schedule.parts)
    assert max(moment.peak_bytes for moment in simulate(schedule, sizes, TOKEN)) <= budget * (1 + 1e-9)


def test_gathered_copies_count() -> None:
    """Every kept part on a path saves its own copy of its ancestors: leaving that out breaks the promise."""
    forest = Forest.from_sequences([range(256)])
    cost = linear_cost(copy=0.3, store=0.3, run=4.0)
    limit = least_limit(forest, cost) + 60
    found = plan(forest, cost, limit)
    check_plan(found, limit)
    blind = plan(forest, linear_cost(copy=0.0, store=0.3, run=4.0), limit)
    kept = [size for part, size in zip(blind.parts, blind.sizes, strict=True) if part.keep == "keep"]
    assert sum(cost.saved(*size[:3]) + cost.store_bytes_per_token * size.outgoing for size in kept) > limit


def test_host_memory_takes_what_does_not_fit() -> None:
    forest = Forest.from_sequences([range(400)])
    near, far = linear_cost(store=1.0), linear_cost(store=1.0, host=100.0)
    limit = least_limit(forest, far)
    assert limit < least_limit(forest, near)
    found = plan(forest, far, limit)
    check_plan(found, limit)
    assert "offload" in {part.keep for part in found.parts}
    moves = [moment.step.kind for moment in found.moments if moment.step.kind in ("offload", "fetch")]
    assert moves.count("offload") == moves.count("fetch") > 0
    with pytest.raises(MemoryLimitError):
        plan(forest, near, limit)


def test_a_limit_too_small_is_refused_with_the_way_out() -> None:
    forest = Forest.from_sequences([[1, 2, 3], list(range(10, 300))])
    cost = linear_cost(resident=50.0)
    with pytest.raises(MemoryLimitError, match=r"of row 1 need (.*) bytes even if.*50 for parameters") as caught:
        plan(forest, cost, 80)
    need = int(str(caught.value).split("raise the limit to at least ")[1].split(" bytes")[0].replace(",", ""))
    check_plan(plan(forest, cost, need), need)
    with pytest.raises(MemoryLimitError):
        plan(forest, cost, need - 2)


def _with_masks(rows: list[list[int]], share: float) -> tuple[Plan, Plan]:
    """Plans with a byte per element of masks, and without, under the least limit and a share of the rest."""
    forest, cost = Forest.from_sequences(rows), linear_cost(part_seconds=1.0)
    least = least_limit(forest, cost)
    limit = round(least + share * (forest.num_tokens - least))
    return plan(forest, replace(cost, mask_element_bytes=1.0), limit), plan(forest, cost, limit)


@pytest.mark.parametrize("share", [0.0, 0.02, 0.5, 0.9])
def test_masks_of_forks_count(share: float) -> None:
    """A part of n tokens with forks takes masks of up to n * n elements: parts become chains, or very short."""
    shared = list(range(200))
    rows = [[*shared[: 40 * k], 1000 + k, *range(2000, 2050 - 3 * k)] for k in range(1, 6)]
    masked, bare = _with_masks(rows, share)
    assert masked.peak_bytes <= masked.memory_limit_bytes
    assert len(masked.parts) >= len(bare.parts)
    ends = masked.forest.subtree_end
    for part, size in zip(masked.parts, masked.sizes, strict=True):
        forks = len(torch.unique(torch.searchsorted(part.tokens, ends[part.tokens].to(torch.int64)))) > 1
        assert (size.mask > 0) == forks
    if share >= 0.5:  # a plan without them would not keep the promise
        assert planner.with_final_sizes(replace(bare, cost=masked.cost)).peak_bytes > masked.memory_limit_bytes


def test_every_limit_is_kept_or_refused_where_masks_count() -> None:
    """From the least that parts need without masks to the whole forest with them."""
    forest = Forest.from_sequences([[1, 2, 3, *range(4, 20)], [1, 2, 3, *range(30, 40)], [1, 2, *range(50, 60)]])
    cost = replace(linear_cost(copy=0.3, store=0.5, part_seconds=1.0), mask_element_bytes=0.1)
    planned = 0
    for limit in range(least_limit(forest, cost), forest.num_tokens**2 // 10 + forest.num_tokens + 2):
        try:
            found = plan(forest, cost, limit)
        except MemoryLimitError as error:
            assert "raise the limit" in str(error)
        else:
            check_plan(found, limit)
            planned += 1
    assert planned > 100 and len(found.parts) == 1


@pytest.mark.parametrize("limit", [0, -5, "all", None, True, float("nan")])
def test_limits_that_are_none_are_refused(limit: object) -> None:
    with pytest.raises(InputError, match="memory_limit_bytes must be"):
        plan(Forest.from_sequences([[1]]), linear_cost(), limit)  # type: ignore[arg-type]


def test_automatic_limit_is_what_the_device_has() -> None:
    found = plan(Forest.from_sequences([[1, 2]]), linear_cost(resident=7.0))
    assert found.memory_limit_bytes > 2**20


def test_what_is_no_profile_is_refused() -> None:
    with pytest.raises(InputError, match="expects the result of treefx.profile"):
        plan(Forest.from_sequences([[1]]), object(), 100)  # type: ignore[arg-type]


@pytest.mark.parametrize("rows", [[], [[1.0] * 9], [[0, -1, 0, 0, 0, 0]], [[0, float("inf"), 0, 0, 0, 0]]])
def test_bytes_refuse_bad_coefficients(rows: list[list[float]]) -> None:
    with pytest.raises(InputError, match="Bytes expected"):
        Bytes(rows)


def test_cost_models_survive_being_saved() -> None:
    cost = linear_cost(copy=0.1, host=3.0)
    assert CostModel.from_dict(cost.to_dict()) == cost
