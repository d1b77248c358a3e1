"""Forests from nodes and their parents: the rows of the tree, each token known by its node."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.strategies import Rows, row_batches
from treefx import Forest, ForestError
from treefx.logprobs import edge_logprobs

many = settings(max_examples=100)


@st.composite
def trees(draw: st.DrawFn) -> tuple[Rows, list[int], list[list[float]]]:
    """Nodes of one to four tokens in any order, parents, and a weight per token."""
    count = draw(st.integers(1, 8))
    place = draw(st.permutations(range(count)))
    nodes: Rows = [[] for _ in range(count)]
    parents, weights = [-1] * count, [[1.0]] * count
    for i in range(count):
        above = draw(st.integers(-1, i - 1))
        nodes[place[i]] = draw(st.lists(st.integers(0, 3), min_size=1, max_size=4))
        parents[place[i]] = place[above] if above >= 0 else -1
        weight = st.sampled_from([0.0, 0.25, 1.0, 3.0])
        size = len(nodes[place[i]])
        weights[place[i]] = draw(st.lists(weight, min_size=size, max_size=size))
    return nodes, parents, weights


def path(parents: list[int], node: int) -> list[int]:
    return [] if node < 0 else [*path(parents, parents[node]), node]


@many
@given(trees())
def test_rows_are_the_paths_to_leaves(tree: tuple[Rows, list[int], list[list[float]]]) -> None:
    nodes, parents, weights = tree
    forest = Forest.from_nodes(nodes, parents, weights).validate()
    leaves = [node for node in range(len(nodes)) if node not in parents]
    paths = [path(parents, leaf) for leaf in leaves]
    assert [row.tolist() for row in forest.sequences()] == [sum([nodes[i] for i in p], []) for p in paths]
    assert forest.num_tokens == sum(map(len, nodes))
    of_rows = [sum([weights[i] for i in p], []) for p in paths]
    expected = np.concatenate([[0.0, *row[1:]] for row in of_rows])
    assert forest.raw_weight.tolist() == expected.tolist()
    assert float(forest.token_weight.sum()) == pytest.approx(float(expected.sum()))


@many
@given(row_batches())
def test_the_nodes_of_a_forest_give_it_back(rows: Rows) -> None:
    forest = Forest.from_sequences(rows)
    runs, node_of = forest.nodes, {}
    for number, stop in enumerate(runs.stop.tolist()):
        node_of[stop - 1] = number
    nodes = [forest.tokens[a:b].tolist() for a, b in zip(runs.start.tolist(), runs.stop.tolist(), strict=True)]
    ends = [node_of[int(tokens[-1])] for tokens in forest.token_of]
    again = Forest.from_nodes(nodes, runs.parent.tolist(), ends=ends)
    assert [row.tolist() for row in again.sequences()] == rows
    assert again.num_tokens == forest.num_tokens
    assert again.token_weight.sum() == forest.token_weight.sum()


def test_equal_siblings_stay_two_nodes() -> None:
    nodes, parents = [[5, 6], [7, 8], [7, 9]], [-1, 0, 0]
    forest = Forest.from_nodes(nodes, parents)
    searched = Forest.from_sequences(forest.sequences())
    assert (forest.num_tokens, searched.num_tokens) == (6, 5)
    assert len(forest.edges) == 5 and forest.edges.weight.tolist() == [2.0, 1.0, 1.0, 1.0, 1.0]


def test_rows_may_end_inside_and_more_than_once() -> None:
    forest = Forest.from_nodes([[1, 2], [3], [4]], torch.tensor([-1, 0, 1]), ends=[2, 0, 2])
    assert [row.tolist() for row in forest.sequences()] == [[1, 2, 3, 4], [1, 2], [1, 2, 3, 4]]
    assert forest.multiplicity.tolist() == [3, 3, 2, 2]


@pytest.mark.parametrize(
    ("nodes", "parents", "more", "message"),
    [
        ([[1], [2]], [1, 0], {}, r"cycle through the nodes \[0, 1\]"),
        ([[1], [2]], [-1, 1], {}, "cycle"),
        ([[1], [2]], [-1, 2], {}, r"parents\[1\]: expected the number of a node below 2, or -1 at a root, got 2"),
        ([[1], [2]], [-1, -2], {}, "got -2"),
        ([[1], [2]], [-1], {}, "expected 2, got 1"),
        ([[1], [2]], [-1, 0.5], {}, "got float at position 1"),
        ([[1], []], [-1, 0], {}, "row 1 is empty"),
        ([[1], [-5]], [-1, 0], {}, "at least 0"),
        ([[1], [2]], [-1, 0], {"ends": [0]}, "no row passes node 1"),
        ([[1], [2]], [-1, 0], {"ends": [-1]}, "got -1"),
        ([[1], [2, 3]], [-1, 0], {"weights": [1.0, [1.0]]}, "as long as the row"),
        ([[1], [2]], [-1, 0], {"weights": [1.0, [float("nan")]]}, "NaN"),
    ],
)  # fmt: skip
def test_what_is_no_tree_is_refused(nodes: Any, parents: Any, more: Any, message: str) -> None:
    with pytest.raises(ForestError, match=message):
        Forest.from_nodes(nodes, parents, **more)


@pytest.mark.parametrize("from_hidden", [False, True])
def test_equal_tokens_below_one_parent_are_predicted_each(from_hidden: bool) -> None:
    """Two edges to one token of one row of logits: the gradient of each counts, not that of the last one alone."""
    forest = Forest.from_nodes([[5, 6], [7, 8], [7, 9], [7]], [-1, 0, 0, 0])
    edges, draw = forest.edges, torch.Generator().manual_seed(0)
    x = torch.randn(1, forest.num_tokens, 12, dtype=torch.float64, generator=draw, requires_grad=True)
    head = torch.randn(12, 12, dtype=torch.float64, generator=draw)
    weight = torch.arange(1.0, 1 + len(edges), dtype=torch.float64)
    logits = x[0] @ head.T if from_hidden else x[0]
    expected = logits.log_softmax(-1)[edges.source, edges.token]
    got = edge_logprobs(x, forest, weight=head) if from_hidden else edge_logprobs(x, forest)
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
    found, true = (torch.autograd.grad((logp * weight).sum(), x, retain_graph=True)[0] for logp in (got, expected))
    torch.testing.assert_close(found, true, rtol=1e-12, atol=1e-12)
