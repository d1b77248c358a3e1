"""The chat template: how a message becomes tokens.

    <role> body <end>            body of system, user and tool messages: the text
    <assistant> <think> reasoning </think> text <call> name arguments <call> ... <end>

Every piece of text is encoded on its own, so that conversations which say the same thing have the same
tokens, no matter what follows: with a tokenizer that merges over piece borders, equal texts could differ in
their last token and prefixes would be lost.
"""

import numpy as np
import numpy.typing as npt

from treefx.data.tokenization import Tokenizer
from treefx.data.trajectories import Message

__all__ = ["encode_message", "encode_opening"]

Tokens = npt.NDArray[np.int64]


def encode_opening(role: str, tokenizer: Tokenizer) -> Tokens:
    """Tokens that open a message of ``role``, shape [1]; after a prompt they ask the agent to speak."""
    return np.array([tokenizer.special(f"<{role}>")], dtype=np.int64)


def encode_message(message: Message, tokenizer: Tokenizer, *, keep_reasoning: bool) -> Tokens:
    """Tokens of one message, shape [T].

    Args:
        message: What was said.
        tokenizer: Encodes the text.
        keep_reasoning: Whether the thinking of an assistant message is part of it. It is when the message
        is a
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
