"""The chat template of tokenizers of our own: how messages become tokens.

    <role> body <end>            body of system, user and tool messages: the text
    <assistant> <think> reasoning </think> text <call> name arguments <call> ... <end>

Every piece of text is encoded separately, so that conversations with equal text have equal tokens, independent of later
text: with a tokenizer that merges over piece borders, equal texts could differ in their last token and prefixes would
    be lost.
"""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from treefx.data.rows import EncodedRow, Tokens, is_trained
from treefx.data.tokenization import Tokenizer
from treefx.data.trajectories import Conversation, Message, Text

__all__ = ["TemplateEncoder", "encode_message", "encode_opening"]


class TemplateEncoder:
    """Rows of conversations by this template; see `Encoder`.

    The role header of a completion belongs to the prompt: the agent is asked to speak, it does not choose to. The
    template has no place for descriptions of tools, and no options; it warns when it drops them.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer

    @property
    def pad_id(self) -> int:
        """Token id at padding."""
        return self.tokenizer.pad_id

    def turns(self, conversation: Conversation) -> list[EncodedRow]:
        """Return one row per assistant message, which keeps its reasoning; later prompts do not."""
        _warn_of(conversation.tools, conversation.template_options)
        prompt: list[Tokens] = []
        rows = []
        for message in conversation.messages:
            if is_trained(message):
                rows.append(self._row(prompt, [message]))
            prompt.append(encode_message(message, self.tokenizer, keep_reasoning=False))
        return rows

    def whole(self, conversation: Conversation) -> EncodedRow:
        """The conversation as one row, every assistant message with its reasoning in place."""
        _warn_of(conversation.tools, conversation.template_options)
        return self._row([], conversation.messages)

    def answers(
        self,
        prompt: Text,
        answers: Sequence[Text],
        tools: Sequence[dict[str, Any]] = (),
        template_options: Mapping[str, Any] | None = None,
    ) -> list[EncodedRow]:
        """One row per answer; plain text has no headers, and <end> behind it."""
        _warn_of(tools, template_options)
        if isinstance(prompt, str):
            before = [self.tokenizer.encode(prompt)]
        else:
            before = [encode_message(message, self.tokenizer, keep_reasoning=False) for message in prompt]
        return [self._text(before, each) if isinstance(each, str) else self._row(before, each) for each in answers]

    def _row(self, before: Sequence[Tokens], messages: Sequence[Message]) -> EncodedRow:
        opening = len(encode_opening("assistant", self.tokenizer))
        parts = [encode_message(message, self.tokenizer, keep_reasoning=True) for message in messages]
        trained = [np.zeros(len(part), dtype=np.bool_) for part in (*before, *parts)]
        for message, mask in zip(messages, trained[len(before) :], strict=True):
            mask[opening:] = is_trained(message)
        return EncodedRow(np.concatenate([*before, *parts]), np.concatenate(trained))

    def _text(self, before: Sequence[Tokens], text: str) -> EncodedRow:
        answer = np.append(self.tokenizer.encode(text), self.tokenizer.special("<end>"))
        tokens = np.concatenate([*before, answer])
        return EncodedRow(tokens, np.arange(len(tokens)) >= len(tokens) - len(answer))


def _warn_of(tools: Sequence[dict[str, Any]], options: Mapping[str, Any] | None) -> None:
    """Python shows the warning once per place."""
    given = [name for name, value in (("tools", tools), ("template options", options)) if value]
    if given:
        warnings.warn(
            f"conversations come with {' and '.join(given)}, for which this template has no place: they are left out "
            "of the tokens; give the tokenizer of your model, whose chat template writes them",
            stacklevel=3,
        )


def encode_opening(role: str, tokenizer: Tokenizer) -> Tokens:
    """Return tokens that open a message of ``role``, shape [1].

    After a prompt they start the agent's answer.
    """
    return np.array([tokenizer.special(f"<{role}>")], dtype=np.int64)


def encode_message(message: Message, tokenizer: Tokenizer, *, keep_reasoning: bool) -> Tokens:
    """Tokens of one message, shape [T].

    Args:
        message: The message.
        tokenizer: Encodes the text.
        keep_reasoning: Whether the thinking of an assistant message is part of it. It is when the message is a
            completion, and is not when it is history.
    """
    special = tokenizer.special
    parts: list[Tokens | list[int]] = [encode_opening(message.role, tokenizer)]
    if message.reasoning and keep_reasoning:
        parts += [[special("<think>")], tokenizer.encode(message.reasoning), [special("</think>")]]
    if message.name:
        parts.append(tokenizer.encode(f"{message.name}\n"))
    parts.append(tokenizer.encode(message.content))
    for call in message.tool_calls:
        parts += [[special("<call>")], tokenizer.encode(call.name), tokenizer.encode(f"\n{call.arguments}")]
    parts.append([special("<end>")])
    return np.concatenate([np.asarray(part, dtype=np.int64) for part in parts])
