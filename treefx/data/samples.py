"""The training samples that agent frameworks make of conversations.

A trainer seldom sees a conversation as one row: most frameworks emit **one sample per assistant turn**
(prompt = every message before, completion = that one message), so the same prompt tokens come again in
every later turn and in every other trial of the task. The three forms here are the three things to compare:

======  ====================================================================================================
turns   one row per assistant turn, as emitted
merged  turns of one conversation joined into one row wherever a turn's row is a prefix of the next one's
whole   one row per conversation, every assistant message a completion
======  ====================================================================================================
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from treefx.data.chat import ChatTokenizer, Engine
from treefx.data.files import Place
from treefx.data.rows import EncodedRow, Encoder, Tokens
from treefx.data.template import TemplateEncoder
from treefx.data.tokenization import Tokenizer
from treefx.data.trajectories import Conversation
from treefx.errors import InputError, RecordError

__all__ = [
    "IGNORED",
    "AnyTokenizer",
    "Form",
    "Sample",
    "as_encoder",
    "make_samples",
    "merge_turns",
    "named_place",
    "sample_of",
    "turn_samples",
    "whole_sample",
]

IGNORED = -100
"""The label of a token that carries no loss, as in ``torch.nn.functional.cross_entropy``."""

Form = Literal["turns", "merged", "whole"]
AnyTokenizer = Tokenizer | ChatTokenizer | Engine
"""One of our own, a `ChatTokenizer`, or a tokenizer of transformers, which stands for `ChatTokenizer(tokenizer)`."""


@dataclass(frozen=True, eq=False)
class Sample:
    """Hold one training row.

    Attributes:
        tokens: int64 [T], token ids.
        labels: int64 [T], the token itself, or ``IGNORED``.
        task: Name of the task.
        trial: Number of the trial of this task.
        turn: Number of the assistant message, from 0.
    """

    tokens: Tokens
    labels: Tokens
    task: str
    trial: int
    turn: int

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def weights(self) -> npt.NDArray[np.float64]:
        """Return float64 [T]: 1 at labels, else 0.

        A token is trained by each row that has a label for it.
        """
        return np.where(self.labels != IGNORED, 1.0, 0.0)


def make_samples(conversations: Iterable[Conversation], tokenizer: AnyTokenizer, form: Form = "turns") -> list[Sample]:
    """Make training samples of all conversations, in their order.

    Args:
        conversations: The result of ``treefx.data.load`` or ``treefx.data.scripted_conversations``.
        tokenizer: A tokenizer of `treefx.data`, a `ChatTokenizer`, or a tokenizer of transformers with a chat template.
        form: ``"turns"``, ``"merged"`` or ``"whole"``; see the module's documentation.

    Returns:
        The samples, in the order of the conversations and of their turns.

    Raises:
        InputError: ``form`` is none of the three, or a chat template cannot write the conversation in this form; the
            message names the file and line that it was read from.
    """
    if form == "whole":
        return [whole_sample(conversation, tokenizer) for conversation in conversations]
    if form not in ("turns", "merged"):
        raise InputError(f"form must be 'turns', 'merged' or 'whole', got {form!r}")
    by_conversation = [turn_samples(conversation, tokenizer) for conversation in conversations]
    if form == "merged":
        by_conversation = [merge_turns(turns) for turns in by_conversation]
    return [sample for samples in by_conversation for sample in samples]


def turn_samples(conversation: Conversation, tokenizer: AnyTokenizer) -> list[Sample]:
    """Make one sample per assistant message, with labels ``IGNORED`` before it.

    The role header of the completion belongs to the prompt: the agent is asked to speak, it does not choose
    to. With a tokenizer of ours, the completion keeps its reasoning and the prompts of later turns do not; with a chat
    template, that is as it writes them.

    Args:
        conversation: one rollout.
        tokenizer: as for `make_samples`.

    Returns:
        The samples in the order of the turns; labels [T] are token ids on the completion.

    Raises:
        InputError: as for `make_samples`.
    """
    with named_place(conversation.place):
        rows = as_encoder(tokenizer).turns(conversation)
    return [sample_of(row, conversation.task, conversation.trial, turn) for turn, row in enumerate(rows)]


def whole_sample(conversation: Conversation, tokenizer: AnyTokenizer) -> Sample:
    """Encode the conversation as one row; every assistant message is a completion.

    Reasoning stays in place.

    Args:
        conversation: one rollout.
        tokenizer: as for `make_samples`.

    Returns:
        The sample; labels [T] are token ids on every assistant message.

    Raises:
        InputError: as for `make_samples`.
    """
    with named_place(conversation.place):
        row = as_encoder(tokenizer).whole(conversation)
    return sample_of(row, conversation.task, conversation.trial)


def as_encoder(tokenizer: AnyTokenizer) -> Encoder:
    """Return the encoder of a tokenizer.

    Built-in tokenizers use the built-in template, those of transformers their chat template.
    """
    if isinstance(tokenizer, Tokenizer):
        return TemplateEncoder(tokenizer)
    return tokenizer if isinstance(tokenizer, ChatTokenizer) else ChatTokenizer(tokenizer)


def sample_of(row: EncodedRow, task: str = "", trial: int = 0, turn: int = 0) -> Sample:
    """A row as a sample."""
    return Sample(row.tokens, np.where(row.trained, row.tokens, IGNORED), task, trial, turn)


def merge_turns(samples: Sequence[Sample]) -> list[Sample]:
    """Join successive samples of one conversation if one is a prefix of the next.

    This is the best that rows without branches can do: a fork, such as reasoning that later prompts leave
    out, starts a new row. Each label is kept exactly once, so that the sum of the loss over labels is
    unchanged; samples which label the same position twice are not joined.

    Args:
        samples: of one or more conversations, their turns in order.

    Returns:
        At most as many samples, in order.
    """
    merged: list[Sample] = []
    for sample in samples:
        if merged and _continues(merged[-1], sample):
            labels = sample.labels.copy()
            before = merged[-1].labels
            labels[: len(before)] = np.where(before != IGNORED, before, labels[: len(before)])
            merged[-1] = replace(sample, labels=labels)
        else:
            merged.append(sample)
    return merged


def _continues(first: Sample, second: Sample) -> bool:
    size = len(first)
    if size > len(second) or not np.array_equal(first.tokens, second.tokens[:size]):
        return False
    return not bool(np.any((first.labels != IGNORED) & (second.labels[:size] != IGNORED)))


@contextmanager
def named_place(place: Place | None) -> Iterator[None]:
    """Add the file and line of the encoded record to refusals."""
    try:
        yield
    except InputError as error:
        if place is None or isinstance(error, RecordError):
            raise
        raise place.error(str(error)) from error
