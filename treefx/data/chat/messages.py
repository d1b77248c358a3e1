"""Convert messages for chat templates: the OpenAI format, with parsed arguments of calls."""

import json
from typing import Any, Literal

from treefx.data.trajectories import Message, ToolCall

__all__ = ["Arguments", "to_template"]

Arguments = Literal["object", "text"]
"""Form of the arguments of calls for templates."""


def to_template(message: Message, arguments: Arguments = "object") -> dict[str, Any]:
    """Convert one message without its empty fields: templates test whether a field is there.

    As "object", arguments that are the JSON text of an object become that object, as transformers documents it: a
    template writes it in its own way, so the spacing of the recorded text is not kept. As "text" they are as recorded,
    for templates that join them to other text.
    """
    entry: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.name:
        entry["name"] = message.name
    if message.tool_call_id:
        entry["tool_call_id"] = message.tool_call_id
    if message.reasoning:
        entry["reasoning_content"] = message.reasoning
    if message.tool_calls:
        entry["tool_calls"] = [_call(call, arguments) for call in message.tool_calls]
    return entry


def _call(call: ToolCall, arguments: Arguments) -> dict[str, Any]:
    function = {"name": call.name, "arguments": _read_arguments(call) if arguments == "object" else call.arguments}
    return {"type": "function", "function": function} | ({"id": call.id} if call.id else {})


def _read_arguments(call: ToolCall) -> Any:
    try:
        read = json.loads(call.arguments)
    except (ValueError, RecursionError):
        return call.arguments
    return read if isinstance(read, dict) else call.arguments
