"""Tokens to ranks: every token once, only needed keys are sent, ranks agree, and figures of large trees."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import treefx
from tests.backend.native import branches
from treefx.planning.cost.model import Seconds
from treefx.scale.context import make_context_row
from treefx.scale.pieces import TokenSplit, contiguous, needed, preferred, split_places
from treefx.tools.bench.context import TREES, run


def ways(forest: treefx.Forest, ranks: int) -> list[TokenSplit]:
    return split_places(
        forest.depth.numpy().astype(np.int64), forest.subtree_end.numpy().astype(np.int64), ranks, Seconds(0, 1.0, 0.1)
    )


def ancestors(forest: treefx.Forest, token: int) -> set[int]:
    found, above = set[int](), int(forest.parent[token])
    while above >= 0:
        found.add(above)
        above = int(forest.parent[above])
    return found


forests = st.lists(branches, min_size=1, max_size=2).map(lambda many: [row for rows in many for row in rows])


@given(forests, st.integers(1, 5))
def test_every_token_is_on_one_rank_that_is_sent_its_ancestors(rows: list[list[int]], ranks: int) -> None:
    forest = treefx.Forest.from_sequences(rows)
    ranks = min(ranks, forest.num_tokens)
    end = forest.subtree_end.numpy().astype(np.int64)
    for found in ways(forest, ranks):
        assert sorted(np.concatenate(found.tokens).tolist()) == list(range(forest.num_tokens))
        for own, received in zip(found.tokens, found.received.tolist(), strict=True):
            assert len(own) and np.all(np.diff(own) > 0)
            above = set().union(*(ancestors(forest, token) for token in own.tolist())) - set(own.tolist())
            assert needed(end, own).tolist() == sorted(above)
            assert received == len(above)


@given(forests, st.integers(2, 4))
def test_ranks_agree_on_what_travels(rows: list[list[int]], ranks: int) -> None:
    """Carried out on tokens in place of keys: what each rank's boundary gets are the tokens it waits for."""
    forest = treefx.Forest.from_sequences(rows)
    ranks = min(ranks, forest.num_tokens)
    for found in ways(forest, ranks):
        made = [make_context_row(forest, found, rank, "none") for rank in range(ranks)]
        mail = []
        for row, own in zip(made, found.tokens, strict=True):
            sent = torch.from_numpy(own)[row.cut.vectors[3]][: int(row.cut.counts[0].sum())]
            mail.append(torch.split(sent, row.cut.counts[0].tolist()))
        for rank, row in enumerate(made):
            came = [pieces[rank] for pieces in mail]
            assert [len(piece) for piece in came] == row.cut.counts[1].tolist()
            above = needed(forest.subtree_end.numpy().astype(np.int64), found.tokens[rank])
            got = torch.cat(came)[row.cut.order[: len(above)]]
            assert got.tolist() == above.tolist()
            lo, hi, column, _ = row.cut.vectors
            assert column[: len(above)].tolist() == forest.depth[got].tolist()
            for place, token in enumerate(got.tolist()):
                below = [i for i, own in enumerate(found.tokens[rank].tolist()) if token in ancestors(forest, own)]
                assert below == list(range(int(lo[place]), int(hi[place])))
        edges = torch.cat([row.edge_index for row in made])
        assert sorted(edges.tolist()) == list(range(len(forest.edges)))


def test_contiguous_ranges_are_as_even_as_the_bound_on_tokens_lets_them_be() -> None:
    costs = np.arange(1.0, 1001.0)
    assert {len(own) for own in contiguous(np.ones(1000), 8)} == {125}
    sums = [(costs + 3000)[own].sum() for own in contiguous(costs + 3000, 8)]
    assert max(sums) / np.mean(sums) < 1.01
    sizes = [len(own) for own in contiguous(costs, 8)]
    assert max(sizes) == int(1.25 * 125)
    assert [len(own) for own in contiguous(costs[:3], 3)] == [1, 1, 1]


def test_a_chain_is_folded_and_a_bush_is_not() -> None:
    chain = treefx.Forest.from_sequences([list(range(64))])
    bush = treefx.Forest.from_sequences([[row] * 16 for row in range(8)])
    assert preferred(ways(chain, 4)).way == "folded"
    found = preferred(ways(bush, 4))
    assert (found.way, found.of_ring, found.balance) == ("contiguous", 0.0, 1.0)


def test_ranks_without_tokens_run_the_first_one_which_counts_once() -> None:
    forest = treefx.Forest.from_sequences([[5, 6]])
    found = treefx.scale.split_tokens(forest, 4)
    assert [own.tolist() for own in found.tokens] == [[0], [1], [0], [0]]
    rows = [make_context_row(forest, found, rank, "none") for rank in range(4)]
    assert [row.edge_index.tolist() for row in rows] == [[0], [], [], []]
    assert [row.cut.counts.tolist() for row in rows][1:] == [[[0] * 4, [1, 0, 0, 0]], [[0] * 4] * 2, [[0] * 4] * 2]
    for ranks in (0, True):
        with pytest.raises(treefx.InputError, match="at least 1"):
            treefx.scale.split_tokens(forest, ranks)


def test_large_trees_are_even_and_send_a_third_of_a_ring() -> None:
    for record in run():
        assert record["balance"] <= 1.05, record
        assert record["of_ring"] <= (0.75 if record["tree"] == "chain" else 0.35), record
    assert {record["tree"] for record in run()} == set(TREES)
