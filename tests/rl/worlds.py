"""A scripted policy and a small world, both determined by what they are given."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from treefx.rl import Completion, Outcome

STOP = 7


def logprob_of(before: Sequence[int], token: int) -> float:
    """The scripted policy's log-probability: a function of the whole prefix, as a model's."""
    return -0.1 - (sum(before) * 31 + len(before) * 17 + token * 7) % 1009 / 500


def script(prefixes: Sequence[list[int]], seeds: Sequence[int]) -> list[Completion]:
    """Between one and three tokens below 10, drawn by the seed alone."""
    completions = []
    for prefix, seed in zip(prefixes, seeds, strict=True):
        random = np.random.default_rng(seed)
        tokens = random.integers(0, 10, random.integers(1, 4)).tolist()
        logprobs = [logprob_of([*prefix, *tokens[:i]], token) for i, token in enumerate(tokens)]
        completions.append(Completion(tokens, logprobs))
    return completions


@dataclass
class Recorder:
    """The script, and what it was asked."""

    calls: list[tuple[list[list[int]], list[int]]] = field(default_factory=list)

    def __call__(self, prefixes: Sequence[list[int]], seeds: Sequence[int]) -> list[Completion]:
        self.calls.append(([list(prefix) for prefix in prefixes], list(seeds)))
        return script(prefixes, seeds)


@dataclass(frozen=True)
class World:
    """Answers with two tokens, ends at a STOP token; the state is everything that was said, as a tuple."""

    chance: bool = False

    def start(self, task: int) -> tuple[tuple[int, ...], list[int]]:
        prompt = [90, 91, 60 + task]
        return tuple(prompt), prompt

    def act(self, state: tuple[int, ...], tokens: list[int], seed: int) -> Outcome:
        done = STOP in tokens
        luck = seed % 10 if self.chance else 0
        observation = [] if done else [50, 20 + (sum(tokens) + luck) % 10]
        reward = (1.0 if sum(tokens) % 2 else -1.0) if done else 0.0
        return Outcome((*state, *tokens, *observation), observation, done, reward, step_reward=len(tokens) / 10)


def replay(row: Sequence[int], prompt_length: int, spans: Any, sampled: Any) -> tuple[float, list[float], bool]:
    """Reward, step rewards and whether it is done, of a row played again in a `World`."""
    state, outcome, step_rewards = tuple(row[:prompt_length]), Outcome(None), []
    for start, stop in spans:
        tokens = [token for token, own in zip(row[start:stop], sampled[start:stop], strict=True) if own]
        assert state == tuple(row[:start])
        outcome = World().act(state, tokens, 0)
        assert [*tokens, *outcome.observation] == list(row[start:stop])
        state = outcome.state
        step_rewards.append(outcome.step_reward)
    return outcome.reward, step_rewards, outcome.done
