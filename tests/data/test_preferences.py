"""Files of compared and judged answers: every spelling, every refusal, and the step from a file to a loss."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

pytest.importorskip("tokenizers")

from tests.data.chats import make_engine  # noqa: E402
from tests.losses.textbook import assert_equal, row_logprobs, value_and_grad  # noqa: E402
from tests.trainers.support import NEEDS_TRAINERS  # noqa: E402
from treefx import edge_logprobs, losses  # noqa: E402
from treefx.data import (  # noqa: E402
    ByteTokenizer,
    ChatTokenizer,
    Judged,
    Message,
    Place,
    Preference,
    Value,
    collate,
    judged_batch,
    preference_batch,
    read_judged,
    read_preferences,
)
from treefx.data.formats.preferences import parse_preference  # noqa: E402
from treefx.errors import InputError, RecordError  # noqa: E402

ASKED = {"role": "user", "content": "what time is it?"}


def said(text: str, role: str = "assistant") -> dict[str, str]:
    return {"role": role, "content": text}


def write(folder: Path, *records: Any) -> Path:
    path = folder / "answers.jsonl"
    path.write_text("\n".join(json.dumps(record) for record in records), encoding="utf-8")
    return path


USER, NOON, BYE = Message("user", ASKED["content"]), Message("assistant", "it is noon"), Message("assistant", "bye")
PAIR = ((USER,), (NOON,), (BYE,))
SPELLINGS: dict[str, tuple[dict[str, Any], Any]] = {
    "text": ({"prompt": "the sky is", "chosen": " blue", "rejected": " green"}, ("the sky is", " blue", " green")),
    "text with the prompt inside": (
        {"chosen": "the sky is blue.", "rejected": "the sky is green."},
        ("the sky is", " blue.", " green."),
    ),
    "text of which one answer goes on": (
        {"chosen": "the sky is", "rejected": "the sky is green"},
        ("the sky is", "", " green"),
    ),
    "messages": ({"prompt": [ASKED], "chosen": [said("it is noon")], "rejected": [said("bye")]}, PAIR),
    "messages with the prompt inside": (
        {"chosen": [ASKED, said("it is noon")], "rejected": [ASKED, said("bye")]},
        PAIR,
    ),
    "the prompt again in both": (
        {"prompt": [ASKED], "chosen": [ASKED, said("it is noon")], "rejected": [ASKED, said("bye")]},
        PAIR,
    ),
    "its text again in both": (
        {"prompt": ASKED["content"], "chosen": [ASKED, said("it is noon")], "rejected": [ASKED, said("bye")]},
        PAIR,
    ),
    "answers as text": ({"prompt": [ASKED], "chosen": "it is noon", "rejected": "bye"}, PAIR),
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_every_spelling_of_a_pair(tmp_path: Path, spelling: str) -> None:
    record, (prompt, chosen, rejected) = SPELLINGS[spelling]
    (pair,) = read_preferences(write(tmp_path, record))
    assert pair == Preference(prompt, chosen, rejected)
    assert list(read_judged(tmp_path / "answers.jsonl")) == [
        Judged(prompt, chosen, True),
        Judged(prompt, rejected, False),
    ]


def test_judged_answers(tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "clock"}}]
    records = [
        {"prompt": "a", "completion": "b", "label": False},
        {"prompt": [ASKED], "completion": [said("it is noon")], "label": True, "tools": tools},
    ]
    first, second = read_judged(write(tmp_path, *records))
    assert first == Judged("a", "b", False)
    assert second == Judged((USER,), (NOON,), True, tuple(tools))


@given(st.text("ab ", min_size=1), st.text("ab "), st.text("ab "))
def test_the_prompt_inside_text_is_what_trl_extracts(prompt: str, chosen: str, rejected: str) -> None:
    trl = pytest.importorskip("trl", reason=NEEDS_TRAINERS)
    record = {"chosen": prompt + chosen, "rejected": prompt + rejected}
    size = len(os.path.commonprefix([*record.values()]))
    assume(size < min(map(len, record.values())) and record["chosen"][0] != " ")  # TRL has no rule for these
    (pair,) = parse_preference(Value(record, Place("memory")))
    assert {"prompt": pair.prompt, "chosen": pair.chosen, "rejected": pair.rejected} == trl.extract_prompt(record)


WRONG = [
    ({"prompt": "a", "chosen": "b"}, "field rejected: is missing; the fields are 'prompt', 'chosen'"),
    (
        {"prompt": "a", "chosen": 1, "rejected": "b"},
        "field chosen: expected text or a list of messages, got the",
    ),
    ({"prompt": "a", "chosen": "b", "rejected": "b"}, "field rejected: expected another answer than the chosen one"),
    ({"chosen": "b", "rejected": "c"}, "field prompt: is missing, and chosen and rejected do not begin alike"),
    ({"chosen": "b", "rejected": [said("c")]}, "field rejected: expected the same as chosen"),
    ({"prompt": "a", "chosen": [said("b")], "rejected": [said("c")]}, "field prompt: expected a list of messages, as"),
    ({"prompt": [ASKED], "chosen": [ASKED], "rejected": [said("c")]}, "field chosen: expected a message of the assist"),
    (
        {"prompt": [ASKED], "chosen": [{"role": "assistant", "content": 3}], "rejected": []},
        r"field chosen\[0\].content: expected content that is text",
    ),
]


@pytest.mark.parametrize(("record", "words"), WRONG)
def test_a_broken_pair_names_its_field(tmp_path: Path, record: dict[str, Any], words: str) -> None:
    path = write(tmp_path, SPELLINGS["text"][0], record)
    with pytest.raises(RecordError, match=f"answers.jsonl, line 2, {words}"):
        list(read_preferences(path))
    with pytest.warns(UserWarning, match="skipped 1"):
        assert len(list(read_preferences(path, on_error="skip"))) == 1


def test_a_broken_judgement_names_its_field(tmp_path: Path) -> None:
    for label, words in ((1, "label: expected true or false, got the number 1"), (None, "label: is null")):
        with pytest.raises(RecordError, match=words):
            list(read_judged(write(tmp_path, {"prompt": "a", "completion": "b", "label": label})))


# Rows -----------------------------------------------------------------------------------------------------------------

RECORDS = [
    {"prompt": [ASKED], "chosen": [said("it is noon")], "rejected": [said("it is night")]},
    {"prompt": [said("be brief", "system"), ASKED], "chosen": [said("noon")], "rejected": [said("good morning")]},
    {"prompt": [ASKED], "chosen": [said("")], "rejected": [said("bye")]},
]
TEXTS = [
    {"prompt": "user: what time is it? assistant: ", "chosen": "it is noon", "rejected": "bye <eos>"},
    {"prompt": "user: thanks assistant:", "chosen": " bye ", "rejected": "good night"},
]


def trl_pairs(records: Sequence[Any], engine: Any) -> Any:
    """TRL's own batch of these records: `DPOTrainer._prepare_dataset` and the collator of its trainer."""
    pytest.importorskip("trl", reason=NEEDS_TRAINERS)
    from datasets import Dataset
    from trl.trainer.dpo_trainer import DataCollatorForPreference, DPOTrainer

    trainer = SimpleNamespace(_tokenizer=engine, _is_vlm=False)
    args = SimpleNamespace(dataset_num_proc=None, max_length=None, truncation_mode="keep_start")
    found = DPOTrainer._prepare_dataset(trainer, Dataset.from_list([*records]), engine, args, "train")
    return DataCollatorForPreference(engine.pad_token_id)(list(found))


@pytest.mark.parametrize("template", ["chatml", "no_think", "plain", "thinking"])
@pytest.mark.parametrize("records", [RECORDS, TEXTS, [SPELLINGS["messages with the prompt inside"][0]]])
def test_rows_and_masks_are_those_of_trl(tmp_path: Path, template: str, records: list[Any]) -> None:
    engine = make_engine(template)
    batch = preference_batch(read_preferences(write(tmp_path, *records)), engine)
    padded, expected = collate(batch.samples, engine.pad_token_id), trl_pairs(records, engine)
    assert torch.equal(padded.input_ids, expected["input_ids"])
    assert torch.equal(padded.attention_mask, expected["attention_mask"])
    assert torch.equal((padded.labels >= 0).long(), expected["completion_mask"])
    count = len(records)
    assert batch.pairs.tolist() == [[row, row + count] for row in range(count)]


def test_judged_rows_and_mismatched_ones_are_those_of_trl(tmp_path: Path) -> None:
    pytest.importorskip("trl", reason=NEEDS_TRAINERS)
    from datasets import Dataset
    from trl.trainer.kto_trainer import KTOTrainer

    engine = make_engine("chatml")
    records = [
        {"prompt": record["prompt"], "completion": record["chosen"], "label": bool(number % 2)}
        for number, record in enumerate(RECORDS)
    ]
    args = SimpleNamespace(
        dataset_num_proc=None,
        max_length=None,
        per_device_train_batch_size=3,
    )
    weights = {"desirable_weight": 1.0, "undesirable_weight": 1.0}
    trainer = SimpleNamespace(_tokenizer=engine, _is_vlm=False, calculate_KL=True, **weights)
    found = list(KTOTrainer._prepare_dataset(trainer, Dataset.from_list(records), engine, args, "train"))
    batch = judged_batch(read_judged(write(tmp_path, *records)), engine)
    rows = [(each["prompt_ids"], each["completion_ids"]) for each in found]
    rows += [(each["prompt_ids"], each["KL_completion_ids"]) for each in found]
    assert [sample.tokens.tolist() for sample in batch.samples] == [prompt + answer for prompt, answer in rows]
    assert [(sample.labels >= 0).tolist() for sample in batch.samples] == [
        [False] * len(prompt) + [True] * len(answer) for prompt, answer in rows
    ]
    assert batch.desirable.tolist() == [False, True, False] + [False] * 3
    assert batch.kl_rows is not None and batch.kl_rows.tolist() == [3, 4, 5]


def test_mismatched_rows_keep_what_is_not_trained(tmp_path: Path) -> None:
    called = [said("let me see"), said("12:00", "tool"), said("it is noon")]
    records = [
        {"prompt": [said("thanks", "user")], "completion": [said("bye")], "label": True},
        {"prompt": [ASKED], "completion": called, "label": False},
    ]
    batch, own = judged_batch(read_judged(write(tmp_path, *records)), ByteTokenizer()), ByteTokenizer()
    assert [own.decode(sample.tokens) for sample in batch.samples[2:]] == [
        "<user>thanks<end><assistant>let me see<end><tool>12:00<end><assistant>it is noon<end>",
        "<user>what time is it?<end><assistant>bye<end>",
    ]
    kept = [own.decode(sample.tokens[sample.labels >= 0]) for sample in batch.samples[2:]]
    assert kept == ["let me see<end>it is noon<end>", "bye<end>"]


def test_an_answer_of_many_messages_trains_the_assistants_alone(tmp_path: Path) -> None:
    chosen = [said("let me see"), said("12:00", "tool"), said("it is noon")]
    engine = make_engine("chatml")
    record = {"prompt": [ASKED], "chosen": chosen, "rejected": [said("bye")]}
    for tokenizer, end in ((engine, "<|im_end|>\n"), (ByteTokenizer(), "<end>")):
        batch = preference_batch(read_preferences(write(tmp_path, record)), tokenizer)
        kept = [tokenizer.decode(sample.tokens[sample.labels >= 0]) for sample in batch.samples]
        assert kept == [f"let me see{end}it is noon{end}", f"bye{end}"]
    with pytest.raises(RecordError, match="line 1: the chat template writes messages 0 to 1 differently when others"):
        preference_batch(read_preferences(tmp_path / "answers.jsonl"), make_engine("ended"))


def test_plain_answers_end(tmp_path: Path) -> None:
    path = write(tmp_path, SPELLINGS["text"][0])
    engine, own = make_engine("chatml"), ByteTokenizer()
    for tokenizer, end in ((engine, "<eos>"), (own, "<end>")):
        batch = preference_batch(read_preferences(path), tokenizer)
        kept = [tokenizer.decode(sample.tokens[sample.labels >= 0]) for sample in batch.samples]
        assert kept[0].endswith(f" blue{end}") and kept[1].endswith(f" green{end}")
    engine.eos_token = None
    with pytest.raises(RecordError, match="line 1: plain answers end in the tokenizer's eos_token"):
        preference_batch(read_preferences(path), engine)


def test_empty_batches_are_refused() -> None:
    with pytest.raises(InputError, match="at least one pair, got none"):
        preference_batch([], ByteTokenizer())
    with pytest.raises(InputError, match="two for mismatched rows, got 1"):
        judged_batch([Judged("a", "b", True)], ByteTokenizer())
    single = judged_batch([Judged("a", "b", True)], ByteTokenizer(), mismatched=False)
    assert single.kl_rows is None and single.desirable.tolist() == [True]


# From a file to a loss ------------------------------------------------------------------------------------------------


def logits_for(forest: Any) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(1, forest.num_tokens, 340, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("cut", [False, True])
def test_dpo_from_a_file_is_dpo_on_the_rows(tmp_path: Path, cut: bool) -> None:
    batch = preference_batch(
        read_preferences(write(tmp_path, *RECORDS)), ChatTokenizer(make_engine("chatml"), cut_at_turns=cut)
    )
    forest, logits = batch.forest, logits_for(batch.forest)
    assert forest.sharing_ratio > 1.5
    ref = edge_logprobs(logits_for(forest).flip(-1), forest)
    ref_rows = row_logprobs(logits_for(forest).flip(-1), forest)

    def on_rows(x: torch.Tensor) -> torch.Tensor:
        masks = [torch.from_numpy(sample.labels[1:] >= 0) for sample in batch.samples]
        ratios = [(p - r)[m].sum() for p, r, m in zip(row_logprobs(x, forest), ref_rows, masks, strict=True)]
        half = len(ratios) // 2
        margins = [ratios[row] - ratios[row + half] for row in range(half)]
        return -torch.nn.functional.logsigmoid(0.1 * torch.stack(margins)).mean()

    packed = value_and_grad(lambda x: losses.dpo(edge_logprobs(x, forest), forest, ref, batch.pairs), logits)
    assert_equal(packed, value_and_grad(on_rows, logits))


def test_kto_from_a_file_is_kto_on_the_rows(tmp_path: Path) -> None:
    batch = judged_batch(read_judged(write(tmp_path, *RECORDS)), make_engine("chatml"))
    forest, logits = batch.forest, logits_for(batch.forest)
    ref_logits = logits_for(forest).flip(-1)
    ref, ref_rows = edge_logprobs(ref_logits, forest), row_logprobs(ref_logits, forest)

    def on_rows(x: torch.Tensor) -> torch.Tensor:
        masks = [torch.from_numpy(sample.labels[1:] >= 0) for sample in batch.samples]
        ratios = [(p - r)[m].sum() for p, r, m in zip(row_logprobs(x, forest), ref_rows, masks, strict=True)]
        half = len(ratios) // 2
        point = torch.stack(ratios[half:]).detach().mean().clamp(min=0)
        signs = [1 if label else -1 for label in batch.desirable[:half]]
        return torch.stack([1 - torch.sigmoid(0.1 * s * (r - point)) for s, r in zip(signs, ratios)]).mean()

    def on_edges(x: torch.Tensor) -> torch.Tensor:
        return losses.kto(edge_logprobs(x, forest), forest, ref, batch.desirable, kl_rows=batch.kl_rows)

    assert_equal(value_and_grad(on_edges, logits), value_and_grad(on_rows, logits))
