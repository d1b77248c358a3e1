"""Train with Ray Train: ``python -m ...programs.ray_train MODEL CHATS OUTPUT``.

``TorchTrainer`` with two workers on the CPU: a model of transformers that Ray puts into DDP, rows that Ray deals out.
With ``--compile`` the model is compiled by inductor; under ``treefx run`` by treefx, which is a line of this program:
the loop is the user's own, so Ray has no setting for a compiler.
"""

import os
import sys
from pathlib import Path
from typing import Any

import ray.train.torch
import torch
import torch.distributed as dist
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

from treefx.tools.bench.trainers.programs.chats import collate, read_rows
from treefx.tools.bench.trainers.programs.log import step_entry, write_log

__all__ = ["WORKERS", "main", "train"]

WORKERS = 2


def train(options: dict[str, Any]) -> None:
    """What every worker runs: once over its rows, in their order."""
    torch.manual_seed(7)
    model: Any = AutoModelForCausalLM.from_pretrained(options["model"]).train()
    if options["backend"] is not None:
        model.compile(backend=options["backend"], dynamic=True)
    replicated = ray.train.torch.prepare_model(model)
    rows: Any = read_rows(Path(options["chats"]), Path(options["model"]))
    loader = ray.train.torch.prepare_data_loader(DataLoader(rows, batch_size=4, collate_fn=collate))
    optimizer = torch.optim.AdamW(replicated.parameters(), lr=1e-4)
    entries = []
    for batch in loader:
        loss = replicated(**batch, use_cache=False).loss
        loss.backward()
        entries.append(step_entry(model) | {"loss": _mean(loss)})
        optimizer.step()
        optimizer.zero_grad()
    if ray.train.get_context().get_world_rank() == 0:
        write_log(Path(options["output"]), entries)


def _mean(loss: torch.Tensor) -> float:
    """Over the workers."""
    whole = loss.detach().clone()
    dist.all_reduce(whole)
    return float(whole) / WORKERS


def main(model: Path, chats: Path, output: Path, *, backend: str | None) -> None:
    """Train on workers that Ray starts on this machine."""
    options = {"model": str(model), "chats": str(chats), "output": str(output), "backend": backend}
    TorchTrainer(
        train,
        train_loop_config=options,
        scaling_config=ScalingConfig(num_workers=WORKERS),
        run_config=RunConfig(storage_path=str(output)),
    ).fit()


if __name__ == "__main__":
    _inductor = "inductor" if "--compile" in sys.argv else None
    _folders = [Path(argument) for argument in sys.argv[1:4]]
    main(*_folders, backend="treefx" if "TREEFX_RUN" in os.environ else _inductor)
