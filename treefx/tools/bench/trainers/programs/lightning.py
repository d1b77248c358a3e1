"""Train with Lightning: ``python -m ...programs.lightning MODEL CHATS OUTPUT``.

A ``LightningModule`` around a model of transformers, ``Trainer.fit`` on the CPU, gradients of two batches accumulated.
With ``--compile`` its model is compiled by inductor; under ``treefx run`` by treefx, which is a line of this program:
Lightning has no setting for a backend that another could be put in.
"""

import os
import sys
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

from treefx.tools.bench.trainers.programs.chats import collate, read_rows
from treefx.tools.bench.trainers.programs.log import step_entry, write_log

__all__ = ["main"]


class Module(lightning.LightningModule):  # type: ignore[misc]
    """A causal LM."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: dict[str, Tensor]) -> Tensor:
        """The loss of a batch."""
        loss: Tensor = self.model(**batch, use_cache=False).loss
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return plain AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


class Log(Callback):  # type: ignore[misc]
    """Loss and norm of the gradients of every optimizer step."""

    def __init__(self) -> None:
        self.entries: list[dict[str, float]] = []
        self._losses: list[float] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Its loss, which Lightning has divided by the number of batches of a step."""
        self._losses.append(float(outputs["loss"]))
        if self.entries and "loss" not in self.entries[-1]:
            self.entries[-1]["loss"] = sum(self._losses)
            self._losses = []

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        """The gradients of the whole step are there."""
        self.entries.append(step_entry(module.model))


def main(model_folder: Path, chats: Path, output: Path, *, backend: str | None) -> None:
    """Train once over the rows, in their order."""
    lightning.seed_everything(7)
    rows: Any = read_rows(chats, model_folder)
    model: Any = AutoModelForCausalLM.from_pretrained(model_folder).train()
    if backend is not None:
        model.compile(backend=backend, dynamic=True)
    log = Log()
    trainer = lightning.Trainer(
        accelerator="cpu", max_epochs=1, accumulate_grad_batches=2, callbacks=[log], logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, default_root_dir=output,
    )  # fmt: skip
    trainer.fit(Module(model), DataLoader(rows, batch_size=4, collate_fn=collate))
    write_log(output, log.entries)


if __name__ == "__main__":
    _inductor = "inductor" if "--compile" in sys.argv else None
    _folders = [Path(argument) for argument in sys.argv[1:4]]
    main(*_folders, backend="treefx" if "TREEFX_RUN" in os.environ else _inductor)
