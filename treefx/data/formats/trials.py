"""Parse trials of one task in one record.

A record is ``{prompt, completions, rewards?, task?, tools?, ...}``.

``prompt`` is a list of messages, or the text of one message of the user; ``completions`` has lists of messages, or
texts of one message of the assistant each; ``rewards`` one number per completion.
"""

from typing import Any

from treefx.data.files import Value
from treefx.data.formats.openai_chat import parse_messages, parse_name, parse_template_options, parse_tools
from treefx.data.formats.preferences import parse_answer
from treefx.data.trajectories import Conversation, Message

__all__ = ["is_trials", "parse_trials"]


def is_trials(raw: Any) -> bool:
    """Whether a parsed record is a group of trials."""
    return isinstance(raw, dict) and "completions" in raw


def parse_trials(record: Value, source: str) -> list[Conversation]:
    """The trials of a record; without a ``task`` it is named by the record's number.

    Raises:
        RecordError: a field is missing or of the wrong type, or there is another number of rewards.
    """
    given, task = record["prompt"], record.get("task")
    prompt = (Message("user", given.text()),) if isinstance(given.raw, str) else parse_messages(given)
    answers = [parse_answer(answer) for answer in record["completions"].items("a list of completions")]
    if not answers:
        record["completions"].fail("at least one completion")
    rewards = _parse_rewards(record.get("rewards"), len(answers))
    name = parse_name(task) if task else str(record.place.record)
    tools, options = parse_tools(record), parse_template_options(record)
    return [
        Conversation(name, trial, (*prompt, *answer), reward, source, tools, options, record.place)
        for trial, (answer, reward) in enumerate(zip(answers, rewards, strict=True))
    ]


def _parse_rewards(value: Value | None, count: int) -> list[float | None]:
    if value is None:
        return [None] * count
    rewards = [entry.number() for entry in value.items("a list of rewards")]
    if len(rewards) != count:
        raise value.place.error(f"expected one reward per completion, {count}, got {len(rewards)}")
    return [*rewards]
