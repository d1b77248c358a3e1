"""Define encoded rows: token ids, and which of them are trained."""

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
    """Hold ``tokens`` int64 [T] and ``trained`` bool [T]: the tokens that the agent wrote."""

    tokens: Tokens
    trained: npt.NDArray[np.bool_]


class Encoder(Protocol):
    """Define the interface of encoders of conversations and answers."""

    @property
    def pad_id(self) -> int:
        """Token id at padding."""
        ...

    def turns(self, conversation: Conversation) -> list[EncodedRow]:
        """Return one row per trained assistant message: the messages before, and the message."""
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
        """Return one row per answer, with the prompt in front; the assistant's text is trained."""
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
