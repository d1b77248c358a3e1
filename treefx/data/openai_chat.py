"""Messages in the OpenAI chat format, and files of them.

A file is JSON lines (or a JSON list) of ``{"messages": [...]}``, optionally with ``task``, ``trial`` and
``reward``.
"""

from typing import Any

from treefx.data.trajectories import Conversation, Message, Role, ToolCall
from treefx.errors import InputError

__all__ = ["is_openai_chat", "parse_message", "read_openai_chat"]

_ROLES: dict[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}


def is_openai_chat(document: Any) -> bool:
    """Whether a parsed file is a list of ``{"messages": [...]}``."""
    return (
        isinstance(document, list)
        and bool(document)
        and all(isinstance(entry, dict) and isinstance(entry.get("messages"), list) for entry in document)
    )


def read_openai_chat(document: Any, source: str) -> list[Conversation]:
    """Conversations of a parsed file; without a ``task`` each is a task of its own."""
    return [
        Conversation(
            task=str(entry.get("task", index)),
            trial=int(entry.get("trial", 0)),
            messages=tuple(parse_message(message, f"{source}, conversation {index}") for message in entry["messages"]),
            reward=entry.get("reward"),
            source=source,
        )
        for index, entry in enumerate(document)
    ]


def parse_message(entry: Any, place: str) -> Message:
    """One OpenAI message.

    Args:
        entry: ``{"role", "content", "tool_calls"?, "name"?, "reasoning_content"?}``; ``content`` may be
        None or a list
            of text parts.
        place: Where it stands, for messages of errors.

    Raises:
        InputError: The role is unknown, the content is not text, or a tool call names no function.
    """
    if not isinstance(entry, dict) or entry.get("role") not in _ROLES:
        got = repr(entry.get("role")) if isinstance(entry, dict) else type(entry).__name__
        raise InputError(f"{place}: a message must be an object whose role is one of {', '.join(_ROLES)}; got {got}")
    calls = entry.get("tool_calls") or []
    return Message(
        role=_ROLES[entry["role"]],
        content=_text(entry.get("content"), place),
        tool_calls=tuple(_tool_call(call, place) for call in calls),
        name=str(entry.get("name") or ""),
        reasoning=str(entry.get("reasoning_content") or ""),
    )


def _tool_call(call: Any, place: str) -> ToolCall:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or "name" not in function:
        raise InputError(f"{place}: a tool call must be {{function: {{name, arguments}}}}, got {call!r}")
    return ToolCall(str(function["name"]), str(function.get("arguments", "")))


def _text(content: Any, place: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(isinstance(part, dict) and "text" in part for part in content):
        return "".join(str(part["text"]) for part in content)
    raise InputError(f"{place}: content must be text, a list of text parts or null; got {type(content).__name__}")
