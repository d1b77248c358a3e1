"""Loaders, template, samples and batches, on small inline trajectories; on real ones where there are any."""

import json
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from treefx import Forest
from treefx.data import (
    IGNORED,
    ByteTokenizer,
    Conversation,
    Message,
    Sample,
    ToolCall,
    batches,
    collate,
    group_batch,
    group_trials,
    load,
    make_samples,
    merge_turns,
    prefix_order,
    scripted_conversations,
    sharing_statistics,
    train_tokenizer,
    turn_samples,
    whole_sample,
)
from treefx.errors import InputError, RecordError

SHARED_DATA = Path(__file__).resolve().parents[3] / "shared" / "data"


# Tokenizers -----------------------------------------------------------------------------------------------------------


def test_byte_tokenizer_round_trip() -> None:
    tokenizer = ByteTokenizer()
    text = "naïve <end> 日本 \n\x00"
    ids = tokenizer.encode(text)
    assert ids.dtype == np.int64 and ids.tolist() == list(text.encode())
    assert tokenizer.decode([*ids, tokenizer.special("<end>")]) == text + "<end>"


def test_trained_tokenizer_round_trip_and_size() -> None:
    pytest.importorskip("tokenizers")
    tokenizer = train_tokenizer(["the cat sat on the mat"] * 3, vocab_size=280)
    assert 256 + 9 < tokenizer.vocab_size <= 280
    text = " <system> unseen: naïve 日本 the cat"
    ids = tokenizer.encode(text)
    assert ids.max() < tokenizer.text_size
    assert tokenizer.decode(ids) == text
    assert len(tokenizer.encode("the cat sat")) < len("the cat sat")


def test_trained_tokenizer_does_not_depend_on_the_order_of_texts() -> None:
    pytest.importorskip("tokenizers")
    texts = [f"word{i} and word{i + 1}" for i in range(20)]
    first, second = train_tokenizer(texts, 300), train_tokenizer(reversed(texts), 300)
    assert first.encode("word3 and word4").tolist() == second.encode("word3 and word4").tolist()


def test_tokenizers_refuse_bad_input(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="special token must be one of .* got '<eos>'"):
        ByteTokenizer().special("<eos>")
    with pytest.raises(InputError, match=r"in \[0, 265\), got 265"):
        ByteTokenizer().decode([265])
    with pytest.raises(InputError, match="at least 265 .* got 100"):
        train_tokenizer(["a"], vocab_size=100)
    monkeypatch.setitem(__import__("sys").modules, "tokenizers", None)
    with pytest.raises(InputError, match="pip install"):
        train_tokenizer(["a"])


# Samples


@pytest.fixture
def conversation() -> Conversation:
    return Conversation(
        "t",
        0,
        (
            Message("system", "S"),
            Message("user", "u"),
            Message("assistant", "a", reasoning="r"),
            Message("tool", "x", name="n"),
            Message("assistant", "b", (ToolCall("f", "{}"),)),
            Message("user", "v"),
            Message("assistant", "c"),
        ),
    )


def _labelled(sample: Sample) -> str:
    kept = sample.labels != IGNORED
    assert np.array_equal(sample.labels[kept], sample.tokens[kept])
    return ByteTokenizer().decode(sample.tokens[kept])


def test_turn_samples_are_prompt_and_completion(conversation: Conversation) -> None:
    first, second, third = turn_samples(conversation, ByteTokenizer())
    decode = ByteTokenizer().decode
    assert decode(first.tokens) == "<system>S<end><user>u<end><assistant><think>r</think>a<end>"
    history = "<system>S<end><user>u<end><assistant>a<end><tool>n\nx<end>"
    assert decode(second.tokens) == history + "<assistant>b<call>f\n{}<end>"
    assert [_labelled(sample) for sample in (first, second, third)] == [
        "<think>r</think>a<end>",
        "b<call>f\n{}<end>",
        "c<end>",
    ]
    assert [(sample.task, sample.turn) for sample in (first, second, third)] == [("t", 0), ("t", 1), ("t", 2)]


def test_what_our_template_has_no_place_for_is_not_left_out_in_silence(conversation: Conversation) -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    for given in ({"tools": (tool,)}, {"template_options": {"thinking": False}}):
        for make in (turn_samples, whole_sample):
            with pytest.warns(UserWarning, match=f"come with {next(iter(given)).replace('_', ' ')}"):
                make(replace(conversation, **given), ByteTokenizer())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        turn_samples(conversation, ByteTokenizer())


def test_merged_turns_fork_where_reasoning_is_left_out(conversation: Conversation) -> None:
    turns = turn_samples(conversation, ByteTokenizer())
    first, rest = merge_turns(turns)
    assert first is turns[0]
    assert np.array_equal(rest.tokens, turns[2].tokens)
    assert _labelled(rest) == "b<call>f\n{}<end>c<end>"
    total = sum(int((sample.labels != IGNORED).sum()) for sample in turns)
    assert sum(int((sample.labels != IGNORED).sum()) for sample in (first, rest)) == total


def test_merging_keeps_a_row_that_labels_the_same_tokens_twice(conversation: Conversation) -> None:
    turns = turn_samples(conversation, ByteTokenizer())
    assert len(merge_turns([turns[0], turns[0]])) == 2


def test_whole_sample_labels_every_assistant_message(conversation: Conversation) -> None:
    sample = whole_sample(conversation, ByteTokenizer())
    assert ByteTokenizer().decode(sample.tokens).endswith("<user>v<end><assistant>c<end>")
    assert _labelled(sample) == "<think>r</think>a<end>b<call>f\n{}<end>c<end>"


def test_make_samples_refuses_an_unknown_form(conversation: Conversation) -> None:
    with pytest.raises(InputError, match="form must be .* got 'rows'"):
        make_samples([conversation], ByteTokenizer(), "rows")  # type: ignore[arg-type]


# The scripted agent


def test_scripted_conversations_follow_from_the_seed() -> None:
    assert scripted_conversations(3, 2, seed=5) == scripted_conversations(3, 2, seed=5)
    assert scripted_conversations(3, 2, seed=5) != scripted_conversations(3, 2, seed=6)
    assert scripted_conversations(2, 2)[0] == scripted_conversations(9, 5)[0]


def test_scripted_trials_share_a_beginning_and_go_apart() -> None:
    conversations = scripted_conversations(4, 6)
    for task in {conversation.task for conversation in conversations}:
        trials = [conversation for conversation in conversations if conversation.task == task]
        assert len({trial.messages[:2] for trial in trials}) == 1
        assert len({trial.messages for trial in trials}) > 1


def test_scripted_conversations_have_calls_answers_and_retries() -> None:
    messages = [message for conversation in scripted_conversations(8, 4) for message in conversation.messages]
    assert {call.name for message in messages for call in message.tool_calls} >= {
        "find_customer",
        "get_order",
        "find_variants",
        "cancel_order",
        "return_items",
        "exchange_item",
        "change_address",
    }
    answers = [json.loads(message.content) for message in messages if message.role == "tool"]
    assert any("error" in answer for answer in answers if isinstance(answer, dict))
    assert all(json.loads(call.arguments) for message in messages for call in message.tool_calls)


def test_scripted_conversations_refuse_no_tasks() -> None:
    with pytest.raises(InputError, match="at least 1, got tasks=0"):
        scripted_conversations(0, 1)


# Batches


def _sample(tokens: list[int], task: str = "t") -> Sample:
    array = np.array(tokens, dtype=np.int64)
    return Sample(array, np.where(array > 2, array, IGNORED), task, 0, 0)


def test_collate_pads_on_the_right() -> None:
    batch = collate([_sample([1, 2, 3]), _sample([4])], pad_id=9, pad_multiple=4)
    assert batch.input_ids.tolist() == [[1, 2, 3, 9], [4, 9, 9, 9]]
    assert batch.attention_mask.tolist() == [[1, 1, 1, 0], [1, 0, 0, 0]]
    assert batch.labels.tolist() == [[IGNORED, IGNORED, 3, IGNORED], [4, IGNORED, IGNORED, IGNORED]]
    assert {tensor.dtype for tensor in batch.model_inputs().values()} == {torch.int64}
    assert (batch.shape, batch.raw_tokens) == ((2, 4), 4)


def test_collate_to_a_length() -> None:
    assert collate([_sample([1, 2])], pad_id=0, length=5).shape == (1, 5)
    with pytest.raises(InputError, match="at least the longest sample's 2 tokens, got 1"):
        collate([_sample([1, 2])], pad_id=0, length=1)
    with pytest.raises(InputError, match="at least one sample"):
        collate([], pad_id=0)


def test_prefix_order_puts_rows_next_to_what_they_share() -> None:
    rows = [_sample([300, 1]), _sample([2, 5]), _sample([300]), _sample([2, 4, 9]), _sample([2])]
    assert [row.tokens.tolist() for row in prefix_order(rows)] == [[2], [2, 4, 9], [2, 5], [300], [300, 1]]


def test_batches_hold_one_task_and_every_sample_once() -> None:
    rows = [_sample([i % 3, i], task=str(i % 2)) for i in range(11)]
    groups = batches(rows, rows=4)
    assert [len(group) for group in groups] == [4, 2, 4, 1]
    assert all(len({row.task for row in group}) == 1 for group in groups)
    assert sorted(id(row) for group in groups for row in group) == sorted(map(id, rows))


def test_batches_respect_the_token_limit() -> None:
    rows = [_sample(list(range(size))) for size in (1, 2, 3, 4, 5)]
    groups = batches(rows, rows=8, max_tokens=6)
    assert all(len(group) * max(map(len, group)) <= 6 for group in groups)
    assert [[len(row) for row in group] for group in groups] == [[1, 2], [3], [4], [5]]
    with pytest.raises(InputError, match="got 4 for a row of 5 tokens"):
        batches(rows, rows=8, max_tokens=4)
    with pytest.raises(InputError, match="at least 1, got 0"):
        batches(rows, rows=0)


def test_batches_of_a_task_share_more_than_shuffled_ones() -> None:
    samples = make_samples(scripted_conversations(4, 3), ByteTokenizer())
    shuffled = [samples[i] for i in np.random.default_rng(0).permutation(len(samples))]
    tokens = sum(Forest.from_sequences([row.tokens for row in group]).num_tokens for group in batches(shuffled, rows=8))
    chunks = [shuffled[i : i + 8] for i in range(0, len(shuffled), 8)]
    unsorted = sum(Forest.from_sequences([row.tokens for row in chunk]).num_tokens for chunk in chunks)
    assert tokens < 0.6 * unsorted


# Statistics


def test_sharing_statistics_counts_three_baselines(conversation: Conversation) -> None:
    tokenizer = ByteTokenizer()
    twin = Conversation("t", 1, (*conversation.messages[:-1], Message("assistant", "d")))
    other = Conversation("o", 0, conversation.messages)
    statistics = sharing_statistics([conversation, twin, other], tokenizer)
    turns = [turn_samples(each, tokenizer) for each in (conversation, twin, other)]
    assert (statistics.tasks, statistics.conversations, statistics.rows) == (2, 3, 9)
    assert statistics.merged_rows == 6
    assert statistics.raw_tokens == sum(len(row) for rows in turns for row in rows)
    # The tree of one conversation: its last row, and the first completion, which forks off after its header.
    alone = len(turns[0][2]) + len("r") + 2 + len("a") + 1
    # The twin adds another last letter and the end after it.
    assert statistics.tokens == 2 * alone + 2
    assert statistics.sharing_ratio == pytest.approx(statistics.merged_ratio * statistics.branching_ratio)
    assert statistics.to_dict()["sharing_ratio"] == statistics.sharing_ratio


def test_statistics_of_nothing_are_refused() -> None:
    asked = Conversation("t", 0, (Message("user", "u"),))
    with pytest.raises(InputError, match="at least one assistant message .* none in 1 conversations"):
        sharing_statistics([asked], ByteTokenizer())


def test_statistics_pass_over_tasks_without_an_answer(conversation: Conversation) -> None:
    asked = Conversation("unanswered", 0, (Message("user", "u"),))
    alone = sharing_statistics([conversation], ByteTokenizer())
    both = sharing_statistics([asked, conversation], ByteTokenizer())
    assert (both.tokens, both.rows, both.tasks) == (alone.tokens, alone.rows, 2)


# Real trajectories


@pytest.fixture
def real_files() -> Iterator[Path]:
    if not SHARED_DATA.is_dir():
        pytest.skip("no folder of real trajectories next to the checkout")
    yield SHARED_DATA


def test_real_tau_bench(real_files: Path) -> None:
    conversations = load(real_files / "tau_bench_airline_gpt4o.json")
    assert len(conversations) == 100
    assert len({conversation.task for conversation in conversations}) == 25
    group = [conversation for conversation in conversations if conversation.task in ("0", "1")]
    statistics = sharing_statistics(group, ByteTokenizer())
    assert statistics.conversations == 8 and statistics.rows > 50
    assert statistics.sharing_ratio > 5 and statistics.branching_ratio > 1.1


def test_real_tau_bench_whole(real_files: Path) -> None:
    """Per turn, merged, and groups of whole trajectories."""
    pytest.importorskip("tokenizers")
    conversations = load(real_files / "tau_bench_airline_gpt4o.json")
    tokenizer = train_tokenizer((text for each in conversations for text in each.texts()), 16384)
    statistics = sharing_statistics(conversations, tokenizer)
    assert (statistics.tasks, statistics.conversations, statistics.merged_rows) == (25, 100, 100)
    assert 14 < statistics.sharing_ratio < 14.6
    assert 10.2 < statistics.merged_ratio < 10.8
    whole = [group_batch([group], tokenizer, "whole").forest for group in group_trials(conversations)]
    assert [len(forest) for forest in whole] == [4] * 25
    assert 1.3 < sum(forest.raw_tokens for forest in whole) / sum(forest.num_tokens for forest in whole) < 1.4


@pytest.mark.parametrize("name", ["tau_bench_airline_gpt4o.json", "toolbench"])
def test_real_files_that_are_broken_give_one_clear_error(real_files: Path, tmp_path: Path, name: str) -> None:
    source = real_files / name
    source = source if source.is_file() else sorted(source.iterdir())[0]
    data = source.read_bytes()
    text = json.loads(data)
    mistyped = json.dumps(text[:3] + [{**text[3], "traj": "none"}] if isinstance(text, list) else {**text, "tree": 1})
    broken = {
        "truncated": (data[: len(data) * 2 // 3], "is not JSON: .*(truncated|line [0-9]+)"),
        "mis-encoded": (data.replace(b"a", b"\xe9", 40), "is not UTF-8"),
        "UTF-16": (data.decode().encode("utf-16"), "is not JSON but UTF-16 text"),
        "wrong-typed": (mistyped.encode(), r"field \[3\].traj: expected|expected a tau-bench trajectory"),
    }
    for case, (content, words) in broken.items():
        path = tmp_path / f"{case}.json"
        path.write_bytes(content)
        with pytest.raises(RecordError, match=words) as refusal:
            load(path)
        assert str(refusal.value).startswith(str(path)) and len(str(refusal.value)) < len(str(path)) + 400


def test_real_toolbench(real_files: Path) -> None:
    conversations = load(real_files / "toolbench")
    assert len({conversation.task for conversation in conversations}) == 10
    statistics = sharing_statistics(conversations, ByteTokenizer())
    assert statistics.conversations == len(conversations) > 50
    assert statistics.branching_ratio > 2
