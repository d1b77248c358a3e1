"""The tree of steps: from names, from forests, and refusals."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given

from tests.rl.trees import Path, rewarded_paths
from tests.strategies import Rows, row_batches
from treefx import Forest, InputError
from treefx.rl import StepTree


@given(rewarded_paths())
def test_steps_are_shared_as_far_as_names_agree(drawn: tuple[list[Path], list[int], list[float]]) -> None:
    paths, groups, _ = drawn
    tree = StepTree.from_paths(paths, groups)
    name = {
        step: (group, path[: t + 1])
        for path, group, steps in zip(paths, groups, tree.paths, strict=True)
        for t, step in enumerate(steps.tolist())
    }
    assert len(tree) == len(name) == len(set(name.values()))
    for step, (group, prefix) in name.items():
        above = int(tree.parent[step])
        assert (name[above] if above >= 0 else (group, ())) == (group, prefix[:-1])
        assert int(tree.position[step]) == len(prefix)
    for a, (group, prefix) in name.items():
        for b, (other, more) in name.items():
            siblings = (group, prefix[:-1]) == (other, more[:-1])
            assert bool(tree.fork[a] == tree.fork[b]) == siblings


@given(row_batches())
def test_nodes_of_a_forest_are_steps(rows: Rows) -> None:
    forest = Forest.from_sequences([[99, *row] for row in rows])
    tree = StepTree.from_forest(forest)
    assert len(tree) == len(forest.nodes) and tree.span is not None
    covered = tree.to_tokens([path.to(torch.float64) + 1 for path in tree.paths])
    for path, tokens, values in zip(tree.paths, forest.token_of, covered, strict=True):
        lengths = (tree.span[path, 1] - tree.span[path, 0]).tolist()
        assert sum(lengths) == len(tokens) == len(values)
        assert torch.equal(values, torch.repeat_interleave(path + 1, torch.tensor(lengths)).to(torch.float64))


def test_steps_of_ones_own_leave_the_prompt_out() -> None:
    forest = Forest.from_sequences([[9, 9, 1, 2, 3], [9, 9, 1, 2, 4, 5], [9, 9, 1, 2]])
    tree = StepTree.from_forest(forest, spans=[[(2, 4), (4, 5)], [(2, 4), (4, 6)], [(2, 4)]])
    assert [path.tolist() for path in tree.paths] == [[0, 1], [0, 2], [0]]
    values = [torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0]), torch.tensor([5.0])]
    assert [row.tolist() for row in tree.to_tokens(values)] == [[0, 0, 1, 1, 2], [0, 0, 3, 3, 4, 4], [0, 0, 5, 5]]


def test_equal_samples_of_one_fork_may_be_two_steps() -> None:
    tree = StepTree(torch.tensor([-1, -1]), torch.tensor([0, 1]), torch.tensor([0, 0]), torch.tensor([0, 0]))
    assert len(tree) == 2 and tree.fork[0] == tree.fork[1]


FOREST = Forest.from_sequences([[1, 2, 3], [1, 2]])
ZERO = torch.tensor([0])


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: StepTree.from_paths([]), "needs a step and a trajectory, got 0 and 0"),
        (lambda: StepTree.from_paths([["a"], []]), "trajectory 1 has no steps"),
        (lambda: StepTree.from_paths([["a"]], groups=[0, 1]), r"groups must be one integer per trajectory, \[1\]"),
        (lambda: StepTree.from_paths([["a"]], trees=[0.5]), "trees must be one integer"),
        (lambda: StepTree.from_paths([["a"], ["a"]], groups=[0, 1], trees=[0, 0]), "tree 0 has trajectories of sev"),
        (lambda: StepTree(torch.tensor([1, -1]), ZERO, ZERO, ZERO), "parent must be -1 or a step of a smaller"),
        (lambda: StepTree(torch.tensor([-1]), torch.tensor([1]), ZERO, ZERO), r"leaf must be steps in \[0, 1\)"),
        (lambda: StepTree(torch.tensor([-1, -1]), ZERO, ZERO, ZERO), "none goes through step 1"),
        (lambda: StepTree(torch.tensor([-1]), ZERO, torch.tensor([0, 1]), ZERO), "one number per trajectory"),
        (
            lambda: StepTree(torch.tensor([-1]), torch.tensor([0, 0]), torch.tensor([0, 1]), torch.tensor([0, 1])),
            "step 0 has trajectories of several groups",
        ),
        (lambda: StepTree.from_forest(FOREST, spans=[[(0, 3)]]), "one entry per row, 2, got 1"),
        (lambda: StepTree.from_forest(FOREST, spans=[[(0, 3)], [(0, 3)]]), "spans of row 1 .* within its 2 tokens"),
        (lambda: StepTree.from_forest(FOREST, spans=[[(2, 2)], [(0, 2)]]), "start < stop"),
        (lambda: StepTree.from_forest(FOREST, spans=[[], [(0, 2)]]), "spans of row 0"),
        (lambda: StepTree.from_paths([["a"]]).to_tokens([torch.zeros(1)]), "knows no tokens"),
        (lambda: StepTree.from_forest(FOREST).to_tokens([torch.zeros(1)] * 2), "one number per step"),
    ],
)
def test_unfit_trees_are_refused(call: Callable[[], Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        call()
