"""Advantages per trajectory, against their definitions worked by hand and written out."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.rl.trees import Path, relative, rewarded_paths
from treefx import Forest, InputError
from treefx.rl import StepTree, grpo, reinforce_plus_plus, reinforce_plus_plus_tokens, rloo, tree_grpo

Drawn = tuple[list[Path], list[int], list[float]]


def flat(rewards: list[float], groups: list[int] | None = None, trees: list[int] | None = None) -> StepTree:
    """Trajectories of one step each."""
    return StepTree.from_paths([[k] for k in range(len(rewards))], groups, trees)


def near(got: torch.Tensor, expected: Any) -> bool:
    return got.dtype == torch.float64 and got.tolist() == pytest.approx(expected, rel=1e-10, abs=1e-12)


def test_grpo_by_hand() -> None:
    rewards = [1.0, 0.0, 0.0, 3.0, 7.0]
    tree = flat(rewards, groups=[5, 5, 5, 2, 2])
    # First prompt: mean 1/3, squared deviations 4/9 + 1/9 + 1/9 = 2/3, over 2: std 1/sqrt(3).
    third, root = 1 / 3, 3**0.5
    sample = [2 * third * root, -third * root, -third * root, -(0.5**0.5), 0.5**0.5]
    assert near(grpo(tree, rewards), sample)
    assert near(grpo(tree, rewards, scale="population_std"), [2**0.5, -(0.5**0.5), -(0.5**0.5), -1, 1])
    assert near(grpo(tree, rewards, scale="none"), [2 / 3, -1 / 3, -1 / 3, -2, 2])
    assert near(grpo(tree, rewards, epsilon=1 / root)[:3], [third * root, -third * root / 2, -third * root / 2])


def test_rloo_by_hand() -> None:
    assert near(rloo(flat([1.0, 0.0, 5.0, 9.0], [0, 0, 0, 1]), [1.0, 0.0, 5.0, 9.0]), [-1.5, -3.0, 4.5, 0.0])


def test_reinforce_plus_plus_by_hand() -> None:
    rewards = [1.0, 3.0, 10.0, 20.0]
    tree = flat(rewards, groups=[0, 0, 1, 1])
    deviation = [-7.5, -5.5, 1.5, 11.5]
    std = (sum(d * d for d in deviation) / 3) ** 0.5
    assert near(reinforce_plus_plus(tree, rewards), [d / std for d in deviation])
    std = ((1 + 1 + 25 + 25) / 3) ** 0.5
    assert near(reinforce_plus_plus(tree, rewards, baseline="group"), [-1 / std, 1 / std, -5 / std, 5 / std])


def test_statistics_over_tokens_are_those_of_repeated_rewards() -> None:
    rewards, tokens = [1.0, 0.0, 4.0], [3, 1, 2]
    repeated = [reward for reward, count in zip(rewards, tokens, strict=True) for _ in range(count)]
    expected = [reinforce_plus_plus(flat(repeated), repeated)[i].item() for i in (0, 3, 4)]
    assert near(reinforce_plus_plus(flat(rewards), rewards, tokens=tokens), expected)
    assert not near(reinforce_plus_plus(flat(rewards), rewards), expected)


def test_a_kl_penalty_counts_from_its_token_to_the_end() -> None:
    mask = [torch.tensor([0, 1, 0, 1]), torch.tensor([0, 1])]
    kl = [torch.tensor([torch.nan, 0.5, torch.nan, 2.0]), torch.tensor([torch.nan, 1.0])]
    got = reinforce_plus_plus_tokens(flat([1.0, 3.0]), [1.0, 3.0], mask, kl, beta=0.1)
    returns = [1.0 - 0.1 * 2.5, 1.0 - 0.1 * 2.0, 3.0 - 0.1 * 1.0]
    expected = [relative(value, returns) for value in returns]
    assert near(got[0], [0, expected[0], 0, expected[1]]) and near(got[1], [0, expected[2]])


def test_a_kl_of_zero_gives_the_advantages_of_rows() -> None:
    rewards = [1.0, 3.0, 2.0]
    mask = [torch.ones(count, dtype=torch.bool) for count in (2, 5, 1)]
    kl = [torch.zeros(len(row)) for row in mask]
    got = reinforce_plus_plus_tokens(flat(rewards), rewards, mask, kl)
    expected = reinforce_plus_plus(flat(rewards), rewards, tokens=[2, 5, 1])
    assert all(near(row, [value.item()] * len(row)) for row, value in zip(got, expected, strict=True))


def test_tree_grpo_by_hand() -> None:
    rewards = [1.0, 0.0, 0.0, 0.0, 1.0]
    tree = flat(rewards, groups=[0, 0, 0, 0, 1], trees=[0, 0, 1, 1, 2])
    intra, inter = [0.5**0.5, -(0.5**0.5), 0.0, 0.0, 0.0], [1.5, -0.5, -0.5, -0.5, 0.0]
    assert near(tree_grpo(tree, rewards), [a + b for a, b in zip(intra, inter, strict=True)])
    assert near(tree_grpo(tree, rewards, w_intra=2.0, w_inter=0.0), [2 * a for a in intra])
    assert near(tree_grpo(flat(rewards, trees=[0, 1, 2, 3, 4]), rewards), grpo(flat(rewards), rewards).tolist())


ALL: dict[str, Callable[[StepTree, Any], torch.Tensor]] = {
    "grpo": grpo,
    "grpo without std": lambda tree, rewards: grpo(tree, rewards, scale="none"),
    "rloo": rloo,
    "reinforce++": reinforce_plus_plus,
    "reinforce++ with baseline": lambda tree, rewards: reinforce_plus_plus(tree, rewards, baseline="group"),
    "tree_grpo": tree_grpo,
}


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("rewards", [[0.1], [0.1] * 3, [0.1 + 0.2, 0.3], [0.0, 0.0], [-1e-30] * 7, [1e30] * 3])
def test_nobody_to_compare_with_or_equal_rewards_give_zero(name: str, rewards: list[float]) -> None:
    assert ALL[name](flat(rewards), rewards).tolist() == [0.0] * len(rewards)


@given(rewarded_paths())
def test_definitions_on_random_groups(drawn: Drawn) -> None:
    paths, groups, rewards = drawn
    tree = StepTree.from_paths(paths, groups)
    rows = range(len(paths))
    of_group = [[rewards[i] for i in rows if groups[i] == groups[k]] for k in rows]
    for scale in ("sample_std", "population_std", "none"):
        expected = [relative(rewards[k], of_group[k], scale) for k in rows]
        assert near(grpo(tree, rewards, scale=scale), expected)
        assert near(tree_grpo(tree, rewards, scale=scale), [2 * value for value in expected])
    others = [[rewards[i] for i in rows if groups[i] == groups[k] and i != k] for k in rows]
    loo = [rewards[k] - sum(of) / len(of) if of else 0.0 for k, of in zip(rows, others, strict=True)]
    assert near(rloo(tree, rewards), loo)
    assert near(reinforce_plus_plus(tree, rewards), [relative(value, rewards) for value in rewards])


@pytest.mark.parametrize("name", ALL)
@given(drawn=rewarded_paths(), data=st.data())
def test_a_new_order_of_trajectories_reorders_advantages(name: str, drawn: Drawn, data: st.DataObject) -> None:
    paths, groups, rewards = drawn
    order = data.draw(st.permutations(range(len(paths))))
    straight = ALL[name](StepTree.from_paths(paths, groups), rewards)
    tree = StepTree.from_paths([paths[i] for i in order], [groups[i] for i in order])
    assert near(ALL[name](tree, [rewards[i] for i in order]), straight[list(order)].tolist())


@given(rewarded_paths())
def test_other_prompts_change_nothing_but_batch_statistics(drawn: Drawn) -> None:
    paths, groups, rewards = drawn
    more = StepTree.from_paths([*paths, ["a"], ["b"]], [*groups, 7, 7])
    for name in ("grpo", "rloo", "tree_grpo"):
        alone = ALL[name](StepTree.from_paths(paths, groups), rewards)
        assert near(ALL[name](more, [*rewards, 5.0, -5.0])[:-2], alone.tolist())


def test_a_forest_of_one_tree_is_one_prompt_and_of_several_is_not_guessed() -> None:
    one = Forest.from_sequences([[1, 2, 3], [1, 2, 4], [1, 5]])
    assert near(grpo(one, [1.0, 0.0, 0.0]), grpo(flat([0.0] * 3), [1.0, 0.0, 0.0]).tolist())
    two = Forest.from_sequences([[1, 2], [3, 4]])
    with pytest.raises(InputError, match="2 trees: say which rows answer the same prompt"):
        grpo(two, [1.0, 0.0])
    assert near(grpo(StepTree.from_forest(two, groups=[0, 1]), [1.0, 0.0]), [0.0, 0.0])


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda t: grpo(t, [1.0]), r"one number per trajectory, \[2\], got \[1\]"),
        (lambda t: grpo(t, [1.0, float("nan")]), "finite, got nan for trajectory 1"),
        (lambda t: grpo(t, ["a", "b"]), "must be numbers"),
        (lambda t: grpo(t, [1.0, 2.0], scale="std"), "scale must be"),
        (lambda t: grpo(t, [1.0, 2.0], epsilon=-1.0), "epsilon must be"),
        (lambda t: grpo([[1]], [1.0]), "StepTree or a Forest, got list"),
        (lambda t: reinforce_plus_plus(t, [1.0, 2.0], baseline="mean"), "baseline must be"),
        (lambda t: reinforce_plus_plus(t, [1.0, 2.0], tokens=[1, -1]), "tokens must be at least 0"),
        (
            lambda t: reinforce_plus_plus_tokens(t, [1.0, 2.0], [torch.ones(2)] * 2, [torch.ones(3)] * 2),
            "same length per trajectory",
        ),
        (
            lambda t: reinforce_plus_plus_tokens(t, [1.0, 2.0], [torch.ones(1)] * 2, [torch.tensor([torch.inf])] * 2),
            "kl must be finite",
        ),
    ],
)
def test_unfit_arguments_are_refused(call: Callable[[Any], Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        call(flat([1.0, 2.0]))
