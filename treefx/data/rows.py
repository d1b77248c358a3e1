"""Token ids of one row, and which of them are trained: what every encoder makes of conversations."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from treefx.data.trajectories import Conversation, Message, Text

__all__ = ["EncodedRow", "Encoder", "Tokens", "common_length", "is_trained"]

Tokens = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class EncodedRow:
    """``tokens`` int64 [T], and ``trained`` bool [T]: the tokens that the agent wrote and is trained to write."""

    tokens: Tokens
    trained: npt.NDArray[np.bool_]


class Encoder(Protocol):
    """What makes rows of conversations and of answers."""

    @property
    def pad_id(self) -> int:
        """Token id at padding."""
        ...

    def turns(self, conversation: Conversation) -> list[EncodedRow]:
        """One row per assistant message that is trained: what was before, and the message."""
        ...

    def whole(self, conversation: Conversation) -> EncodedRow:
        """The conversation as one row, every assistant message trained."""
        ...

    def answers(
        self,
        prompt: Text,
        answers: Sequence[Text],
        tools: Sequence[dict[str, Any]] = (),
        template_options: Mapping[str, Any] | None = None,
    ) -> list[EncodedRow]:
        """One row per answer: the prompt, and the answer, of which is trained what the assistant wrote."""
        ...


def is_trained(message: Message) -> bool:
    """Whether the agent is trained to say a message."""
    return message.role == "assistant" and message.trained


def common_length(first: str | Tokens, second: str | Tokens) -> int:
    """How far two texts, or two rows of token ids, agree from their beginning."""
    size = min(len(first), len(second))
    if isinstance(first, np.ndarray) and isinstance(second, np.ndarray):
        differs = np.flatnonzero(first[:size] != second[:size])
        return int(differs[0]) if len(differs) else size
    equal, unequal = 0, size + 1  # halving compares slices, which is faster than characters one by one
    while unequal - equal > 1:
        middle = (equal + unequal) // 2
        if first[equal:middle] == second[equal:middle]:
            equal = middle
        else:
            unequal = middle
    return equal
