"""Sampling trees of steps: the loop between a policy and its environment."""

import math
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from treefx.arguments import check_whole, is_whole
from treefx.errors import InputError
from treefx.extras import needs
from treefx.rl.rollouts.growth import Branch, GrowingTree
from treefx.rl.rollouts.protocol import Completion, Environment, Generate
from treefx.rl.rollouts.records import Rollouts
from treefx.rl.rollouts.schemes import Scheme

__all__ = ["rollout"]

Wave = list[tuple[int, int, Branch]]
"""Branches to sample together: task, number of the step to be in its tree, and where it hangs."""


def rollout(
    generate: Generate,
    environment: Environment,
    tasks: Sequence[Any],
    scheme: Scheme,
    *,
    seed: int = 0,
    max_steps: int = 16,
    max_length: int | None = None,
    tool_threads: int = 1,
    progress: bool = False,
) -> Rollouts:
    """Sample a tree of steps for every task.

    Branches of all tasks are sampled together, one call of `generate` per wave. Every step has a separate seed, which
    depends on `seed`, on the task's place in `tasks` and on the step's place in its tree; so a rollout can be repeated
    as far as `generate` and the environment keep to their seeds.

    Args:
        generate: samples completions after prefixes; see `Generate`. `TransformersSampler` keeps the K/V of prefixes.
        environment: see `Environment`.
        tasks: arguments of `environment.start`, at least one. Kept in `Rollouts.info`, so saving needs them to be JSON.
        scheme: `Group`, `PortoolTree`, `RandomExpansion`, or your own scheme.
        seed: at least 0.
        max_steps: steps of a trajectory at which it is cut off; the last answer of the environment has its reward.
        max_length: tokens of a row at which its trajectory is cut off likewise, at the end of a step.
        tool_threads: calls of `environment.act` at a time, in threads; the environment has to allow more than one.
        progress: show a progress bar, which counts waves.

    Returns:
        The trajectories, rewards, old log-probabilities and masks; train on `Rollouts.forest`.

    Raises:
        InputError: an argument is out of range, or `generate` or the environment returned an unfit value.

    Example:
        >>> rollouts = rollout(sampler, environment, tasks, PortoolTree(trajectories=8, forks=2), seed=step)
        >>> advantages = portool(rollouts.steps, rollouts.rewards, format_rewards=rollouts.step_rewards)
        >>> loss = treefx.losses.policy(
        ...     logp, rollouts.forest, rollouts.old_logprobs, rollouts.steps.to_tokens(advantages)
        ... )
    """
    if not len(tasks) or not (is_whole(max_steps, 1) and is_whole(tool_threads, 1) and is_whole(seed)):
        raise InputError(
            "expected a task, max_steps >= 1, tool_threads >= 1 and seed >= 0, "
            f"got {len(tasks)} tasks, {max_steps!r}, {tool_threads!r} and {seed!r}"
        )
    if max_length is not None:
        check_whole(max_length, "max_length", least=1, or_none="no limit")
    trees = [GrowingTree(*environment.start(task), f"task {number}") for number, task in enumerate(tasks)]
    growths = [
        scheme.grow(tree, np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(number,))))
        for number, tree in enumerate(trees)
    ]
    sampled = 0
    with ThreadPoolExecutor(tool_threads) as pool:
        run = map if tool_threads == 1 else pool.map  # alone, a tool may rely on its caller's thread
        for wave in _tracked(_waves(trees, growths), progress):
            seeds = [_seeds(seed, task, number) for task, number, _ in wave]
            prefixes = [trees[task].prefix(branch.parent) for task, _, branch in wave]
            completions = _check(generate(prefixes, [own for own, _ in seeds]), len(wave))
            states = [trees[task].state_of(branch.parent) for task, _, branch in wave]
            tokens = [list(completion.tokens) for completion in completions]
            outcomes = run(environment.act, states, tokens, [tool_seed for _, tool_seed in seeds])
            for (task, _, branch), completion, outcome in zip(wave, completions, outcomes, strict=True):
                trees[task].add(branch, completion, outcome, max_steps, max_length)
            sampled += sum(map(len, tokens))
    return Rollouts.from_trees(trees, {"seed": seed, "sampled_tokens": sampled, "tasks": list(tasks)})


def _tracked(waves: Iterator[Wave], progress: bool) -> Iterable[Wave]:
    if not progress:
        return waves
    with needs("cli", "a progress bar"):
        from rich.progress import track

    return track(waves, "Sampling trees")


def _waves(trees: Sequence[GrowingTree], growths: Sequence[Iterator[Sequence[Branch]]]) -> Iterator[Wave]:
    """Wave after wave; the steps of one must be in the trees before the next is asked for."""
    while wave := _next_wave(trees, growths):
        yield wave


def _next_wave(trees: Sequence[GrowingTree], growths: Sequence[Iterator[Sequence[Branch]]]) -> Wave:
    wave = []
    for task, (tree, growth) in enumerate(zip(trees, growths, strict=True)):
        branches = next(growth, ())
        tree.begin_wave()
        wave += [(task, len(tree.steps) + i, branch) for i, branch in enumerate(branches)]
    return wave


def _seeds(seed: int, task: int, number: int) -> tuple[int, int]:
    """A step's seeds for the policy and for the environment, in [0, 2^63)."""
    state = np.random.SeedSequence(seed, spawn_key=(task, number)).generate_state(2, np.uint64)
    return int(state[0] >> np.uint64(1)), int(state[1] >> np.uint64(1))


def _check(completions: Sequence[Completion], count: int) -> list[Completion]:
    """Convert to plain integers and floats, or raise an error that names the unfit value."""
    if len(completions) != count:
        raise InputError(f"generate must return one completion per prefix, {count}, got {len(completions)}")
    read = []
    for number, completion in enumerate(completions):
        tokens = [int(token) for token in completion.tokens]
        logprobs = [float(value) for value in completion.logprobs]
        if not tokens or len(tokens) != len(logprobs) or min(tokens) < 0:
            raise InputError(
                f"completion {number} must have at least one token id >= 0 and as many log-probabilities, "
                f"got tokens {tokens!r:.60} and {len(logprobs)} log-probabilities"
            )
        if not all(math.isfinite(value) and value <= 1e-6 for value in logprobs):
            raise InputError(
                f"log-probabilities of completion {number} must be finite and at most 0, got {logprobs!r:.60}"
            )
        read.append(Completion(tokens, logprobs))
    return read
