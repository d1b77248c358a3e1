"""Trajectories of tau-bench (Yao et al. 2024, https://arxiv.org/abs/2406.12045).

A file of ``historical_trajectories`` is a JSON list of ``{task_id, reward, trial, info, traj}``, where
``traj`` is a list of messages in the OpenAI format with tool calls. Trials of one task start alike and go
apart when the agent samples.
"""

from typing import Any

from treefx.data.openai_chat import parse_message
from treefx.data.trajectories import Conversation

__all__ = ["is_tau_bench", "read_tau_bench"]


def is_tau_bench(document: Any) -> bool:
    """Whether a parsed file is a list of tau-bench trajectories."""
    return (
        isinstance(document, list)
        and bool(document)
        and all(
            isinstance(entry, dict) and "task_id" in entry and isinstance(entry.get("traj"), list) for entry in document
        )
    )


def read_tau_bench(document: Any, source: str) -> list[Conversation]:
    """Conversations of a parsed file, one per trajectory; ``task`` is its ``task_id``."""
    conversations = []
    for entry in document:
        task, trial = str(entry["task_id"]), int(entry.get("trial", 0))
        place = f"{source}, task {task}, trial {trial}"
        messages = tuple(parse_message(message, place) for message in entry["traj"])
        conversations.append(Conversation(task, trial, messages, entry.get("reward"), source))
    return conversations
