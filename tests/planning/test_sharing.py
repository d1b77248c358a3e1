"""Levels that are not shared: only where that is predicted to pay, exact in loss and gradients, named in every view."""

import dataclasses
import random

import networkx as nx
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import treefx
from tests.backend.native import Rows, branches, random_weights
from tests.oracle import FLOAT64, assert_close, separate_rows
from tests.planning.costs import linear_cost
from tests.planning.parts import reproducible as reproducible
from tests.planning.parts import run, tiny
from tests.strategies import row_batches
from treefx.errors import InputError
from treefx.forests.subset import split_tokens
from treefx.planning.search.blocks import Counts
from treefx.planning.search.infeasible import smallest_requirement
from treefx.planning.search.plan import Plan

LAUNCHES, FREE = linear_cost(part_seconds=1000.0), linear_cost(part_seconds=0.0)
"""A part costs as much as a thousand tokens, or nothing."""
TREE = [[7, 8, *range(10 * row, 10 * row + 9)] for row in range(2, 6)]
"""Four answers below a prompt of two tokens, of which two fit together."""


def tight_plan(forest: treefx.Forest, cost: object = LAUNCHES, more: float = 0.3, sharing: str = "auto") -> Plan:
    least = smallest_requirement(Counts(forest), LAUNCHES).limit_bytes
    limit = least + more * (1.2 * forest.num_tokens - least)
    return treefx.plan(forest, cost, limit, sharing=sharing)  # type: ignore[arg-type]


def test_a_short_prefix_is_not_shared_where_parts_are_dear() -> None:
    forest = treefx.Forest.from_sequences(TREE)
    shared, found = tight_plan(forest, sharing="all"), tight_plan(forest)
    assert found.seconds < shared.seconds
    assert found.peak_bytes <= found.memory_limit_bytes
    (level,) = found.unshared
    assert (level.depth, level.tokens, level.rows) == (0, 2, 4)
    assert found.forest.num_tokens == forest.num_tokens + 2 * (level.copies - 1)
    assert level.replay_seconds < level.part_seconds


def test_everything_is_shared_where_parts_are_free() -> None:
    for rows in (TREE, [[*range(40), 100 + row] for row in range(5)]):
        found = tight_plan(treefx.Forest.from_sequences(rows), FREE)
        assert found.unshared == ()
        assert found.seconds == tight_plan(treefx.Forest.from_sequences(rows), FREE, sharing="all").seconds


def test_views_name_what_is_not_shared() -> None:
    found = tight_plan(treefx.Forest.from_sequences(TREE))
    reason = found.unshared[0].reason
    assert "tokens 0 to 1 of row 0, which 4 rows have, are computed in" in reason
    assert f"Not shared: {reason}" in found.explain()
    graph = found.to_networkx()
    assert nx.is_forest(graph)
    assert [item["reason"] for item in graph.graph["unshared"]] == [reason]
    assert found.to_dict()["unshared"][0]["copies"] == found.unshared[0].copies
    assert "Not shared" not in tight_plan(treefx.Forest.from_sequences(TREE), FREE).explain()


def test_sharing_is_one_of_two_words() -> None:
    with pytest.raises(InputError, match="sharing must be 'all' or 'auto', got 'never'"):
        tight_plan(treefx.Forest.from_sequences(TREE), sharing="never")


@settings(max_examples=60, deadline=None)
@given(rows=row_batches(), seed=st.integers(0, 99))
def test_split_forests_have_the_rows_and_weights_they_had(rows: Rows, seed: int) -> None:
    draw, weights = random.Random(seed), random_weights(rows, seed)
    forest = treefx.Forest.from_sequences(rows, weights=weights)
    count = len(forest.nodes)
    chosen = [node for node in range(count) if draw.random() < 0.5]
    split = split_tokens(forest, chosen, [draw.randrange(3) for _ in range(count)]).validate()
    assert [row.tolist() for row in split.sequences()] == [list(row) for row in rows]
    assert torch.equal(split.raw_weight, forest.raw_weight)
    assert forest.num_tokens <= split.num_tokens <= forest.raw_tokens
    assert split_tokens(forest, [], [0] * count).num_tokens == forest.num_tokens
    apart = split_tokens(forest, range(count), list(range(count)))
    ends = {tuple(row) for row in rows}
    assert apart.num_tokens == sum(map(len, ends))


def test_unshared_levels_execute_exactly() -> None:
    """Drawn forests in float64: loss and all gradients are those of every row on its own."""
    model, compiled = tiny("sdpa_enable_gqa", kv_heads=2)
    replayed = 0

    @settings(max_examples=6)
    @given(trees=st.lists(branches, min_size=1, max_size=3), seed=st.integers(0, 99), more=st.floats(0.0, 0.6))
    def check(trees: list[Rows], seed: int, more: float) -> None:
        nonlocal replayed
        rows = [row for tree in trees for row in tree]
        weights = random_weights(rows, seed)
        forest = treefx.Forest.from_sequences(rows, weights=weights)
        expected = separate_rows(model, rows, weights)
        if all(g is None or not g.any() for g in expected.gradients.values()):
            return
        found = tight_plan(forest, more=more)
        replayed += len(found.unshared)
        assert_close(run(compiled, model, found), expected, FLOAT64)

    check()
    weights = random_weights(TREE, 1)
    found = tight_plan(treefx.Forest.from_sequences(TREE, weights=weights))
    assert_close(run(compiled, model, found), separate_rows(model, TREE, weights), FLOAT64)
    assert replayed + len(found.unshared) > 0


def test_copies_that_keep_the_weight_of_all_rows_are_wrong() -> None:
    """The plausible mistake: a copy is given the edge weights of the token that it is a copy of."""
    model, compiled = tiny("sdpa_enable_gqa", kv_heads=2)
    rows = [[7, 8, 9, *row[2:]] for row in TREE]
    forest = treefx.Forest.from_sequences(rows)
    found = tight_plan(forest)
    assert found.unshared
    target = {
        tuple(row[: place + 1]): forest.token_weight[path[place]]
        for row, path in zip(rows, forest.token_of, strict=True)
        for place in range(len(row))
    }
    weight = found.forest.token_weight.clone()
    for row, path in zip(rows, found.forest.token_of, strict=True):
        for place, token in enumerate(path.tolist()):
            weight[token] = target[tuple(row[: place + 1])]
    wrong = dataclasses.replace(found, forest=dataclasses.replace(found.forest, token_weight=weight))
    expected = separate_rows(model, rows, [[1.0] * len(row) for row in rows])
    assert_close(run(compiled, model, found), expected, FLOAT64)
    with pytest.raises(AssertionError):
        assert_close(run(compiled, model, wrong), expected, FLOAT64)
