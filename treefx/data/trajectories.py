"""Conversations of an agent: the common form into which every loader reads."""

from dataclasses import dataclass
from typing import Literal

__all__ = ["Conversation", "Message", "Role", "ToolCall"]

Role = Literal["system", "user", "assistant", "tool"]


@dataclass(frozen=True)
class ToolCall:
    """One function call of an assistant message; ``arguments`` is the text the agent wrote, usually JSON."""

    name: str
    arguments: str


@dataclass(frozen=True)
class Message:
    """One message of a conversation."""

    role: Role
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    name: str = ""
    """Of a tool message: the tool that answered."""
    reasoning: str = ""
    """Of an assistant message: its private thinking, which later prompts leave out."""


@dataclass(frozen=True)
class Conversation:
    """One rollout: what an agent, its user and its tools said while working on one task."""

    task: str
    """Conversations with the same task begin alike and share a tree."""
    trial: int
    messages: tuple[Message, ...]
    reward: float | None = None
    source: str = ""

    def texts(self) -> list[str]:
        """Every text of the conversation: what a tokenizer is trained on."""
        spoken = [text for message in self.messages for text in (message.reasoning, message.content) if text]
        calls = [call for message in self.messages for call in message.tool_calls]
        return spoken + [text for call in calls for text in (call.name, call.arguments)]
