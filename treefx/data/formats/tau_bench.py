"""Trajectories of tau-bench (Yao et al. 2024, https://arxiv.org/abs/2406.12045).

A file of ``historical_trajectories`` is a JSON list of ``{task_id, reward, trial, info, traj}``, where
``traj`` is a list of messages in the OpenAI format with tool calls. Trials of one task start alike and go
apart when the agent samples.
"""

from typing import Any

from treefx.data.files import Value
from treefx.data.formats.openai_chat import parse_messages, parse_name, parse_template_options, parse_tools
from treefx.data.trajectories import Conversation

__all__ = ["is_tau_bench", "parse_tau_bench"]


def is_tau_bench(raw: Any) -> bool:
    """Whether a parsed record is a trajectory of tau-bench."""
    return isinstance(raw, dict) and "task_id" in raw and "traj" in raw


def parse_tau_bench(record: Value, source: str) -> list[Conversation]:
    """The conversation of a record; ``task`` is its ``task_id``.

    Raises:
        RecordError: a field is missing or of the wrong type.
    """
    trial, reward = record.get("trial"), record.get("reward")
    return [
        Conversation(
            task=parse_name(record["task_id"]),
            trial=trial.integer() if trial else 0,
            messages=parse_messages(record["traj"]),
            reward=reward.number() if reward else None,
            source=source,
            tools=parse_tools(record),
            template_options=parse_template_options(record),
            place=record.place,
        )
    ]
