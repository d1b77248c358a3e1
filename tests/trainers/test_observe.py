"""Trainers observed: losses and weights bit for bit those of the trainer alone, figures those of ``treefx data``.

verl's engine stands in ``tests/trainers/converted/test_verl.py``.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import treefx
from tests.trainers.leftovers import forget_accelerate
from tests.trainers.support import COMMON, NEEDS_TRAINERS, PROMPT, TAILS, llama, tokenizer
from treefx.data import scripted_conversations, train_tokenizer
from treefx.data.samples import turn_samples
from treefx.data.statistics import sharing_statistics
from treefx.integrations import observing

datasets = pytest.importorskip("datasets", reason=NEEDS_TRAINERS)
trl = pytest.importorskip("trl", reason=NEEDS_TRAINERS)
accelerate = pytest.importorskip("accelerate", reason=NEEDS_TRAINERS)
transformers = pytest.importorskip("transformers", reason=NEEDS_TRAINERS)


@pytest.fixture
def _hooked(monkeypatch: pytest.MonkeyPatch) -> None:
    """As ``treefx run --observe`` leaves the libraries."""
    for owner, name in ((accelerate.Accelerator, "prepare_model"), (transformers.Trainer, "log")):
        monkeypatch.setattr(owner, name, getattr(owner, name))
    monkeypatch.setattr(transformers.Trainer, "train", transformers.Trainer.train)
    monkeypatch.setattr(observing, "account", lambda observer: None)  # the dry run takes seconds
    observing.observe_prepared(accelerate.Accelerator)
    observing.observe_trainers(transformers.Trainer)


def rows_of_one_conversation() -> tuple[list[Any], Any, int]:
    """The turns of a scripted conversation, what ``treefx data`` says of them, and the size of the vocabulary."""
    conversations = [min(scripted_conversations(), key=lambda found: len(found.messages))]
    made = train_tokenizer((text for c in conversations for text in c.texts()), vocab_size=300)
    rows = [row for conversation in conversations for row in turn_samples(conversation, made)]
    return rows, sharing_statistics(conversations, made), made.vocab_size


def sft(path: Path, rows: list[Any], vocabulary: int, in_a_call: int) -> Any:
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=vocabulary, **sizes))
    table = [{"input_ids": row.tokens.tolist(), "labels": row.labels.tolist()} for row in rows]
    changes = {
        "per_device_train_batch_size": in_a_call, "gradient_accumulation_steps": len(rows) // in_a_call,
        "gradient_checkpointing": False, "max_length": None, "max_steps": 2,
    }  # fmt: skip
    arguments = trl.SFTConfig(str(path), **COMMON | changes)
    dataset = datasets.Dataset.from_list(table)
    return trl.SFTTrainer(model, arguments, train_dataset=dataset, processing_class=tokenizer())


def grpo(path: Path, model: nn.Module) -> Any:
    prompts = datasets.Dataset.from_list([{"prompt": f"{tail} {PROMPT}"} for tail in TAILS[:2]])
    changes = {
        "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "num_generations": 4,
        "max_completion_length": 3, "generation_kwargs": {"min_new_tokens": 3}, "gradient_checkpointing": False,
    }  # fmt: skip
    torch.manual_seed(0)
    config = trl.GRPOConfig(str(path), **COMMON | changes)
    return trl.GRPOTrainer(model, reward, config, train_dataset=prompts, processing_class=tokenizer())


def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [float(sum(ids) % 7) for ids in completion_ids]


def trained(trainer: Any) -> tuple[list[float], list[torch.Tensor]]:
    """The logged losses, and the weights."""
    torch.manual_seed(1)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    weights = [parameter.detach().clone() for parameter in trainer.model.parameters()]
    forget_accelerate()
    return losses, weights


def assert_equal_bits(found: tuple[list[float], list[torch.Tensor]], wanted: tuple[Any, Any]) -> None:
    assert found[0] == wanted[0] and len(set(wanted[0])) > 1
    assert all(torch.equal(a, b) for a, b in zip(found[1], wanted[1], strict=True))


def test_sft(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    rows, data, vocabulary = rows_of_one_conversation()
    wanted = trained(sft(tmp_path, rows, vocabulary, len(rows)))
    request.getfixturevalue("_hooked")
    trainer = sft(tmp_path, rows, vocabulary, len(rows))
    assert_equal_bits(trained(trainer), wanted)
    found = treefx.observed(trainer.model, predict=False)
    print(found.summary())
    assert found.origin.trainer == "SFTTrainer" and [step.calls for step in found.steps] == [1, 1]
    assert {(step.raw_tokens, step.step_tokens) for step in found.steps} == {(data.raw_tokens, data.tokens)}
    (logged,) = {entry["treefx/observed_sharing"] for entry in trainer.state.log_history if "loss" in entry}
    assert logged == pytest.approx(data.sharing_ratio)


def test_grpo(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    wanted = trained(grpo(tmp_path, llama(tmp_path / "model")))
    request.getfixturevalue("_hooked")
    trainer = grpo(tmp_path, llama(tmp_path / "model"))
    seen: list[list[list[int]]] = []
    compute = trainer._compute_loss

    def compute_loss(model: Any, inputs: Any) -> Any:
        ids, mask = (torch.cat([inputs[f"{part}_{kind}"] for part in ("prompt", "completion")], 1)
                     for kind in ("ids", "mask"))  # fmt: skip
        seen.append([row[kept.bool()].tolist() for row, kept in zip(ids, mask, strict=True)])
        return compute(model, inputs)

    trainer._compute_loss = compute_loss
    assert_equal_bits(trained(trainer), wanted)
    found = treefx.observed(trainer.model, predict=False)
    print(found.summary())
    assert [step.calls for step in found.steps] == [2, 2]
    for number, step in enumerate(found.steps):
        calls = seen[2 * number : 2 * number + 2]
        assert step.call_tokens == sum(treefx.Forest.from_sequences(rows).num_tokens for rows in calls)
        together = treefx.Forest.from_sequences(calls[0] + calls[1])
        assert (step.raw_tokens, step.step_tokens) == (together.raw_tokens, together.num_tokens)
    assert found.scatter[0].where == "order" and "keep_groups" in found.scatter[0].way_out
