"""Messages in the OpenAI chat format, and records of them.

A record is ``{"messages": [...]}``, optionally with ``task``, ``trial``, ``reward``, ``tools`` and
``chat_template_kwargs``. An assistant message may carry ``token_ids``, the ids that were sampled, as servers return
them on request, and ``weight``, 0 where it is not to be trained, as in OpenAI's files for fine-tuning.
"""

import json
from typing import Any

from treefx.data.files import Value
from treefx.data.trajectories import Conversation, Message, Role, ToolCall

__all__ = [
    "RESERVED_OPTIONS",
    "is_openai_chat",
    "parse_message",
    "parse_messages",
    "parse_name",
    "parse_openai_chat",
    "parse_template_options",
    "parse_tools",
]

RESERVED_OPTIONS = frozenset(
    "conversation messages tools documents chat_template add_generation_prompt continue_final_message tokenize "
    "sanitize_control_tokens padding truncation max_length return_tensors return_dict return_assistant_tokens_mask "
    "tokenizer_kwargs".split()
)
"""Arguments of transformers' ``apply_chat_template``: a record that sets one has other rows than the caller wants."""

_ROLES: dict[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}


def is_openai_chat(raw: Any) -> bool:
    """Whether a parsed record is a chat."""
    return isinstance(raw, dict) and "messages" in raw


def parse_openai_chat(record: Value, source: str) -> list[Conversation]:
    """Parse the conversation of a record.

    Without a ``task`` it is a separate task, named by the record's number.
    """
    task, trial, reward = record.get("task"), record.get("trial"), record.get("reward")
    return [
        Conversation(
            task=parse_name(task) if task else str(record.place.record),
            trial=trial.integer() if trial else 0,
            messages=parse_messages(record["messages"]),
            reward=reward.number() if reward else None,
            source=source,
            tools=parse_tools(record),
            template_options=parse_template_options(record),
            place=record.place,
        )
    ]


def parse_name(value: Value) -> str:
    """Return the name of a task: text, or a whole number."""
    return value.text() if isinstance(value.raw, str) else str(value.integer("text or a whole number"))


def parse_messages(value: Value) -> tuple[Message, ...]:
    """A list of messages, at least one."""
    messages = tuple(parse_message(entry) for entry in value.items("a list of messages"))
    if not messages:
        value.fail("at least one message")
    return messages


def parse_tools(record: Value) -> tuple[dict[str, Any], ...]:
    """Parse a record's ``tools``: a list of JSON schemas, or the JSON text of one.

    Raises:
        RecordError: it is neither.
    """
    tools = record.get("tools")
    if tools is None:
        return ()
    if isinstance(tools.raw, str):
        tools = tools.parsed("a list of tools, or the JSON text of one")
    return tuple(entry.free("a tool's JSON schema, an object") for entry in tools.items("a list of tools"))


def parse_template_options(record: Value) -> dict[str, Any]:
    """A record's ``chat_template_kwargs``: options that its chat template reads, by name.

    Raises:
        RecordError: it is no object, or one of them would take the place of the template or of an argument of
            ``apply_chat_template``.
    """
    options = record.get("chat_template_kwargs")
    if options is None:
        return {}
    given = options.free("an object of options")
    for name in sorted(RESERVED_OPTIONS.intersection(given)):
        raise options.place.inside(name).error(
            "a record may set variables of its chat template, but not the template itself nor another argument of "
            f"apply_chat_template: leave {name!r} out of the record, and give it to ChatTokenizer(tokenizer, ...)"
        )
    return given


def parse_message(entry: Value) -> Message:
    """One OpenAI message.

    Args:
        entry: ``{"role", "content", "tool_calls"?, "name"?, "tool_call_id"?, "reasoning_content"?, "token_ids"?,
            "weight"?}``; ``content`` may be null or a list of text parts. Instead of ``tool_calls`` there may be one
            ``function_call``, instead of ``reasoning_content`` also ``reasoning`` or ``thinking``.

    Raises:
        RecordError: a field is missing or of the wrong type, the role is unknown, or a tool call names no function.
    """
    if not isinstance(entry.raw, dict):
        entry.fail("a message, an object with role and content")
    role = _ROLES[entry["role"].choice(_ROLES, "a role that is one of")]
    name, call_id, ids = entry.get("name"), entry.get("tool_call_id"), entry.get("token_ids")
    thoughts = (entry.get(field) for field in ("reasoning_content", "reasoning", "thinking"))
    reasoning = next((thought for thought in thoughts if thought), None)
    return Message(
        role=role,
        content=_parse_content(entry.get("content")),
        tool_calls=_parse_calls(entry),
        name=name.text() if name else "",
        reasoning=reasoning.text() if reasoning else "",
        tool_call_id=call_id.text() if call_id else "",
        token_ids=tuple(_parse_id(each) for each in ids.items("a list of token ids")) if ids else None,
        trained=_parse_weight(entry.get("weight")),
    )


def _parse_id(value: Value) -> int:
    number = value.integer("a token id")
    return number if number >= 0 else value.fail("a token id of at least 0")


def _parse_weight(weight: Value | None) -> bool:
    if weight is not None and weight.raw not in (0, 1):
        weight.fail("a weight of 0 or 1")
    return weight is None or bool(weight.raw)


def _parse_calls(entry: Value) -> tuple[ToolCall, ...]:
    calls, single = entry.get("tool_calls"), entry.get("function_call")
    if calls is None:
        return (_parse_function(single, ""),) if single else ()
    return tuple(_parse_call(call) for call in calls.items("a list of tool calls"))


def _parse_call(call: Value) -> ToolCall:
    if isinstance(call.raw, str):  # verifiers writes the JSON text of {id, name, arguments}
        call = call.parsed("a tool call, or the JSON text of one")
        if isinstance(call.raw, dict) and "name" in call.raw:
            call = Value({"id": call.raw.get("id"), "function": call.raw}, call.place, call.nulls)
    function, call_id = call.get("function"), call.get("id")
    if function is None or not isinstance(function.raw, dict):
        call.fail("a tool call {function: {name, arguments}}")
    return _parse_function(function, call_id.text() if call_id else "")


def _parse_function(function: Value, call_id: str) -> ToolCall:
    name, arguments = function["name"].text(), function.get("arguments")
    if arguments is None:
        written = ""
    elif isinstance(arguments.raw, dict):  # transformers' own examples have the object instead of its text
        written = json.dumps(arguments.free(), ensure_ascii=False)
    else:
        written = arguments.text("arguments as JSON text or an object")
    return ToolCall(name, written, call_id)


def _parse_content(content: Value | None) -> str:
    if content is None:
        return ""
    if isinstance(content.raw, str):
        return content.text()
    parts = content.items("content that is text, a list of text parts or null")
    return "".join(part["text"].text() for part in parts)
