"""Traces of engines: read as recorded, recognised by their contents, refused where they contradict themselves."""

import copy
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.data.engines import (
    DataProto,
    dataproto,
    gym_rollout,
    node,
    slime_file,
    slime_sample,
    verifiers_episode,
    verifiers_result,
)
from treefx.data import (
    ReadReport,
    Trace,
    holds_traces,
    load,
    read_traces,
    trace_batch,
    trace_samples,
    traces_of_dataproto,
)
from treefx.errors import InputError, RecordError

LINEAR = [1, 2, 3, 4, 5, 9, 10, 11, 6, 7, 9, 12]
TRAINED = [6, 7, 11]
LOGPROBS = {6: -0.5, 7: -1.5, 11: -0.5}
VERL = {"input": "ask", "output": "answer", "gts": "4", "score": 1.0, "step": 3}


def write(folder: Path, *records: Any, name: str = "a.jsonl") -> Path:
    path = folder / name
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def read(folder: Path, *records: Any, **options: Any) -> list[Trace]:
    return list(read_traces(write(folder, *records), **options))


def rows(trace: Trace) -> list[tuple[list[int], list[int]]]:
    """Per row its tokens and the places of trained ones."""
    return [(sample.tokens.tolist(), np.flatnonzero(sample.labels >= 0).tolist()) for sample in trace_samples([trace])]


def logprobs(trace: Trace, path: list[int]) -> dict[int, float]:
    values = np.concatenate(
        [np.zeros(len(each.tokens)) if (each := trace.nodes[i]).logprobs is None else each.logprobs for i in path]
    )
    return {int(place): float(values[place]) for place in np.flatnonzero(values)}


def test_a_graph_of_verifiers_keeps_its_branches(tmp_path: Path) -> None:
    trace, other = read(tmp_path, verifiers_episode(), verifiers_episode(20, 0.0))
    assert [each.parent for each in trace.nodes] == [-1, 0, 1, 2, 3, 2, 5]
    first, second = rows(trace)
    assert first == (LINEAR, TRAINED)
    assert second == ([*LINEAR[:8], 8, 9, 13, 14], [6, 7, 10, 11])
    assert logprobs(trace, trace.paths()[0]) == LOGPROBS
    assert trace.reward == 1.0 + 2.0 * 0.25 and other.reward == 0.5
    assert trace.group == other.group and trace.task == "k" and (trace.trial, other.trial) == (0, 1)


def test_a_trace_of_verifiers_may_stand_alone_and_name_its_reward(tmp_path: Path) -> None:
    (trace,) = read(tmp_path, verifiers_episode()["traces"][0], reward_key="short")
    assert trace.reward == 0.5 and len(trace.nodes) == 7
    assert trace.rewards == {"right": 1.0, "short": 0.5}
    with pytest.raises(RecordError, match=r"rewards: expected a reward 'long', got an object with the fields 'right'"):
        read(tmp_path, verifiers_episode(), reward_key="long")


def test_group_role_and_frozen_agent_of_verifiers(tmp_path: Path) -> None:
    frozen = {"config": {}, "name": "judge", "trainable": False}
    (trace,) = read(tmp_path, verifiers_episode(agent=frozen) | {"group": {"id": "g"}})
    assert trace.task == "g, judge"
    assert not any(each.trained.any() for each in trace.nodes)


def test_values_of_verifiers_stand_at_sampled_tokens(tmp_path: Path) -> None:
    record = verifiers_episode()
    record["traces"][0]["nodes"][2] |= {"advantages": [1.0, 2.0], "loss_weights": {"echo": [0.0, 0.5, 1.0]}}
    (trace,) = read(tmp_path, record)
    found = trace.nodes[2]
    assert found.advantages is not None and found.advantages.tolist() == [0.0, 1.0, 2.0]
    assert found.loss_weights["echo"].tolist() == [0.0, 0.5, 1.0]


@pytest.mark.parametrize("resumed", [True, False])
def test_a_compaction_that_was_not_resumed_is_no_row(resumed: bool, tmp_path: Path) -> None:
    record = verifiers_episode()
    nodes = record["traces"][0]["nodes"]
    nodes[6]["semantic_parents"] = [{"node": 2, "type": "compaction_attempt"}]
    nodes.append(node(None, "user", [1, 8], semantic_parents=[{"node": 6, "type": "compaction"}] if resumed else []))
    (trace,) = read(tmp_path, record)
    lengths = [len(tokens) for tokens, _ in rows(trace)]
    assert lengths == ([12, 12, 2] if resumed else [12, 2])  # nodes 5 and 6 are of the second row only
    assert sum(len(each.tokens) for each in trace.nodes) == (18 if resumed else 14)


def test_a_message_without_tokens_is_passed_over(tmp_path: Path) -> None:
    record = verifiers_episode()
    record["traces"][0]["nodes"][1] = node(0, "user", [])
    (trace,) = read(tmp_path, record)
    assert rows(trace)[0][0] == [1, 2, *LINEAR[5:]]


def test_steps_of_verifiers_are_chained_where_they_continue(tmp_path: Path) -> None:
    (trace,) = read(tmp_path, verifiers_result())
    assert rows(trace) == [(LINEAR, TRAINED), ([1, 2, 8, 9, 13, 14], [4, 5])]
    assert logprobs(trace, trace.paths()[0]) == LOGPROBS
    assert trace.task == "4" and trace.reward == 1.0 and trace.nodes[1].reward == 0.5


def test_results_of_verifiers_are_conversations_too(tmp_path: Path) -> None:
    (found,) = load(write(tmp_path, verifiers_result()))
    assert [message.role for message in found.messages] == ["user", "assistant", "tool", "assistant"]
    assert found.messages[1].tool_calls[0].name == "look" and found.messages[1].tool_calls[0].arguments == '{"up": 1}'
    assert found.tools[0]["function"]["name"] == "look" and found.task == "4" and found.reward == 1.0


def test_results_of_verifiers_without_token_ids_are_conversations_only(tmp_path: Path) -> None:
    record = verifiers_result()
    for step in record["trajectory"]:
        step["tokens"] = None
    path = write(tmp_path, record)
    assert not holds_traces(path) and len(load(path)) == 1
    with pytest.raises(RecordError, match=r"expected a trace of verifiers .*trajectory: \[\{tokens\}\]\}; NeMo"):
        list(read_traces(path))


def test_rollouts_of_nemo_gym(tmp_path: Path) -> None:
    first, second = read(tmp_path, gym_rollout(), gym_rollout(20, 1, 0.0))
    assert rows(first) == [(LINEAR, TRAINED)] and logprobs(first, first.paths()[0]) == LOGPROBS
    assert first.group == second.group and (first.task, first.trial, second.trial) == ("4", 0, 1)
    assert (first.reward, second.reward) == (1.0, 0.0)


def test_a_call_of_nemo_gym_with_another_history_begins_a_row(tmp_path: Path) -> None:
    record = gym_rollout()
    record["response"]["output"][3]["prompt_token_ids"][6] = 99
    (trace,) = read(tmp_path, record)
    assert [tokens for tokens, _ in rows(trace)] == [LINEAR[:8], [*LINEAR[:6], 99, *LINEAR[7:]]]
    assert [places for _, places in rows(trace)] == [[6, 7], [11]]


def test_a_step_of_slime(tmp_path: Path) -> None:
    samples = [slime_sample(), slime_sample(20, 1, np.float64(0.5)), slime_sample(30, 2, remove_sample=True)]
    path = slime_file(tmp_path / "0.pt", samples)
    first, second, third = read_traces(tmp_path)
    assert holds_traces(path) and rows(first) == [(LINEAR, TRAINED)] and logprobs(first, [0, 1]) == LOGPROBS
    assert (first.group, first.trial) == (third.group, 0) and (second.reward, second.trial) == (0.5, 1)
    assert rows(third)[0][1] == []


def test_slime_without_a_mask_trains_the_response(tmp_path: Path) -> None:
    sample = slime_sample(loss_mask=None, rollout_log_probs=None, reward={"right": 1, "form": 0.5}, rollout_id=7)
    (trace,) = read_traces(slime_file(tmp_path / "0.pt", [sample]), reward_key="form")
    assert rows(trace) == [(LINEAR, [6, 7, 8, 9, 10, 11])] and trace.nodes[1].logprobs is None
    assert (trace.reward, trace.trial, trace.rewards) == (0.5, 7, {"right": 1.0, "form": 0.5})
    (trace,) = read_traces(tmp_path)
    with pytest.raises(
        InputError, match=r"got rewards by name \(right, form\): choose one by read_traces\(reward_key=\)"
    ):
        trace_batch([trace])
    with pytest.raises(RecordError, match=r"samples\[0\].reward.other: is missing; the fields are 'right', 'form'"):
        list(read_traces(tmp_path, reward_key="other"))


def test_a_dataproto_of_verl() -> None:
    first, second = traces_of_dataproto(dataproto())
    assert rows(first) == [(LINEAR, TRAINED)] and logprobs(first, [0, 1]) == LOGPROBS
    assert rows(second) == [([*LINEAR[:6], 20, 11], [6, 7])]
    assert first.group == second.group and (first.reward, second.reward) == (1.0, 0.25)
    assert second.nodes[1].advantages is not None and second.nodes[1].advantages.tolist() == [-1.0, -1.0]
    bare = dataproto()
    del bare.batch["response_mask"], bare.batch["token_level_scores"], bare.non_tensor_batch["uid"]
    first, second = traces_of_dataproto(bare)
    assert rows(first)[0][1] == [6, 7, 8, 9, 10, 11] and first.group != second.group and first.reward is None


def test_lines_of_verl_are_texts_that_cannot_be_trained(tmp_path: Path) -> None:
    first, second, third = read(tmp_path, VERL, VERL | {"output": "no", "score": 0}, VERL | {"step": 4})
    assert first.texts == ("ask", "answer") and first.group == second.group != third.group
    with pytest.raises(InputError, match=r"a\.jsonl, line 1: expected token ids and a loss mask, got texts only"):
        trace_samples([first])


def change(record: Any, place: str, value: Any) -> Any:
    """A record with another value at a path such as "traces.0.nodes"; a function changes the value."""
    record = copy.deepcopy(record)
    at, *names = record, *place.split(".")
    for name in names[:-1]:
        at = at[int(name) if isinstance(at, list) else name]
    last = int(names[-1]) if isinstance(at, list) else names[-1]
    at[last] = value(at[last]) if callable(value) else value
    return record


_NODE = "traces.0.nodes.2"
_STEP = "trajectory.0.tokens"
_ITEM = "response.output.1"
BROKEN: dict[str, tuple[Any, str, Any, str]] = {
    "verifiers: version": (verifiers_episode(), "traces.0.version", 2, "expected a trace of version 1, got .*2"),
    "verifiers: parent": (verifiers_episode(), f"{_NODE}.parent", 4, "expected the number of an earlier node, below 2"),
    "verifiers: mask": (verifiers_episode(), f"{_NODE}.mask", [True] * 4, "mask: expected 3 entries, one per token"),
    "verifiers: values": (verifiers_episode(), f"{_NODE}.mask", [0, 1, 2], r"mask\[2\]: expected 0 or 1, got .*2"),
    "verifiers: logprobs": (verifiers_episode(), f"{_NODE}.logprobs", [-1.0], "logprobs: expected 2 entries"),
    "verifiers: negative": (verifiers_episode(), f"{_NODE}.token_ids", [9, -1, 1], r"token_ids\[1\]: expected a token"),
    "verifiers: relayed": (verifiers_episode(), f"{_NODE}.token_ids", [], r"nodes\[2\].token_ids: expected the token"),
    "verifiers: no nodes": (verifiers_episode(), "traces.0.nodes", [], "nodes.token_ids: expected the token"),
    "verifiers: image": (
        verifiers_episode(),
        f"{_NODE}.message.content",
        [{"type": "image_url", "image_url": {"url": "x"}}],
        "expected text: the file holds no pixels",
    ),
    "verifiers: step": (verifiers_result(), _STEP, None, r"trajectory\[0\].tokens: is missing or null: the model"),
    "verifiers: step's mask": (verifiers_result(), f"{_STEP}.completion_mask", [1], "expected 2 entries, one per"),
    "verifiers: prompt's mask": (verifiers_result(), f"{_STEP}.prompt_mask", [1] * 6, "expected a mask of zeros"),
    "verifiers: no ids": (verifiers_result(), f"{_STEP}.completion_ids", None, "got none of completion_ids"),
    "gym: one of three": (gym_rollout(), f"{_ITEM}.generation_log_probs", None, "got none of generation_log_probs"),
    "gym: lengths": (gym_rollout(), f"{_ITEM}.generation_log_probs", [-1.0], "expected 2 entries, one per token"),
    "gym: texts": (gym_rollout(), "response.output", lambda output: output[:1], "return_token_id_information: true"),
    "gym: empty": (
        gym_rollout(),
        "response.output",
        [{"type": "message", "prompt_token_ids": [], "generation_token_ids": [], "generation_log_probs": []}],
        "got 1 items without: collect the rollouts with return_token_id_information: true",
    ),
    "gym: input only": (gym_rollout(), "response", None, "response: is null; the fields are"),
    "verl: score": (VERL, "score", "high", "score: expected a finite number, got text 'high'"),
}  # fmt: skip
SAMPLES: dict[str, tuple[dict[str, Any], str]] = {
    "mask longer than the response": (
        {"loss_mask": [1] * 7},
        r"samples\[0\].loss_mask: expected 6 entries, one per token",
    ),
    "response longer than tokens": ({"response_length": 13}, "expected a number of tokens, at most the 12 of tokens"),
    "logprobs": ({"rollout_log_probs": [-1.0]}, "rollout_log_probs: expected 6 entries, one per token of the resp"),
    "not finite": ({"rollout_log_probs": [float("nan")] * 6}, r"rollout_log_probs\[0\]: expected a finite number"),
    "empty fields of images are none, but no tokens": (
        {"tokens": [], "multimodal_inputs": {}, "response_length": 0},
        "tokens: expected at least one token id",
    ),
    "no number": ({"reward": "high"}, "reward: expected a finite number, got text 'high'"),
    "images": ({"multimodal_train_inputs": {"pixel_values": torch.ones(1)}}, "a row with images cannot be trained"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_records_are_refused(name: str, tmp_path: Path) -> None:
    record, place, value, message = BROKEN[name]
    with pytest.raises(RecordError, match=message):
        read(tmp_path, change(record, place, value))
    assert read(tmp_path, record)


@pytest.mark.parametrize("name", SAMPLES)
def test_broken_samples_are_refused(name: str, tmp_path: Path) -> None:
    changes, message = SAMPLES[name]
    with pytest.raises(RecordError, match=message):
        list(read_traces(slime_file(tmp_path / "0.pt", [slime_sample(**changes)])))


class Other:
    """No library lets PyTorch load it, as some do with paths."""


def test_torch_files_that_are_truncated_foreign_or_hold_code(tmp_path: Path) -> None:
    path = slime_file(tmp_path / "0.pt", [slime_sample()])
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(RecordError, match=r"0\.pt: is no whole file of torch\.save .*truncated"):
        list(read_traces(path))
    slime_file(path, [slime_sample(metadata={"other": Other()})])
    with pytest.raises(
        RecordError, match=r"holds an object of tests.*Other, which is not loaded, as that may run code"
    ):
        list(read_traces(path))
    torch.save({"model": {}}, path)
    with pytest.raises(RecordError, match=r"expected a trace of verifiers .*; slime .*, got an object with the field"):
        list(read_traces(path))
    with pytest.raises(RecordError, match="at most 100 bytes"):
        list(read_traces(path, max_record_bytes=100))


def test_a_pickle_is_refused_with_the_way_out(tmp_path: Path) -> None:
    path = tmp_path / "dump"
    path.write_bytes(pickle.dumps(DataProto({})))
    with pytest.raises(RecordError, match="a pickle, which is not loaded.*traces_of_dataproto"):
        list(read_traces(path))


def test_a_record_of_two_engines_or_of_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        RecordError, match=r"expected the fields of one engine, got those of verifiers .* and of NeMo Gym"
    ):
        read(tmp_path, verifiers_episode() | gym_rollout())
    with pytest.raises(RecordError, match="expected a trace of verifiers .*, got an object with the fields 'messages'"):
        read(tmp_path, {"messages": []})


def test_a_file_holds_one_engine_and_broken_records_are_counted(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match=r"line 2: expected a record of NeMo Gym .*, got one of verl"):
        read(tmp_path, gym_rollout(), VERL)
    report = ReadReport()
    assert len(read(tmp_path, gym_rollout(), VERL, gym_rollout(), on_error="skip", report=report)) == 2
    assert report.skipped == 1


_PROTO: dict[str, tuple[Callable[[DataProto], Any], str]] = {
    "mask beyond the tokens": (
        lambda data: data.batch["response_mask"].fill_(1),
        "row 1 of the DataProto, response_mask: expected 0 where attention_mask is 0",
    ),
    "holes": (
        lambda data: data.batch["attention_mask"][0, 3].fill_(0),
        "row 0 of the DataProto, attention_mask: expected one run of ones",
    ),
    "other ids": (
        lambda data: data.batch["input_ids"][1, 8].fill_(9),
        "row 1 of the DataProto, input_ids: expected prompts and responses end to end",
    ),
    "nan": (
        lambda data: data.batch["rollout_log_probs"][0, 0].fill_(torch.nan),
        "row 0 of the DataProto, rollout_log_probs: expected finite numbers",
    ),
    "shape": (
        lambda data: data.batch.update(response_mask=torch.ones(2, 7)),
        r"response_mask: expected shape \[2, 6\], got \[2, 7\]",
    ),
    "missing": (lambda data: data.batch.pop("attention_mask"), "got none of attention_mask"),
    "images": (lambda data: data.non_tensor_batch.update(multi_modal_inputs=[{}, {"pixel_values": 1}]), "with images"),
    "nested": (
        lambda data: data.batch.update(
            responses=torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
        ),
        "responses: expected a padded tensor of two dimensions, got a nested tensor",
    ),
}


@pytest.mark.parametrize("name", _PROTO)
def test_contradicting_dataprotos_are_refused(name: str) -> None:
    data = dataproto()
    spoil, message = _PROTO[name]
    spoil(data)
    with pytest.raises(InputError, match=message):
        traces_of_dataproto(data)


def test_no_dataproto_at_all() -> None:
    with pytest.raises(InputError, match="expected a DataProto with batch and non_tensor_batch, got dict"):
        traces_of_dataproto({})
