"""TRL's sampling trainers with groups kept together: the same rows, the same gradient, all the sharing of a step."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import treefx
from tests.oracle import FLOAT32, Outcome, assert_close
from tests.trainers.support import COMMON, NEEDS_TRAINERS, PROMPT, TAILS, llama, tokenizer

datasets = pytest.importorskip("datasets", reason=NEEDS_TRAINERS)
trl = pytest.importorskip("trl", reason=NEEDS_TRAINERS)

from treefx.integrations.trl import keep_groups, regroup  # noqa: E402

GROUP, STEPS = 8, 4
PROMPTS = datasets.Dataset.from_list([{"prompt": f"{tail} {PROMPT}" * 3} for tail in (*TAILS[:3], TAILS[-1])])
"""Four prompts of one length, which differ from the first word on."""

Rows = dict[str, Any]


def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Something that differs from sample to sample."""
    return [float(sum(ids) % 7) for ids in completion_ids]


def build(kind: str, path: Path, model: nn.Module, **changes: Any) -> Any:
    """Groups of 8, cut into 4 micro-batches of 8 rows for an optimizer step."""
    arguments = COMMON | {
        "per_device_train_batch_size": GROUP, "gradient_accumulation_steps": STEPS, "num_generations": GROUP,
        "max_completion_length": 2, "generation_kwargs": {"min_new_tokens": 2}, "gradient_checkpointing": False,
        "max_steps": 2, **changes,
    }  # fmt: skip
    config, trainer = {"grpo": (trl.GRPOConfig, trl.GRPOTrainer), "rloo": (trl.RLOOConfig, trl.RLOOTrainer)}[kind]
    torch.manual_seed(0)
    return trainer(model, reward, config(str(path), **arguments), train_dataset=PROMPTS, processing_class=tokenizer())


def outcome(trainer: Any) -> Outcome:
    """Logged losses (GRPO's is zero but for rounding, as the advantages of a group are), and how far weights went."""
    torch.manual_seed(1)
    trainer.train()
    losses = [round(entry["loss"], 6) for entry in trainer.state.log_history if "loss" in entry]
    first = dict(llama().named_parameters())
    updates = {name: (p - first[name]).detach() for name, p in trainer.model.named_parameters()}
    assert any(update.abs().max() > 1e-3 for update in updates.values()) or trainer.args.learning_rate == 0.0
    return Outcome(torch.tensor(losses, dtype=torch.float64), updates)


def compiled(path: Path) -> nn.Module:
    model = llama(path / "model")
    model.compile(backend="treefx", options={"inner": "eager"})
    return model


def test_groups_meet_and_the_step_stays_what_it_was(tmp_path: Path) -> None:
    """The run of TRL alone, uncompiled, is the truth.

    Distinct tokens of a step, per raw one, are within 5 percent of those of all its rows together.
    """
    expected = outcome(build("grpo", tmp_path, llama(tmp_path / "model")))
    kept = build("grpo", tmp_path, compiled(tmp_path))
    keep_groups(kept)
    assert_close(outcome(kept), expected, FLOAT32)
    stats = treefx.inspect(kept.model).stats
    assert stats["fallback"] is None
    assert stats["step_calls"] == STEPS
    distinct, fewest = 1 / stats["step_sharing_ratio"], 1 / stats["sharing_possible"]
    assert distinct <= 1.05 * fewest < 1 / 3


def test_the_report_names_the_line_where_groups_are_scattered(tmp_path: Path) -> None:
    """TRL's own order: each micro-batch computes nearly all prompts again."""
    scattered = build("grpo", tmp_path, compiled(tmp_path), max_steps=1)
    outcome(scattered)
    lost = treefx.inspect(scattered.model)
    assert lost.stats["step_sharing_ratio"] < 0.6 * lost.stats["sharing_possible"]
    assert "treefx.integrations.trl.keep_groups(trainer)" in lost.summary()


class Recorder:
    """The rows that a trainer's micro-batches are made of."""

    def __init__(self, trainer: Any) -> None:
        self.batches: list[list[tuple[int, ...]]] = []
        original = trainer._compute_loss

        def compute_loss(model: Any, inputs: Rows) -> Any:
            ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1).tolist()
            advantages = inputs["advantages"].tolist()
            self.batches.append([(*row, round(1e6 * a)) for row, a in zip(ids, advantages)])
            return original(model, inputs)

        trainer._compute_loss = compute_loss


def steps_of(batches: list[Any], size: int) -> list[list[Any]]:
    return [sorted(sum(batches[at : at + size], [])) for at in range(0, len(batches), size)]


@pytest.mark.parametrize(
    ("kind", "accumulation", "changes"),
    [
        ("rloo", 4, {}),
        ("grpo", 2, {"steps_per_generation": 4}),
        ("grpo", 4, {"steps_per_generation": 2, "num_iterations": 2}),
        ("grpo", 1, {"steps_per_generation": 2}),
    ],
    ids=["one step", "two steps a generation", "two generations a step, two iterations", "single calls"],
)
def test_every_step_trains_on_the_rows_that_trl_drew_for_it(
    tmp_path: Path, kind: str, accumulation: int, changes: dict[str, Any]
) -> None:
    found = []
    for keep in (False, True):
        trainer = build(
            kind, tmp_path, llama(tmp_path / "model"), gradient_accumulation_steps=accumulation, learning_rate=0.0,
            per_device_train_batch_size=4, num_generations=4, **changes,
        )  # fmt: skip
        if keep:
            keep_groups(trainer)
        recorder = Recorder(trainer)
        outcome(trainer)
        found.append(recorder.batches)
    assert steps_of(found[0], accumulation) == steps_of(found[1], accumulation)
    if accumulation > 1:
        assert found[0] != found[1]


def micro_batches(rows: int, cut: int, prompts: int) -> list[Rows]:
    """Rows of several prompts in turn, with every kind of value that TRL buffers."""
    number = torch.arange(rows)
    everything = {
        "prompt_ids": (number % prompts)[:, None].expand(-1, 3), "prompt_mask": torch.ones(rows, 3),
        "completion_ids": number[:, None].expand(-1, 2), "completion_mask": torch.ones(rows, 2),
        "advantages": number / 10, "num_items_in_batch": torch.tensor(64), "images": [[n] for n in range(rows)],
        "tool_mask": None,
    }  # fmt: skip
    return trl.trainer.utils.split_tensor_dict(everything, cut)


def test_all_that_belongs_to_a_row_moves_with_it() -> None:
    dealt = regroup(micro_batches(16, 4, prompts=4))
    assert sorted(row for batch in dealt for (row,) in batch["images"]) == list(range(16))
    for batch in dealt:
        numbers = batch["completion_ids"][:, 0]
        assert len(set(batch["prompt_ids"][:, 0].tolist())) == 1
        assert batch["advantages"].tolist() == (numbers / 10).tolist()
        assert batch["images"] == [[n] for n in numbers.tolist()]
        assert int(batch["num_items_in_batch"]) == 64 and batch["tool_mask"] is None


def test_images_move_with_their_rows() -> None:
    """TRL keeps the pixels of a micro-batch in one tensor, as many rows of it as every image has."""
    batches = [
        {**batch, "num_images": [1, 1], "image_grid_thw": torch.tensor([[1, 1, n] for n in (1, 2)]),
         "pixel_values": batch["completion_ids"][[0, 1, 1]].float()}
        for batch in micro_batches(4, 2, prompts=2)
    ]  # fmt: skip
    dealt = regroup(batches)
    sizes = {0: 1, 1: 2, 2: 1, 3: 2}
    for batch in dealt:
        rows = batch["completion_ids"][:, 0].tolist()
        assert batch["pixel_values"][:, 0].tolist() == [row for row in rows for _ in range(sizes[row])]


def test_what_cannot_be_regrouped_is_refused_by_name() -> None:
    with pytest.raises(treefx.TreefxError, match="completion_mask"):
        regroup([{"prompt_ids": torch.ones(2, 2), "prompt_mask": torch.ones(2, 2)}] * 2)
    with pytest.raises(treefx.TreefxError, match="SFTTrainer"):
        keep_groups(trl.SFTTrainer)


@pytest.mark.parametrize("loss_type", ["dapo", "bnpo"])
def test_a_class_keeps_groups_where_that_changes_no_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, loss_type: str
) -> None:
    monkeypatch.setattr(trl.GRPOTrainer, "_prepare_inputs", trl.GRPOTrainer._prepare_inputs)
    original = trl.GRPOTrainer._prepare_inputs
    keep_groups(trl.GRPOTrainer)
    keep_groups(trl.GRPOTrainer)
    assert trl.GRPOTrainer._prepare_inputs.__wrapped__ is original
    trainer = build("grpo", tmp_path, llama(tmp_path / "model"), max_steps=2, learning_rate=0.0, loss_type=loss_type)
    recorder = Recorder(trainer)
    outcome(trainer)
    alone = [len({row[:-3] for row in batch}) == 1 for batch in recorder.batches]
    told = [record.message for record in caplog.records if "per micro-batch" in record.message]
    assert (all(alone), len(told)) == ((True, 0) if loss_type == "dapo" else (False, 1))


@pytest.mark.parametrize("kind", ["sft", "dpo"])
def test_trainers_over_a_dataset_get_batches_of_common_prompts(tmp_path: Path, kind: str) -> None:
    """The same line; the tokenized rows at the trainer's creation decide."""
    answers = [(a, b) for a, b in zip(TAILS[:4], TAILS[4:])]
    rows = [{"prompt": f"{start} {PROMPT}", "chosen": a, "rejected": b} for a, b in answers for start in TAILS[1:3]]
    if kind == "sft":
        given = datasets.Dataset.from_list([{"prompt": row["prompt"], "completion": row["chosen"]} for row in rows])
        config, trainer = trl.SFTConfig(str(tmp_path), **COMMON), trl.SFTTrainer
    else:
        given = datasets.Dataset.from_list(rows)
        config, trainer = trl.DPOConfig(str(tmp_path), **COMMON), trl.DPOTrainer
    made = trainer(llama(tmp_path / "model"), args=config, train_dataset=given, processing_class=tokenizer())
    keep_groups(made)
    batches = [batch["input_ids"] for batch in made.get_train_dataloader()]
    assert len(batches) == 2
    assert all(len(set(map(tuple, batch[:, :2].tolist()))) == 1 for batch in batches)
