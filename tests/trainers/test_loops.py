"""Loops around a plain step: ``accelerate`` and Lightning."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import treefx
import treefx.data
from tests.trainers.support import (
    NEEDS_TRAINERS,
    PROMPT,
    TAILS,
    Training,
    assert_same_training,
    assert_shared,
    llama,
    tokenizer,
)

accelerate = pytest.importorskip("accelerate", reason=NEEDS_TRAINERS)
lightning = pytest.importorskip("lightning", reason=NEEDS_TRAINERS)

Rows = dict[str, Tensor]


def batches() -> DataLoader[Rows]:
    """Two batches of four rows, padded on the right."""
    encode = tokenizer()
    rows = encode([PROMPT + tail * (1 + i % 2) for i, tail in enumerate(TAILS)], padding=True, return_tensors="pt")
    labels = rows.input_ids.masked_fill(rows.attention_mask == 0, -100)
    fields = {"input_ids": rows.input_ids, "attention_mask": rows.attention_mask, "labels": labels}
    return DataLoader([{name: value[i] for name, value in fields.items()} for i in range(len(TAILS))], batch_size=4)


def test_accelerate_matches_the_uncompiled_run() -> None:
    """Prepared, clipped, and with gradients accumulated by accelerate's own context."""

    def train(compile_model: Callable[[nn.Module], None]) -> Training:
        accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
        model = llama()
        compile_model(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
        prepared, optimizer, loader = accelerator.prepare(model, optimizer, batches())
        losses = []
        for batch in [*loader, *loader]:
            with accelerator.accumulate(prepared):
                loss = prepared(**batch).loss
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(prepared.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(float(loss.detach()))
        return Training(accelerator.unwrap_model(prepared), losses)

    assert_shared(assert_same_training(train).model)


class Module(lightning.LightningModule):
    """A causal LM as a Lightning user writes it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.losses = model, list[float]()

    def training_step(self, batch: Rows) -> Tensor:
        loss: Tensor = self.model(**batch).loss
        self.losses.append(float(loss.detach()))
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.3)


def test_lightning_matches_the_uncompiled_run(tmp_path: Path) -> None:
    def train(compile_model: Callable[[nn.Module], None]) -> Training:
        module = Module(llama())
        compile_model(module.model)
        trainer = lightning.Trainer(
            accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False, default_root_dir=tmp_path,
        )  # fmt: skip
        trainer.fit(module, batches())
        return Training(module.model, module.losses)

    assert_shared(assert_same_training(train).model)


def tree_batches() -> DataLoader[Rows]:
    """Two prompts, four rows of each far apart, batches by the tree."""
    rows = [[1, start, *range(5, 12), end] for end in (12, 13, 14, 15) for start in (3, 4)]
    fields = [{name: torch.tensor(row) for name in ("input_ids", "labels")} for row in rows]
    return DataLoader(fields, batch_sampler=treefx.data.TreeBatchSampler(rows, max_tokens=13))


def prompts(batch: Rows) -> set[int]:
    return set(batch["input_ids"][:, 1].tolist())


def test_loops_take_batches_of_the_tree_and_draw_them_anew_every_epoch(tmp_path: Path) -> None:
    """Lightning and accelerate set the epoch of what they find."""
    module = Module(llama())
    seen: list[Rows] = []
    module.training_step = lambda batch: seen.append(batch) or Module.training_step(module, batch)
    lightning.Trainer(
        accelerator="cpu", max_epochs=4, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=tmp_path,
    ).fit(module, tree_batches())  # fmt: skip
    loader = accelerate.Accelerator(cpu=True).prepare(tree_batches())
    found = []
    for epoch in range(4):
        loader.set_epoch(epoch)
        found += list(loader)
    for batches_seen in (seen, found):
        assert all(len(prompts(batch)) == 1 for batch in batches_seen)
        orders = [tuple(map(str, batches_seen[at : at + 2])) for at in range(0, 8, 2)]
        assert len(batches_seen) == 8 and len(set(orders)) > 1


@pytest.mark.parametrize("by_tree", [False, True])
def test_lightning_loses_what_its_order_scatters_and_nothing_by_the_tree(tmp_path: Path, by_tree: bool) -> None:
    """The line that the report names: a loader whose batches are the tree's. Gradients are accumulated over two."""
    rows = [[1, start, *range(5, 12), end] for end in (12, 13, 3, 4) for start in (3, 4)]
    fields = [{name: torch.tensor(row) for name in ("input_ids", "labels")} for row in rows]
    loader = DataLoader(fields, batch_sampler=treefx.data.TreeBatchSampler(rows, max_tokens=13))
    module = Module(llama())
    module.model.compile(backend="treefx", options={"inner": "eager", "min_sharing": 1.0})
    lightning.Trainer(
        accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=tmp_path, accumulate_grad_batches=2 if by_tree else 4,
    ).fit(module, loader if by_tree else DataLoader(fields, batch_size=2))  # fmt: skip
    inspection = treefx.inspect(module.model)
    ratio, possible = (inspection.stats[name] for name in ("step_sharing_ratio", "sharing_possible"))
    assert inspection.stats["fallback"] is None and possible > 2.5
    assert (ratio > 0.95 * possible) if by_tree else (ratio < 0.5 * possible)
    assert ("came in different calls" in inspection.summary()) != by_tree
