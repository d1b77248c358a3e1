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

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from treefx.data.template import encode_message, encode_opening
from treefx.data.tokenization import Tokenizer
from treefx.data.trajectories import Conversation
from treefx.errors import InputError

__all__ = ["IGNORED", "Form", "Sample", "make_samples", "merge_turns", "turn_samples", "whole_sample"]

IGNORED = -100
"""The label of a token that carries no loss, as in ``torch.nn.functional.cross_entropy``."""

Form = Literal["turns", "merged", "whole"]
Tokens = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Sample:
    """One training row: ``tokens`` [T] and ``labels`` [T], a label is the token itself or ``IGNORED``."""

    tokens: Tokens
    labels: Tokens
    task: str
    trial: int
    turn: int

    def __len__(self) -> int:
        return len(self.tokens)


def make_samples(conversations: Iterable[Conversation], tokenizer: Tokenizer, form: Form = "turns") -> list[Sample]:
    """Training samples of all conversations, in their order.

    Args:
        conversations: What ``treefx.data.load`` or ``treefx.data.scripted_conversations`` returned.
        tokenizer: Encodes the text.
        form: ``"turns"``, ``"merged"`` or ``"whole"``; see the module's documentation.

    Raises:
        InputError: ``form`` is none of the three.
    """
    if form == "whole":
        return [whole_sample(conversation, tokenizer) for conversation in conversations]
    if form not in ("turns", "merged"):
        raise InputError(f"form must be 'turns', 'merged' or 'whole', got {form!r}")
    by_conversation = [turn_samples(conversation, tokenizer) for conversation in conversations]
    if form == "merged":
        by_conversation = [merge_turns(turns) for turns in by_conversation]
    return [sample for samples in by_conversation for sample in samples]


def turn_samples(conversation: Conversation, tokenizer: Tokenizer) -> list[Sample]:
    """One sample per assistant message: labels are ``IGNORED`` on everything before it.

    The role header of the completion belongs to the prompt: the agent is asked to speak, it does not choose
    to. The completion keeps its reasoning, the prompts of later turns do not.
    """
    opening = encode_opening("assistant", tokenizer)
    prompt: list[Tokens] = []
    samples: list[Sample] = []
    for message in conversation.messages:
        if message.role == "assistant":
            completion = encode_message(message, tokenizer, keep_reasoning=True)[len(opening) :]
            tokens = np.concatenate([*prompt, opening, completion])
            labels = np.full_like(tokens, IGNORED)
            labels[len(tokens) - len(completion) :] = completion
            samples.append(Sample(tokens, labels, conversation.task, conversation.trial, len(samples)))
        prompt.append(encode_message(message, tokenizer, keep_reasoning=False))
    return samples


def whole_sample(conversation: Conversation, tokenizer: Tokenizer) -> Sample:
    """The conversation as one row, every assistant message a completion with its reasoning in place."""
    opening = len(encode_opening("assistant", tokenizer))
    tokens = [encode_message(message, tokenizer, keep_reasoning=True) for message in conversation.messages]
    labels = [part.copy() for part in tokens]
    for message, part in zip(conversation.messages, labels):
        part[: opening if message.role == "assistant" else len(part)] = IGNORED
    return Sample(np.concatenate(tokens), np.concatenate(labels), conversation.task, conversation.trial, 0)


def merge_turns(samples: Sequence[Sample]) -> list[Sample]:
    """Join successive samples of one conversation where one's tokens are a prefix of the next one's.

    This is the best that rows without branches can do: a fork, such as reasoning that later prompts leave
    out, starts a new row. Each label is kept exactly once, so that the sum of the loss over labels is
    unchanged; samples which label the same position twice are not joined.
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
