"""PORTool's rewards and advantages of steps: by hand, by their definitions, and through a loss."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.rl.trees import Path, rewarded_paths, slow_portool
from treefx import Forest, InputError, losses
from treefx.rl import StepTree, fork_relative, grpo, portool, step_rewards

Drawn = tuple[list[Path], list[int], list[float]]

#        look(0) -- calc(1) -- answer(2)     R =  1
#          |          \------- guess(3)      R = -1
#          \------- give up(4)               R =  0
#        guess(5)                            R = -1
PATHS = [["look", "calc", "answer"], ["look", "calc", "guess"], ["look", "give up"], ["guess"]]
REWARDS = [1.0, -1.0, 0.0, -1.0]


def near(got: Any, expected: Any) -> bool:
    pairs = list(zip(got, expected, strict=True))
    return all(a.tolist() == pytest.approx([float(x) for x in b], rel=1e-10, abs=1e-12) for a, b in pairs)


def test_rewards_of_steps_by_hand() -> None:
    tree = StepTree.from_paths(PATHS)
    best = step_rewards(tree, REWARDS, gamma=0.5)
    assert best.tolist() == [0.25, 0.5, 1.0, -1.0, 0.0, -1.0]
    mean = step_rewards(tree, REWARDS, gamma=0.5, aggregate="mean")
    assert mean.tolist() == pytest.approx([0.0, 0.0, 1.0, -1.0, 0.0, -1.0])
    worst = step_rewards(tree, REWARDS, gamma=0.5, aggregate="min")
    assert worst.tolist() == [-0.25, -0.5, 1.0, -1.0, 0.0, -1.0]
    later = step_rewards(tree, REWARDS, gamma=0.5, exponent="steps_from")
    assert later.tolist() == [0.125, 0.25, 0.5, -0.5, 0.0, -0.5]
    formatted = step_rewards(tree, REWARDS, gamma=0.5, format_rewards=[0.1, 0, 0, 0, -0.1, 0])
    assert formatted.tolist() == pytest.approx([0.35, 0.5, 1.0, -1.0, -0.1, -1.0])
    assert step_rewards(tree, REWARDS, gamma=0.0).tolist() == [0.0, 0.0, 1.0, -1.0, 0.0, -1.0]


def test_advantages_by_hand() -> None:
    tree = StepTree.from_paths(PATHS)
    got = portool(tree, REWARDS, gamma=0.5, w_traj=1.0, w_fork=2.0, scale="none")
    # Forks: (look 0.25, guess -1), (calc 0.5, give up 0), (answer 1, guess -1); trajectories: mean -0.25.
    look, calc, answer = 0.625, 0.25, 1.0
    assert near(
        got,
        [
            [1.25 + 2 * look, 1.25 + 2 * calc, 1.25 + 2 * answer],
            [-0.75 + 2 * look, -0.75 + 2 * calc, -0.75 - 2 * answer],
            [0.25 + 2 * look, 0.25 - 2 * calc],
            [-0.75 - 2 * look],
        ],
    )
    normalised = fork_relative(tree, step_rewards(tree, REWARDS, gamma=0.5))
    half = 0.5**0.5
    assert normalised.tolist() == pytest.approx([half, half, half, -half, -half, -half])


@given(
    rewarded_paths(),
    st.sampled_from([0.0, 0.5, 0.95, 1.0]),
    st.sampled_from([("max", max), ("min", min), ("mean", lambda x: sum(x) / len(x))]),
    st.sampled_from(["sample_std", "population_std", "none"]),
    st.sampled_from([(1.0, 1.0), (0.0, 1.0), (0.3, 2.0)]),
    st.sampled_from([("steps_after", 0), ("steps_from", 1)]),
)
def test_definitions_on_random_trees(
    drawn: Drawn, gamma: float, aggregate: Any, scale: Any, weights: tuple[float, float], exponent: Any
) -> None:
    paths, groups, rewards = drawn
    blend = {"gamma": gamma, "w_traj": weights[0], "w_fork": weights[1], "scale": scale}
    tree = StepTree.from_paths(paths, groups)
    got = portool(tree, rewards, aggregate=aggregate[0], exponent=exponent[0], **blend)
    assert near(got, slow_portool(paths, groups, rewards, aggregate=aggregate[1], last=exponent[1], **blend))


@given(rewarded_paths(), st.data())
def test_a_new_order_of_siblings_changes_nothing_else(drawn: Drawn, data: st.DataObject) -> None:
    paths, groups, rewards = drawn
    order = data.draw(st.permutations(range(len(paths))))
    straight = portool(StepTree.from_paths(paths, groups), rewards)
    tree = StepTree.from_paths([paths[i] for i in order], [groups[i] for i in order])
    assert near(portool(tree, [rewards[i] for i in order]), [straight[i] for i in order])


@given(rewarded_paths(), st.data())
def test_a_trajectory_twice_changes_means_over_trajectories_only(drawn: Drawn, data: st.DataObject) -> None:
    paths, groups, rewards = drawn
    twice = data.draw(st.integers(0, len(paths) - 1))
    before = StepTree.from_paths(paths, groups)
    after = StepTree.from_paths([*paths, paths[twice]], [*groups, groups[twice]])
    more = [*rewards, rewards[twice]]
    assert torch.equal(after.parent, before.parent)
    # The best of a step and a comparison among siblings know no counts ...
    forks = [portool(tree, given, w_traj=0.0) for tree, given in ((before, rewards), (after, more))]
    assert near(forks[1][:-1], forks[0])
    # ... and what the trajectory does to the rest is to stand in it twice.
    changed = portool(after, more, w_fork=0.0)
    assert near(changed, [[value] * len(path) for value, path in zip(grpo(after, more), after.paths, strict=True)])


def test_a_trajectory_twice_moves_the_mean_of_a_step() -> None:
    paths, rewards = [["a", "b"], ["a", "c"]], [1.0, 0.0]
    once = step_rewards(StepTree.from_paths(paths), rewards, gamma=1.0, aggregate="mean")
    twice = step_rewards(StepTree.from_paths([*paths, paths[0]]), [*rewards, 1.0], gamma=1.0, aggregate="mean")
    assert once.tolist() == [0.5, 1.0, 0.0] and twice.tolist() == pytest.approx([2 / 3, 1.0, 0.0])


@pytest.mark.parametrize("aggregate", ["max", "mean", "min"])
@pytest.mark.parametrize(
    "paths",
    [[["a"]], [["a", "b", "c"]], [["a"], ["b"], ["c"]], [["a", "b"], ["a", "c"]], [["a"], ["a"]], [["a"], ["a", "b"]]],
)
def test_only_children_and_equal_rewards_give_zero(paths: list[list[str]], aggregate: Any) -> None:
    rewards = [0.1] * len(paths)
    tree = StepTree.from_paths(paths)
    assert all(row.tolist() == [0.0] * len(row) for row in portool(tree, rewards, aggregate=aggregate))


def test_rewards_equal_but_for_rounding_are_no_fork() -> None:
    tree = StepTree.from_paths([["a"], ["b"], ["b"], ["b"]])
    values = step_rewards(tree, [0.1] * 4, aggregate="mean")
    assert fork_relative(tree, values).tolist() == [0.0, 0.0]


def test_a_forest_gives_advantages_per_token() -> None:
    forest = Forest.from_sequences([[9, 1, 2, 3], [9, 1, 2, 4, 4], [9, 5]])
    got = portool(forest, [1.0, 0.0, -1.0], gamma=0.5, scale="none", w_traj=0.0)
    # Nodes: [9], [1, 2], [3], [4, 4], [5] with rewards 0.25 (not needed), 0.5, 1, 0, -1.
    assert near(got, [[0, 0.75, 0.75, 0.5], [0, 0.75, 0.75, -0.5, -0.5], [0, -0.75]])


def test_the_loss_on_edges_is_that_of_rows() -> None:
    """Unequal advantages on shared steps: the sum of what each row does alone."""
    rows = [[9, 1, 2, 3], [9, 1, 2, 4, 4], [9, 5], [9, 1, 6]]
    rewards, forest = [1.0, 0.0, -1.0, -1.0], Forest.from_sequences(rows)
    advantages = portool(forest, rewards)
    logp = torch.linspace(-2, -0.1, len(forest.edges), dtype=torch.float64)
    old = logp + 0.5 * torch.sin(torch.arange(len(logp), dtype=torch.float64) * 7)
    packed = losses.policy(logp, forest, old, advantages, reduction="sum")
    edge_of = {target: edge for edge, target in enumerate(forest.edges.target.tolist())}
    total = 0.0
    for path, advantage in zip(forest.token_of, advantages, strict=True):
        for token, a in zip(path.tolist()[1:], advantage.tolist()[1:], strict=True):
            ratio = float((logp - old)[edge_of[token]].exp())
            total -= min(ratio * a, min(max(ratio, 0.8), 1.2) * a)
    assert float(packed) == pytest.approx(total, rel=1e-10)
    assert len({float(a[1]) for a in advantages[:2]}) == 2


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda t: portool(t, [1.0]), r"rewards must be one number per trajectory, \[4\]"),
        (lambda t: portool(t, REWARDS, format_rewards=[0.0]), r"format_rewards must be one number per step, \[6\]"),
        (lambda t: portool(t, REWARDS, gamma=1.5), r"gamma must be in \[0, 1\], got 1.5"),
        (lambda t: portool(t, REWARDS, aggregate="sum"), "aggregate must be"),
        (lambda t: portool(t, REWARDS, exponent="t"), "exponent must be"),
        (lambda t: fork_relative(t, [1.0]), "values must be one number per step"),
    ],
)
def test_unfit_arguments_are_refused(call: Callable[[StepTree], Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        call(StepTree.from_paths(PATHS))
