"""Define the interface of a policy that samples tokens, and of an environment."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

__all__ = ["Completion", "Environment", "Generate", "Outcome"]


@dataclass(frozen=True)
class Completion:
    """Hold the tokens that were sampled after one prefix.

    Attributes:
        tokens: token ids, at least one; the token that ended it (end of turn, say) included.
        logprobs: as many, the log-probability of each under the policy that sampled it: the old log-probabilities of
            the losses.
    """

    tokens: Sequence[int]
    logprobs: Sequence[float]


class Generate(Protocol):
    """Sample one completion after each prefix.

    A function, or an object such as `TransformersSampler`.
    """

    def __call__(self, prefixes: Sequence[list[int]], seeds: Sequence[int], /) -> Sequence[Completion]:
        """Sample.

        Args:
            prefixes: token ids before the completion: prompt, earlier completions, and observations of the environment.
                Branches of one fork come as equal prefixes.
            seeds: one per prefix, in [0, 2^63). The same prefix and seed should give the same completion, in any batch.

        Returns:
            One completion per prefix, in their order.
        """


@dataclass(frozen=True)
class Outcome:
    """Hold an environment's answer to the tokens of one step.

    Attributes:
        state: start of the next step.
        observation: token ids after the step's sampled tokens: the tool's output and the next turn's prompt. They are
            never trained.
        done: whether the trajectory ends here.
        reward: outcome reward of the trajectory if it ends here, also if it is cut off here.
        step_reward: reward of the step itself: PORTool's formatting reward.
    """

    state: Any
    observation: Sequence[int] = ()
    done: bool = False
    reward: float = 0.0
    step_reward: float = 0.0


class Environment(Protocol):
    """Define tasks and tools.

    Branches continue from one state, so a state is never changed: `act` returns a new one.
    """

    def start(self, task: Any, /) -> tuple[Any, Sequence[int]]:
        """Return the state and the prompt (token ids, at least one) of a task."""

    def act(self, state: Any, tokens: list[int], seed: int, /) -> Outcome:
        """Run a step: read its tokens, call the tools.

        Args:
            state: of the step before, or of `start`. Other branches hold it too.
            tokens: tokens that the policy sampled.
            seed: seed of the environment's random numbers, in [0, 2^63); a different one for every step.
        """
