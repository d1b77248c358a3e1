"""Ways to cut are functions of a graph: each is exact, judged by one simulation, and refused by name."""

from collections.abc import Callable, Iterator
from typing import Any

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import treefx
from tests.oracle import FLOAT64, assert_close, separate_rows
from tests.planning.costs import linear_cost
from tests.planning.parts import reproducible as reproducible
from tests.planning.parts import run, tiny, weighted_forest
from tests.planning.test_planner import check_plan, least_limit, random_tree
from tests.strategies import Rows, row_batches
from treefx.errors import InputError, MemoryLimitError
from treefx.planning.search import strategies
from treefx.planning.search.graph import Group, peak_of, tree_of_blocks
from treefx.planning.search.plan import Plan
from treefx.planning.search.planner import plan
from treefx.planning.search.strategies import BUILT_IN, register, strategy_names


def cut_at_forks(graph: Any, limit: int) -> Any:
    """Every run without a fork is a part, however many blocks it has."""
    cut = nx.DiGraph(graph)
    cut.remove_edges_from([(above, block) for above, block in graph.edges if graph.out_degree(above) > 1])
    return nx.weakly_connected_components(cut)


def limits_of(forest: treefx.Forest, cost: Any) -> list[int]:
    """From what just fits to a little less than everything at once."""
    least, most = least_limit(forest, cost), cost.resident_bytes + cost.run_bytes(forest.num_tokens, 0, 0)
    return [round(least + share * max(most - least, 0)) for share in (0.1, 0.4, 0.8)]


def test_a_strategy_of_ones_own_is_exact() -> None:
    model, compiled = tiny()
    forest, rows, weights = weighted_forest()
    found = plan(forest, linear_cost(), 10_000, strategy=cut_at_forks)
    assert found.strategy == "cut_at_forks"
    assert len(found.parts) > 3
    forks = {int(part.tokens[0]) for part in found.parts}
    above = np.bincount(forest.parent[forest.parent >= 0].numpy(), minlength=forest.num_tokens)
    assert forks == {k for k, up in enumerate(forest.parent.tolist()) if up < 0 or above[up] > 1}
    assert_close(run(compiled, model, found), separate_rows(model, rows, weights), FLOAT64)


@pytest.mark.parametrize("name", BUILT_IN)
def test_built_in_strategies_are_exact(name: str) -> None:
    model, compiled = tiny()
    forest, rows, weights = weighted_forest()
    if name == "exact":
        rows, weights = rows[:3], weights[:3]
        forest = treefx.Forest.from_sequences(rows, weights)
    cost = linear_cost(part_seconds=5.0)
    limit = round(0.7 * forest.num_tokens)
    found = plan(forest, cost, limit, strategy=name)
    assert len(found.parts) > 1
    check_plan(found, limit)
    assert_close(run(compiled, model, found), separate_rows(model, rows, weights), FLOAT64)


def test_a_strategy_is_refused_where_it_breaks_the_limit_and_names_the_part() -> None:
    forest = treefx.Forest.from_sequences([[*range(40), *range(100, 110)], [*range(40), *range(200, 260)]])
    cost = linear_cost(resident=7.0)
    limit = least_limit(forest, cost) + 20
    with pytest.raises(MemoryLimitError) as caught:
        plan(forest, cost, limit, strategy=cut_at_forks)
    text = str(caught.value)
    assert f"strategy 'cut_at_forks' breaks memory_limit_bytes={limit:,}" in text
    assert "part 2 of 3 (60 tokens, packed 50 to 109, the first of row 1)" in text
    need = int(text.split("needs ")[1].split(" bytes")[0].replace(",", ""))
    check_plan(plan(forest, cost, need, strategy=cut_at_forks), need)
    with pytest.raises(MemoryLimitError):
        plan(forest, cost, need - 1, strategy=cut_at_forks)
    check_plan(plan(forest, cost, limit), limit)


@pytest.mark.parametrize("tens", range(5))
def test_auto_is_never_slower_than_a_built_in_strategy(tens: int) -> None:
    """50 forests, 3 limits."""
    won: set[str] = set()
    for seed in range(10 * tens, 10 * tens + 10):
        draw = np.random.default_rng(seed)
        forest = random_tree(seed, rows=int(draw.integers(3, 9)), longest=int(draw.integers(8, 60)))
        cost = linear_cost(copy=float(draw.choice([0, 0.05])), part_seconds=float(draw.choice([1, 20, 100])), run=1.5)
        for limit in limits_of(forest, cost):
            best = plan(forest, cost, limit)
            others = list(_within(forest, cost, limit))
            assert best.seconds <= min(other.seconds for other in others) + 1e-9
            won |= {other.strategy for other in others if other.seconds > best.seconds + 1e-9}
    assert len(won) >= 3, "the others are as fast everywhere: the limits say nothing"


def _within(forest: treefx.Forest, cost: Any, limit: int) -> Iterator[Plan]:
    for name in BUILT_IN:
        try:
            found = plan(forest, cost, limit, strategy=name)
        except (MemoryLimitError, InputError) as error:
            assert name in str(error)
            continue
        check_plan(found, limit)
        yield found


def test_the_search_alone_is_sometimes_beaten(monkeypatch: pytest.MonkeyPatch) -> None:
    """So the built-in strategies are tried as well."""
    from treefx.planning.search import planner

    slower = 0
    for seed in range(50):
        draw = np.random.default_rng(seed)
        forest = random_tree(seed, rows=int(draw.integers(3, 14)), longest=int(draw.integers(8, 120)))
        cost = linear_cost(copy=float(draw.choice([0, 0.05])), part_seconds=float(draw.choice([1, 20, 100])), run=1.5)
        limit = limits_of(forest, cost)[2]
        monkeypatch.setattr(planner, "_FEW_BLOCKS", 0)
        alone = plan(forest, cost, limit)
        monkeypatch.undo()
        slower += plan(forest, cost, limit).seconds < alone.seconds - 1e-9
    assert slower > 0


@settings(max_examples=40, deadline=None)
@given(
    rows=row_batches(), name=st.sampled_from([name for name in BUILT_IN if name != "exact"]), room=st.floats(0.0, 1.0)
)
def test_what_strategies_return_is_a_plan_or_refused(rows: Rows, name: str, room: float) -> None:
    forest, cost = treefx.Forest.from_sequences(rows), linear_cost(part_seconds=3.0, copy=0.1)
    limit = round(least_limit(forest, cost) + room * forest.num_tokens)
    try:
        found = plan(forest, cost, limit, strategy=name)
    except MemoryLimitError as error:
        assert f"strategy {name!r} breaks" in str(error)
    else:
        check_plan(found, limit)


WRONG: dict[str, tuple[Callable[[Any, int], Any], str]] = {
    "left out": (lambda graph, limit: [{block} for block in graph if block], "1 of 5 blocks are in no part, as 0"),
    "twice": (lambda graph, limit: [set(graph), {0}], "block 0 is in part 0 and in part 1"),
    "empty": (lambda graph, limit: [set(graph), set()], "part 1 must hold blocks 0 to 4, got []"),
    "no block": (lambda graph, limit: [{*graph, 77}], "part 0 must hold blocks 0 to 4"),
    "two parents": (lambda graph, limit: [{0}, {1}, {3}, {2, 4}], "hangs on parts [1, 2], of which none has all"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_no_tree_of_parts_is_refused(name: str) -> None:
    """A root with two children that have a child each, which do not fit with them: blocks 0, 1, 2, 3, 4."""
    rows = [[*range(5), *range(first, first + 8)] for first in (100, 200)]
    forest = treefx.Forest.from_sequences(rows)
    wrong, message = WRONG[name]
    with pytest.raises(InputError) as caught:
        plan(forest, linear_cost(), 7.5, strategy=wrong)
    assert message in str(caught.value)


def test_parts_may_keep_less_and_may_join_cousins_below_one_part() -> None:
    """Leaves of two nodes in one part: both nodes are one part above."""
    forest = treefx.Forest.from_sequences([[0, a, b] for a in (1, 2) for b in (3, 4)])
    graph = tree_of_blocks(forest, linear_cost())
    inner = [block for block in graph if graph.out_degree(block)]
    leaves = [block for block in graph if not graph.out_degree(block)]
    partition = [Group(inner, "recompute"), leaves]
    found = plan(forest, linear_cost(), 100, strategy=lambda graph, limit: partition)
    check_plan(found, 100)
    assert [(part.keep, len(part)) for part in found.parts] == [("recompute", 3), ("keep", 4)]
    assert peak_of(graph, partition) == pytest.approx(found.peak_bytes, abs=1)


def test_names_are_found_registered_and_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strategies, "_STRATEGIES", dict(strategies._STRATEGIES))
    register("forks")(cut_at_forks)
    forest = treefx.Forest.from_sequences([[1, 2, 3], [1, 2, 4]])
    assert plan(forest, linear_cost(), 100, strategy="forks").strategy == "forks"
    assert strategy_names()[-1] == "forks" and "forks" not in BUILT_IN
    with pytest.raises(InputError, match=r"strategy must be 'auto', 'exact', .*'forks' or a function .* got 'fork'"):
        plan(forest, linear_cost(), 100, strategy="fork")
    many = treefx.Forest.from_sequences([[row, 7] for row in range(20)])
    with pytest.raises(InputError, match="tries every way to cut, at most 9 blocks, got 20; use 'auto'"):
        plan(many, linear_cost(), 100, strategy="exact")


def test_the_tree_of_blocks_says_what_blocks_cost() -> None:
    forest = treefx.Forest.from_sequences([[*range(10), 20, 21], [*range(10), 30]])
    graph = tree_of_blocks(forest, linear_cost(saved=1.0, run=2.0, store=0.5), longest=5)
    assert list(graph.edges) == [(0, 1), (1, 2), (1, 3)]
    assert graph.nodes[1] == {
        "start": 5, "stop": 10, "tokens": 5, "boundary": 5, "pairs": 6 + 7 + 8 + 9 + 10,
        "saved_bytes": 5.0, "store_bytes": 2.5, "run_bytes": 12.5, "seconds": 15.0,
    }  # fmt: skip
    assert graph.nodes[3]["store_bytes"] == 0.0


def test_a_plan_is_a_graph_of_parts() -> None:
    stem = [*range(10)]
    forest = treefx.Forest.from_sequences([[*stem, *range(100, 106)], [*stem, 300, 301], [*stem[:4], 200, 201]])
    found = plan(forest, linear_cost(store=0.5), 40, strategy=lambda graph, limit: [{b} for b in graph])
    graph = found.to_networkx(rank=3)
    assert nx.is_arborescence(graph)
    assert sum(tokens for _, tokens in graph.nodes(data="tokens")) == forest.num_tokens
    assert max(peak for _, peak in graph.nodes(data="bytes")) == found.peak_bytes
    assert sum(seconds for _, seconds in graph.nodes(data="seconds")) == pytest.approx(found.seconds)
    assert {rank for _, rank in graph.nodes(data="rank")} == {3}
    for above, below, crossing in graph.edges(data=True):
        parent, child = (set(found.parts[part].tokens.tolist()) for part in (above, below))
        ends = forest.subtree_end.tolist()
        read = [k for k in parent if any(k < q < ends[k] for q in child)]
        assert crossing == {"kv_tokens": len(read), "kv_bytes": 0.25 * len(read)}
        assert graph.nodes[below]["boundary"] >= len(read) > 0
    assert {mode for _, mode in graph.nodes(data="mode")} == {"keep", "leaf"}
