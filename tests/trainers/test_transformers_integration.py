"""transformers' Trainer and TRL's over a dataset: rows that share prefixes in one batch, sharing among the metrics."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback, TrainingArguments

import treefx
from tests.oracle import FLOAT32, Outcome, assert_close
from tests.trainers.support import COMMON, NEEDS_TRAINERS, PROMPT, TAILS, llama, tokenizer

pytest.importorskip("accelerate", reason=NEEDS_TRAINERS)
datasets = pytest.importorskip("datasets", reason=NEEDS_TRAINERS)

from treefx.integrations.transformers import SharingCallback, keep_groups, log_sharing  # noqa: E402

Rows = list[dict[str, list[int]]]


def rows() -> Rows:
    """Four conversations with four answers each, those of one far apart."""
    encode = tokenizer()
    texts = [f"{start} {PROMPT}{end}" for end in TAILS[4:] for start in TAILS[:4]]
    return [{"input_ids": ids, "labels": ids} for ids in (encode(text).input_ids for text in texts)]


def build(path: Path, dataset: Any, model: Any = None, **changes: Any) -> Trainer:
    arguments = COMMON | {"max_steps": 4} | changes
    return Trainer(
        model or llama(), TrainingArguments(str(path), **arguments), train_dataset=dataset, processing_class=tokenizer()
    )


def batches_of(trainer: Trainer) -> list[list[tuple[int, ...]]]:
    return [[tuple(row) for row in batch["input_ids"].tolist()] for batch in trainer.get_train_dataloader()]


def starts(batch: list[tuple[int, ...]]) -> set[tuple[int, ...]]:
    return {row[:2] for row in batch}


@pytest.mark.parametrize("as_dataset", [False, True], ids=["a list", "a dataset"])
def test_rows_that_share_prefixes_come_in_one_batch(tmp_path: Path, as_dataset: bool) -> None:
    trainer = build(tmp_path, datasets.Dataset.from_list(rows()) if as_dataset else rows())
    before = batches_of(trainer)
    keep_groups(trainer)
    after = batches_of(trainer)
    assert sorted(sum(after, [])) == sorted(sum(before, []))
    assert [len(batch) for batch in after] == [len(batch) for batch in before]
    assert all(len(starts(batch)) == 1 for batch in after)
    assert not all(len(starts(batch)) == 1 for batch in before)


def test_every_epoch_has_another_order_and_every_run_the_same(tmp_path: Path) -> None:
    orders = []
    for _ in range(2):
        trainer = build(tmp_path, rows(), llama(), max_steps=12)
        keep_groups(trainer)
        seen: list[tuple[int, ...]] = []
        original = trainer.training_step

        def training_step(model: Any, inputs: Any, *more: Any, seen: Any = seen, original: Any = original) -> Any:
            seen.append(tuple(inputs["input_ids"][0].tolist()))
            return original(model, inputs, *more)

        trainer.training_step = training_step
        trainer.train()
        orders.append(seen)
    assert orders[0] == orders[1]
    epochs = [orders[0][start : start + 4] for start in (0, 4, 8)]
    assert len({tuple(starts([row]).pop() for row in epoch) for epoch in epochs}) > 1


def test_ranks_get_whole_batches(tmp_path: Path) -> None:
    """accelerate deals the batches of one order out to the ranks."""
    from accelerate.data_loader import prepare_data_loader
    from torch.utils.data import DataLoader

    trainer = build(tmp_path, rows())
    keep_groups(trainer)
    sampler = trainer._get_train_sampler(trainer.train_dataset)
    loader = DataLoader(trainer.train_dataset, 4, sampler=sampler, collate_fn=trainer.data_collator)
    seen = []
    for rank in range(2):
        dealt = prepare_data_loader(loader, num_processes=2, process_index=rank, put_on_device=False)
        batches = [[tuple(row) for row in batch["input_ids"].tolist()] for batch in dealt.base_dataloader]
        assert len(batches) == 2 and all(len(starts(batch)) == 1 for batch in batches)
        seen += sum(batches, [])
    assert len(set(seen)) == 16


def test_pairs_and_judged_answers_are_ordered_by_their_prompts(tmp_path: Path) -> None:
    pairs = [{"prompt_ids": [n % 2, 5, 6], "chosen_ids": [n], "rejected_ids": [n + 9]} for n in range(8)]
    trainer = build(tmp_path, pairs)
    keep_groups(trainer)
    order = list(trainer._get_train_sampler())
    assert {frozenset(order[:4]), frozenset(order[4:])} == {frozenset({0, 2, 4, 6}), frozenset({1, 3, 5, 7})}
    named = build(tmp_path, [{"mine": [n % 2, 5, n]} for n in range(8)])
    keep_groups(named, columns=["mine"])
    assert {n % 2 for n in list(named._get_train_sampler())[:4]} in ({0}, {1})


def test_what_has_no_rows_to_order_is_refused(tmp_path: Path) -> None:
    with pytest.raises(treefx.TreefxError, match="text.*columns="):
        keep_groups(build(tmp_path, [{"text": "a"}]))
    with pytest.raises(treefx.TreefxError, match="'sequential'.*one of the two"):
        keep_groups(build(tmp_path, rows(), train_sampling_strategy="sequential"))
    stream = datasets.IterableDataset.from_generator(lambda: iter(rows()))
    with pytest.raises(treefx.TreefxError, match="with a length.*IterableDataset"):
        keep_groups(build(tmp_path, stream))


class Reporter(TrainerCallback):
    """What a logging service gets, whose callback stands in front of the user's."""

    def __init__(self) -> None:
        self.logs: list[dict[str, Any]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **more: Any) -> None:
        self.logs.append(dict(logs))


def test_grouped_run_trains_as_it_does_uncompiled_and_logs_what_it_shared(tmp_path: Path) -> None:
    outcomes = []
    for compile_model in (False, True):
        model = llama()
        if compile_model:
            model.compile(backend="treefx", options={"inner": "eager"})
        trainer = build(tmp_path, rows(), model, gradient_accumulation_steps=2, max_steps=2)
        reporter = Reporter()
        trainer.add_callback(reporter)
        keep_groups(trainer)
        log_sharing(trainer)
        trainer.train()
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        weights = {name: (p - dict(llama().named_parameters())[name]).detach() for name, p in model.named_parameters()}
        outcomes.append(Outcome(torch.tensor(losses, dtype=torch.float64), weights))
        told = [entry for entry in reporter.logs if "loss" in entry]
        if not compile_model:
            assert not any(name.startswith("treefx/") for entry in told for name in entry)
    assert_close(outcomes[1], outcomes[0], FLOAT32)
    assert len(told) == 2
    assert told[-1]["treefx/fallback"] == 0.0 < told[-1]["treefx/compile_seconds"]
    assert told[-1]["treefx/sharing"] > 2.0
    assert told[-1]["treefx/sharing_possible"] == pytest.approx(told[-1]["treefx/sharing"], rel=0.05)
    history = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert history[-1]["treefx/sharing"] == told[-1]["treefx/sharing"]


class InItsOwnOrder(Trainer):
    """As ms-swift's, which uses no sampler."""

    def get_train_dataloader(self) -> Any:
        return DataLoader(self.train_dataset, batch_size=4, collate_fn=self.data_collator)


def test_a_trainer_that_does_not_ask_for_the_order_is_told_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer: Any = build(tmp_path, rows())
    keep_groups(trainer)
    trainer.get_train_dataloader()
    assert "keep their order" not in caplog.text
    trainer = build(tmp_path, rows())
    trainer.__class__ = InItsOwnOrder
    keep_groups(trainer)
    trainer.get_train_dataloader()
    assert "InItsOwnOrder puts them into batches by itself" in caplog.text


@pytest.mark.parametrize("warned", [True, False])
def test_reasons_for_no_sharing_are_told_once(
    warned: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model with a mixer that no law covers, in the mode that then gives up: by a warning, or else in the log."""
    if not warned:
        monkeypatch.setattr("treefx.runtime.ways.watch.warn_of_rows", lambda *_: None)
    model = llama()
    norm = model.model.norm.forward
    model.model.norm.forward = lambda hidden: norm(hidden.cumsum(1).sin())
    model.compile(backend="treefx", options={"inner": "eager", "on_unsupported": "fallback"})
    trainer = build(tmp_path, rows(), model, max_steps=2)
    keep_groups(trainer)
    trainer.add_callback(SharingCallback())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", treefx.SharingWarning)
        trainer.train()
    history = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert [entry["treefx/fallback"] for entry in history] == [1.0, 1.0]
    assert all(entry["treefx/sharing_possible"] > 1.0 for entry in history)
    assert sum(item.category is treefx.SharingWarning for item in caught) == warned
    assert sum("shares nothing" in record.message for record in caplog.records) == (not warned)
