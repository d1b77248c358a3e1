"""Results of verifiers (Prime Intellect, https://github.com/PrimeIntellect-ai/verifiers, read at v0.3.0-62-ga60a606e).

A line of ``results.jsonl`` is ``{example_id, prompt, completion, reward, tool_defs, ...}`` (``state_to_output`` of
``verifiers/legacy/utils/save_utils.py``): prompt and completion are messages, tool calls the JSON text of
``{id, name, arguments}``, ``tool_defs`` a list of ``{name, description, parameters}``. Rollouts of one example are a
group. Token ids, if recorded, are read by ``treefx.data.traces``.
"""

from typing import Any

from treefx.data.files import Value
from treefx.data.formats.openai_chat import parse_messages, parse_name, parse_template_options, parse_tools
from treefx.data.trajectories import Conversation

__all__ = ["is_verifiers_result", "parse_verifiers_result"]


def is_verifiers_result(raw: Any) -> bool:
    """Whether a parsed record is a result."""
    return isinstance(raw, dict) and {"example_id", "prompt", "completion"} <= raw.keys()


def parse_verifiers_result(record: Value, source: str) -> list[Conversation]:
    """Parse the conversation of a record; ``task`` is its ``example_id``, ``trial`` the record's number.

    Raises:
        RecordError: a field is missing or of the wrong type; an environment of plain text has no messages.
    """
    reward = record.get("reward")
    return [
        Conversation(
            task=parse_name(record["example_id"]),
            trial=record.place.record,
            messages=(*parse_messages(record["prompt"]), *parse_messages(record["completion"])),
            reward=reward.number() if reward else None,
            source=source,
            tools=parse_tools(record) or _parse_definitions(record.get("tool_defs")),
            template_options=parse_template_options(record),
            place=record.place,
        )
    ]


def _parse_definitions(tools: Value | None) -> tuple[dict[str, Any], ...]:
    """Return the tools as chat templates read them."""
    entries = tools.items("a list of tools") if tools else []
    return tuple(
        {"type": "function", "function": entry.free("a tool {name, description, parameters}")} for entry in entries
    )
