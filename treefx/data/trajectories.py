"""Define the common forms of loaders: conversations, compared answers, judged answers."""

from dataclasses import dataclass, field
from typing import Any, Literal

from treefx.data.files import Place

__all__ = ["Conversation", "Judged", "Message", "Preference", "Role", "Text", "ToolCall"]

Role = Literal["system", "user", "assistant", "tool"]


@dataclass(frozen=True)
class ToolCall:
    """Hold one function call of an assistant message.

    ``arguments`` is the text the agent wrote, usually JSON.
    """

    name: str
    arguments: str
    id: str = field(default="", compare=False)
    """Reference for the tool's answer; drawn per trial, so comparisons ignore it."""


@dataclass(frozen=True)
class Message:
    """Hold one message of a conversation."""

    role: Role
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    name: str = ""
    """Of a tool message: the tool that answered."""
    reasoning: str = ""
    """Of an assistant message: its private thinking, which later prompts leave out."""
    tool_call_id: str = field(default="", compare=False)
    """Of a tool message: the call it answers."""
    token_ids: tuple[int, ...] | None = field(default=None, compare=False)
    """Of an assistant message: the ids that were sampled, where they were recorded."""
    trained: bool = True
    """Of an assistant message: whether the agent is trained to say it; else it is only read."""


@dataclass(frozen=True)
class Conversation:
    """Hold one rollout: the messages of an agent, its user and its tools on one task."""

    task: str
    """Conversations with the same task begin alike and share a tree."""
    trial: int
    messages: tuple[Message, ...]
    reward: float | None = None
    source: str = ""
    tools: tuple[dict[str, Any], ...] = field(default=(), hash=False)
    """JSON schemas of the tools that the agent was told of."""
    template_options: dict[str, Any] = field(default_factory=dict, hash=False)
    """For the chat template, in addition to those of `ChatTokenizer`."""
    place: Place | None = field(default=None, compare=False)
    """The file and line it was read from."""

    def texts(self) -> list[str]:
        """Return every text of the conversation, to train a tokenizer on."""
        spoken = [text for message in self.messages for text in (message.reasoning, message.content) if text]
        calls = [call for message in self.messages for call in message.tool_calls]
        return spoken + [text for call in calls for text in (call.name, call.arguments)]


Text = str | tuple[Message, ...]
"""A prompt or an answer: plain text, or messages."""


@dataclass(frozen=True)
class Preference:
    """Hold two answers to one prompt, one of them preferred.

    All three are text, or all three are messages.
    """

    prompt: Text
    chosen: Text
    rejected: Text
    tools: tuple[dict[str, Any], ...] = field(default=(), hash=False)
    template_options: dict[str, Any] = field(default_factory=dict, hash=False)
    place: Place | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Judged:
    """Hold an answer to a prompt, and whether it is a good one (KTO).

    Both are text, or both are messages.
    """

    prompt: Text
    completion: Text
    label: bool
    tools: tuple[dict[str, Any], ...] = field(default=(), hash=False)
    template_options: dict[str, Any] = field(default_factory=dict, hash=False)
    place: Place | None = field(default=None, compare=False)
