"""Messages as chat templates read them: the OpenAI format, with the arguments of calls as objects."""

import json
from typing import Any

from treefx.data.trajectories import Message, ToolCall

__all__ = ["to_template"]


def to_template(message: Message) -> dict[str, Any]:
    """One message; fields that say nothing are left out, as templates ask whether a field is there.

    Arguments that are the JSON text of an object become that object, as transformers documents it: a template writes it
    in its own way, so the spacing of the recorded text is not kept. Other arguments stay text.
    """
    entry: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.name:
        entry["name"] = message.name
    if message.tool_call_id:
        entry["tool_call_id"] = message.tool_call_id
    if message.reasoning:
        entry["reasoning_content"] = message.reasoning
    if message.tool_calls:
        entry["tool_calls"] = [_call(call) for call in message.tool_calls]
    return entry


def _call(call: ToolCall) -> dict[str, Any]:
    try:
        arguments = json.loads(call.arguments)
    except ValueError:
        arguments = call.arguments
    function = {"name": call.name, "arguments": arguments if isinstance(arguments, dict) else call.arguments}
    return {"type": "function", "function": function} | ({"id": call.id} if call.id else {})
