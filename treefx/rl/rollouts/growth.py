"""The tree of one task while it grows."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from treefx.errors import InputError
from treefx.rl.rollouts.protocol import Completion, Outcome

__all__ = ["PROMPT", "Branch", "GrowingTree", "Step"]

PROMPT = -1
"""The parent of first steps."""


@dataclass(frozen=True, slots=True)
class Branch:
    """Name a step to sample: its parent step (or `PROMPT`) and its tree of the task."""

    parent: int
    tree: int


@dataclass(frozen=True, slots=True)
class Step:
    """Hold a sampled step and the environment's answer.

    Attributes:
        branch: where it hangs.
        completion: the sampled tokens.
        outcome: the environment's answer.
        position: number of the step on its trajectories, from 1.
        length: tokens of the row up to the step's end, the observation's included.
        cut: a limit ends the trajectory here, not the environment.
    """

    branch: Branch
    completion: Completion
    outcome: Outcome
    position: int
    length: int
    cut: bool

    @property
    def ended(self) -> bool:
        """Whether a trajectory ends here."""
        return self.outcome.done or self.cut


class GrowingTree:
    """Hold the sampled steps of one task; schemes read it to choose the next branches.

    Args:
        state: of the environment, before the first step.
        prompt: token ids.
        name: of the task, for messages.
    """

    def __init__(self, state: Any, prompt: Sequence[int], name: str) -> None:
        self.state, self.name = state, name
        self.prompt = _read_tokens(prompt, f"the prompt of {name}")
        if not self.prompt:
            raise InputError(f"the prompt of {name} is empty: the first token cannot be predicted; begin with one")
        self.steps: list[Step] = []
        self._wave_start = 0

    def live(self) -> list[int]:
        """Steps of the last wave that no trajectory ends with, in the order they were sampled."""
        return [i for i in range(self._wave_start, len(self.steps)) if not self.steps[i].ended]

    def ended(self) -> list[int]:
        """Last steps of all trajectories that have ended."""
        return [i for i, step in enumerate(self.steps) if step.ended]

    def prefix(self, parent: int) -> list[int]:
        """Token ids before a step that follows `parent`."""
        pieces: list[list[int]] = []
        while parent != PROMPT:
            step = self.steps[parent]
            pieces += [list(step.outcome.observation), list(step.completion.tokens)]
            parent = step.branch.parent
        return [token for piece in [self.prompt, *reversed(pieces)] for token in piece]

    def state_of(self, parent: int) -> Any:
        """The environment's state after a step, or after the prompt."""
        return self.state if parent == PROMPT else self.steps[parent].outcome.state

    def begin_wave(self) -> None:
        """From now on, `live` means the steps that are added next."""
        self._wave_start = len(self.steps)

    def add(
        self, branch: Branch, completion: Completion, outcome: Outcome, max_steps: int, max_length: int | None
    ) -> None:
        """Add a step, the last one of its trajectory where a limit is reached.

        Raises:
            InputError: the environment's answer is unfit.
        """
        where = f"step {len(self.steps)} of {self.name}"
        observation = _read_tokens(outcome.observation, f"the observation of {where}")
        for name, value in (("reward", outcome.reward), ("step_reward", outcome.step_reward)):
            if not math.isfinite(value):
                raise InputError(f"{name} of {where} must be finite, got {value}")
        above = None if branch.parent == PROMPT else self.steps[branch.parent]
        position = 1 if above is None else above.position + 1
        length = len(self.prompt) if above is None else above.length
        length += len(completion.tokens) + len(observation)
        full = position >= max_steps or (max_length is not None and length >= max_length)
        self.steps.append(Step(branch, completion, outcome, position, length, full and not outcome.done))


def _read_tokens(tokens: Sequence[int], name: str) -> list[int]:
    read = [int(token) for token in tokens] if _are_integers(tokens) else None
    if read is None or min(read, default=0) < 0:
        raise InputError(f"{name} must be token ids, integers of at least 0, got {tokens!r:.60}")
    return read


def _are_integers(tokens: Sequence[int]) -> bool:
    return all(isinstance(token, int | np.integer) for token in tokens)
