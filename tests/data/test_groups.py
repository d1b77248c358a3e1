"""Groups of trials in streams, and as batches with rewards."""

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from treefx.data import (
    ByteTokenizer,
    Conversation,
    Message,
    Place,
    TrialGroup,
    group_batch,
    group_trials,
    read_groups,
    turn_samples,
)
from treefx.errors import InputError, RecordError
from treefx.rl import grpo


def trial(task: str, number: int = 0, reward: float | None = 1.0, path: str = "a.jsonl") -> Conversation:
    said = (Message("user", f"do {task}"), Message("assistant", f"answer {number}", reasoning=str(number)))
    messages = (*said, Message("user", "sure?"), Message("assistant", "yes"))
    return Conversation(task, number, messages, reward, "a", place=Place(path, number + 1))


@example(["a", "b", "a", "c", "a"], 2)
@given(st.lists(st.sampled_from("abcde"), max_size=20), st.sampled_from([1, 2, 3, None]))
def test_groups_are_whole_or_the_late_trial_is_named(tasks: list[str], window: int | None) -> None:
    trials = [trial(task, number) for number, task in enumerate(tasks)]
    found = []
    try:
        for group in group_trials(iter(trials), window=window):
            found.append(group)
    except RecordError as error:
        assert window is not None and error.line is not None
        late = tasks[error.line - 1]
        between = {task for task in tasks[: error.line - 1][::-1][: tasks[: error.line - 1][::-1].index(late)]}
        assert len(between) >= window  # so many other tasks came in between
        assert late in [group.task for group in found]
        return
    assert sorted(group.task for group in found) == sorted(set(tasks))
    assert all(list(group.trials) == [each for each in trials if each.task == group.task] for group in found)


def test_no_more_tasks_are_open_than_the_window() -> None:
    taken = []

    def stream() -> Iterator[Conversation]:
        for number in range(20):
            taken.append(number)
            yield trial(str(number // 2), number)

    for position, group in enumerate(group_trials(stream(), window=2)):
        assert group.task == str(position)
        assert len(taken) <= 2 * position + 5


def test_tasks_of_one_name_in_two_files_are_two() -> None:
    trials = [trial("t", 0), trial("t", 0, path="b.jsonl"), trial("t", 1)]
    assert [len(group.trials) for group in group_trials(trials)] == [2, 1]


def test_a_window_of_none_at_all_is_refused_at_the_call() -> None:
    with pytest.raises(InputError, match="window must be at least 1, or None"):
        group_trials([], window=0)


def test_groups_from_files_of_both_kinds(tmp_path: Path) -> None:
    def chat(task: str, number: int) -> dict[str, Any]:
        messages = [{"role": "user", "content": task}, {"role": "assistant", "content": str(number)}]
        return {"task": task, "trial": number, "reward": number / 2, "messages": messages}

    path = tmp_path / "trials.jsonl"
    records = [chat("x", 0), chat("y", 0), chat("x", 1), {"prompt": "p", "completions": ["a", "b"], "rewards": [0, 1]}]
    path.write_text("\n".join(map(json.dumps, records)))
    groups = list(read_groups(path))
    assert [(group.task, group.rewards) for group in groups] == [("x", [0, 0.5]), ("y", [0]), ("3", [0, 1])]
    with pytest.raises(RecordError, match="line 3: a trial of task x comes when that task's group is closed"):
        list(read_groups(path, window=1))
    path.write_text("no\n" + json.dumps(chat("x", 0)))
    with pytest.raises(RecordError, match="line 1: is not JSON"):
        list(read_groups(path))
    with pytest.warns(UserWarning, match="skipped 1"):
        assert len(list(read_groups(path, on_error="skip"))) == 1


def test_a_batch_of_groups_has_the_advantages_of_its_trials() -> None:
    rewards = {"x": [1.0, 0.0, 0.5], "y": [2.0, 2.0]}
    groups = [
        TrialGroup(task, tuple(trial(task, number, reward) for number, reward in enumerate(values)))
        for task, values in rewards.items()
    ]
    batch = group_batch(groups, ByteTokenizer(), "turns")
    advantages = grpo(batch.steps, batch.rewards)
    assert batch.rewards.tolist() == [1.0, 0.0, 0.5, 2.0, 2.0]
    assert torch.allclose(advantages, torch.tensor([1.0, -1.0, 0.0, 0.0, 0.0], dtype=torch.float64))
    assert batch.trial_of_row.tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    assert len(advantages[batch.trial_of_row]) == len(batch.forest) == 10
    rows = [row for group in groups for each in group.trials for row in turn_samples(each, ByteTokenizer())]
    assert [row.tokens.tolist() for row in rows] == [row.tokens.tolist() for row in batch.samples]
    assert torch.equal(batch.forest.raw_weight[1:], torch.cat([torch.from_numpy(row.weights) for row in rows])[1:])
    assert int((batch.forest.parent < 0).sum()) == 1  # the opening of every prompt


def test_what_has_no_reward_or_no_answer_is_named() -> None:
    good = trial("x")
    with pytest.raises(InputError, match="at least one group"):
        group_batch([], ByteTokenizer())
    with pytest.raises(InputError, match="a.jsonl, line 3: task x needs a reward for each"):
        group_batch([TrialGroup("x", (good, trial("x", 2, None)))], ByteTokenizer())
    mute = dataclasses.replace(good, messages=good.messages[:1])
    with pytest.raises(InputError, match="a.jsonl, line 1: a trial needs a message of the assistant"):
        group_batch([TrialGroup("x", (mute,))], ByteTokenizer(), "whole")
