"""Tree rollouts over a scripted policy: shapes of the trees, masks, old log-probabilities, seeds."""

from collections import Counter
from collections.abc import Callable, Sequence
from threading import Barrier, get_ident
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.rl.worlds import Recorder, World, logprob_of, replay, script
from treefx import InputError, losses, rl
from treefx.rl import Completion, Group, Outcome, PortoolTree, RandomExpansion, Rollouts, Scheme
from treefx.rl.rollouts.growth import GrowingTree

SCHEMES: list[Scheme] = [
    Group(1),
    Group(5),
    PortoolTree(6, forks=3),
    PortoolTree(4, forks=1),
    PortoolTree(6, forks=2, first_steps=1),
    RandomExpansion(2, nodes=2, rounds=2),
    RandomExpansion(3, nodes=1, rounds=1, from_prompt=False),
]


def sample(scheme: Scheme, seed: int = 0, tasks: Sequence[Any] = (0, 1), **options: Any) -> Rollouts:
    return rl.rollout(script, World(), tasks, scheme, seed=seed, **options)


def columns(rollouts: Rollouts) -> dict[str, Any]:
    return {name: value.tolist() for name, value in vars(rollouts).items() if isinstance(value, torch.Tensor)}


@given(st.sampled_from(SCHEMES), st.integers(0, 1000))
def test_every_row_is_a_play_of_the_world(scheme: Scheme, seed: int) -> None:
    rollouts = sample(scheme, seed, max_steps=4)
    steps, forest = rollouts.steps, rollouts.forest
    assert steps.span is not None
    for row, path in enumerate(steps.paths):
        tokens = forest.sequences()[row].tolist()
        task = int(rollouts.group[row])
        assert tokens[:3] == World().start(task)[1]
        reward, step_rewards, done = replay(tokens, 3, steps.span[path].tolist(), rollouts.sampled[row].tolist())
        assert reward == rollouts.rewards[row] and done == rollouts.finished[row]
        assert step_rewards == rollouts.step_rewards[path].tolist()
        assert done or len(path) == 4


@given(st.sampled_from(SCHEMES), st.integers(0, 1000))
def test_masks_and_old_logprobs(scheme: Scheme, seed: int) -> None:
    rollouts = sample(scheme, seed, max_steps=5)
    for tokens, sampled, observed, old in zip(
        rollouts.forest.sequences(), rollouts.sampled, rollouts.observed, rollouts.old_logprobs, strict=True
    ):
        row = tokens.tolist()
        # In this world the policy says digits, tools say 20 and more.
        assert sampled.tolist() == [token < 10 for token in row]
        assert observed.tolist() == [token >= 20 and at >= 3 for at, token in enumerate(row)]
        expected = [logprob_of(row[:at], token) if token < 10 else np.nan for at, token in enumerate(row)]
        assert np.array_equal(old.numpy(), expected, equal_nan=True)
    assert torch.equal(rollouts.forest.raw_weight, torch.cat(rollouts.sampled).to(torch.float64))
    assert int(rollouts.forest_once.raw_weight.sum()) == int(rollouts.step_sampled.sum())


def test_portool_keeps_n_minus_the_finished_and_forks_at_most_f() -> None:
    forks = Counter[int]()
    for seed in range(30):
        recorder = Recorder()
        rollouts = rl.rollout(recorder, World(), [0], PortoolTree(6, forks=2), seed=seed, max_steps=6)
        assert len(rollouts) == 6
        finished = 0
        for prefixes, seeds in recorder.calls:
            assert len(prefixes) == 6 - finished
            finished += sum(7 in completion.tokens for completion in script(prefixes, seeds))
        forks += Counter(Counter(rollouts.parent[rollouts.parent >= 0].tolist()).values())
        assert rollouts.info["sampled_tokens"] >= int(rollouts.step_sampled.sum())
    assert set(forks) == {1, 2}


def test_portools_draw_is_uniform_over_candidates() -> None:
    """Two of two steps' four candidates: a third of the draws takes both of one step."""
    outcome, completion = Outcome(None), Completion([1], [-1.0])
    both = 0
    for seed in range(900):
        tree = GrowingTree(None, [1], "a task")
        growth = PortoolTree(2, forks=2).grow(tree, np.random.default_rng(seed))
        for branch in next(growth):
            tree.add(branch, completion, outcome, 9, None)
        first, second = next(growth)
        both += first.parent == second.parent
    assert 0.28 < both / 900 < 0.39


def test_portool_widens_from_few_first_steps() -> None:
    recorder = Recorder()
    rollouts = rl.rollout(recorder, World(), [0], PortoolTree(8, forks=2, first_steps=2), seed=1, max_steps=5)
    assert len(rollouts) <= 8 and recorder.calls[0][0] == [[90, 91, 60]] * 2
    finished, live = 0, 0
    for wave, (prefixes, seeds) in enumerate(recorder.calls):
        assert len(prefixes) == (2 if wave == 0 else min(8 - finished, 2 * live))
        ended = sum(7 in completion.tokens for completion in script(prefixes, seeds))
        finished, live = finished + ended, len(prefixes) - ended


@pytest.mark.parametrize("from_prompt", [True, False])
def test_random_expansion_makes_trees_of_chains(from_prompt: bool) -> None:
    from_inside = 0
    for seed in range(20):
        rollouts = sample(RandomExpansion(3, nodes=2, rounds=2, from_prompt=from_prompt), seed, max_steps=5)
        assert Counter(rollouts.tree.tolist()) == {number: 5 for number in range(6)}
        assert rollouts.group.tolist() == [0] * 15 + [1] * 15
        roots = Counter(rollouts.tree[row].item() for row, path in enumerate(rollouts.steps.paths) if len(path) == 1)
        inner = Counter(rollouts.parent.tolist())
        from_inside += sum(count > 1 for step, count in inner.items() if step >= 0)
        if not from_prompt:
            # Only a chain of one step may fork at the prompt.
            first = {(int(rollouts.tree[row]), int(path[0])) for row, path in enumerate(rollouts.steps.paths)}
            assert all(count == 1 or tree in roots for tree, count in Counter(t for t, _ in first).items())
    assert from_inside > 20


def test_a_group_is_independent_trajectories_in_trees_of_their_own() -> None:
    rollouts = sample(Group(4), max_steps=3)
    assert rollouts.tree.tolist() == list(range(8)) and len(torch.unique(rollouts.leaf)) == 8
    assert int((rollouts.parent < 0).sum()) == 8
    # Then Tree-GRPO is GRPO.
    assert torch.equal(rl.tree_grpo(rollouts.steps, rollouts.rewards), rl.grpo(rollouts.steps, rollouts.rewards))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_seed_repeats_a_rollout_and_another_does_not(scheme: Scheme) -> None:
    assert columns(sample(scheme, 3)) == columns(sample(scheme, 3)) != columns(sample(scheme, 4))


def test_a_task_does_not_depend_on_those_after_it() -> None:
    alone, first = sample(PortoolTree(4), 5, tasks=[1]), sample(PortoolTree(4), 5, tasks=[1, 0, 0])
    rows = len(alone)
    assert torch.equal(first.rewards[:rows], alone.rewards)
    assert torch.equal(first.parent[: len(alone.parent)], alone.parent)


def test_equal_samples_of_a_fork_stay_two_steps_on_one_path() -> None:
    def stubborn(prefixes: Sequence[list[int]], seeds: Sequence[int]) -> list[Completion]:
        return [Completion([3, 7], [-0.5, -0.25]) for _ in prefixes]

    rollouts = rl.rollout(stubborn, World(), [0], Group(3))
    assert len(rollouts.steps) == 3 and rollouts.forest.num_tokens == 5
    assert all(not row.any() for row in rl.portool(rollouts.steps, rollouts.rewards))


def test_branches_get_one_state_and_seeds_of_their_own() -> None:
    states: list[Any] = []

    class Watching(World):
        def act(self, state: Any, tokens: list[int], seed: int) -> Outcome:
            states.append((id(state), seed))
            return super().act(state, tokens, seed)

    recorder = Recorder()
    rl.rollout(recorder, Watching(), [0], PortoolTree(4), max_steps=3)
    assert len({state for state, _ in states[:4]}) == 1
    seeds = [seed for _, seed in states] + [seed for _, given in recorder.calls for seed in given]
    assert len(set(seeds)) == len(seeds) and all(0 <= seed < 2**63 for seed in seeds)


def test_chance_in_the_world_repeats_with_the_seed() -> None:
    first, again = (rl.rollout(script, World(chance=True), [0], Group(4), seed=1, max_steps=4) for _ in range(2))
    assert columns(first) == columns(again)
    assert columns(first) != columns(rl.rollout(script, World(), [0], Group(4), seed=1, max_steps=4))


def test_limits_cut_trajectories_off() -> None:
    rollouts = sample(Group(8), max_steps=2)
    assert int(rollouts.steps.path_lengths.max()) == 2
    assert {False, True} == set(rollouts.finished.tolist())
    assert (rollouts.steps.path_lengths[~rollouts.finished] == 2).all()
    short = sample(Group(8), max_length=9)
    length, cut = short.forest.row_lengths, ~short.finished
    # Steps are of at most 5 tokens, and only the last one may pass the limit.
    assert cut.any() and (length[cut] >= 9).all() and int(length.max()) < 9 + 5


def test_a_rollout_goes_into_a_loss_as_it_is() -> None:
    rollouts = sample(PortoolTree(6), 2)
    advantages = rl.portool(rollouts.steps, rollouts.rewards, format_rewards=rollouts.step_rewards)
    forest = rollouts.forest
    logp = torch.full((len(forest.edges),), -1.0, requires_grad=True)
    loss = losses.policy(logp, forest, rollouts.old_logprobs, rollouts.steps.to_tokens(advantages))
    (grad,) = torch.autograd.grad(loss, logp)
    assert grad.isfinite().all() and grad.any()
    assert not grad[forest.edges.weight == 0].any()


def test_tools_run_in_threads_and_nothing_else_changes() -> None:
    barrier = Barrier(4, timeout=10)

    class Slow(World):
        def act(self, state: Any, tokens: list[int], seed: int) -> Outcome:
            barrier.wait()  # passes only when four calls run at a time
            return super().act(state, tokens, seed)

    together = rl.rollout(script, Slow(), [0], Group(4), max_steps=1, tool_threads=4)
    assert columns(together) == columns(rl.rollout(script, World(), [0], Group(4), max_steps=1))


def test_alone_tools_run_in_the_callers_thread() -> None:
    threads = set()

    class Bound(World):
        def act(self, state: Any, tokens: list[int], seed: int) -> Outcome:
            threads.add(get_ident())
            return super().act(state, tokens, seed)

    rl.rollout(script, Bound(), [0], Group(2))
    assert threads == {get_ident()}


def test_an_error_of_a_tool_is_the_callers() -> None:
    class Broken(World):
        def act(self, state: Any, tokens: list[int], seed: int) -> Outcome:
            raise RuntimeError("the tool is out of order")

    with pytest.raises(RuntimeError, match="out of order"):
        rl.rollout(script, Broken(), [0], Group(3), tool_threads=2)


def test_a_progress_bar_counts_waves(capsys: pytest.CaptureFixture[str]) -> None:
    quiet = sample(Group(2), max_steps=3)
    assert capsys.readouterr().out == ""
    assert columns(sample(Group(2), max_steps=3, progress=True)) == columns(quiet)
    assert "Sampling trees" in capsys.readouterr().out


def answers(**changes: Any) -> Any:
    class Odd(World):
        def act(self, state: Any, tokens: list[int], seed: int) -> Outcome:
            return Outcome(**{"state": None, "done": True, **changes})

    return Odd()


def says(*completions: Completion) -> Callable[..., list[Completion]]:
    return lambda prefixes, seeds: list(completions)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: sample(Group(1), tasks=[]), "expected a task"),
        (lambda: sample(Group(1), max_steps=0), "max_steps >= 1"),
        (lambda: sample(Group(1), -1), "seed >= 0"),
        (lambda: sample(Group(1), tool_threads=0), "tool_threads >= 1"),
        (lambda: Group(0), "trajectories must be at least 1, got 0"),
        (lambda: PortoolTree(2, forks=0), "forks must be at least 1"),
        (lambda: PortoolTree(2, first_steps=3), r"first_steps must be in \[1, trajectories = 2\], got 3"),
        (lambda: PortoolTree(2, first_steps=0), "first_steps must be in"),
        (lambda: RandomExpansion(1, nodes=0), "nodes must be at least 1"),
        (lambda: RandomExpansion(1, rounds=-1), "rounds must be at least 0"),
        (lambda: rl.rollout(says(), World(), [0], Group(1)), "one completion per prefix, 1, got 0"),
        (lambda: rl.rollout(says(Completion([], [])), World(), [0], Group(1)), "at least one token"),
        (lambda: rl.rollout(says(Completion([1], [])), World(), [0], Group(1)), "0 log-probabilities"),
        (lambda: rl.rollout(says(Completion([1], [0.5])), World(), [0], Group(1)), "at most 0"),
        (lambda: rl.rollout(says(Completion([1], [float("nan")])), World(), [0], Group(1)), "must be finite"),
        (lambda: rl.rollout(script, answers(reward=float("nan")), [0], Group(1)), "reward of step 0 of task 0"),
        (lambda: rl.rollout(script, answers(step_reward=float("inf")), [0], Group(1)), "step_reward of step 0"),
        (lambda: rl.rollout(script, answers(observation=["a"]), [0], Group(1)), "the observation of step 0 of task 0"),
        (lambda: rl.rollout(script, answers(observation=[-1]), [0], Group(1)), "integers of at least 0"),
        (lambda: GrowingTree(None, [], "task 3"), "the prompt of task 3 is empty"),
    ],
)
def test_what_is_unfit_is_named(call: Callable[[], Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        call()
