"""DDP over two processes, each with its rank's forest: loss and gradients are those of separate rows in one process."""

import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import treefx
from tests.backend.native import rollouts
from tests.oracle import FLOAT64, Outcome, assert_close, separate_rows
from tests.scale.ranks import run_ranks
from tests.scale.shared_out import Small
from treefx.planning.cost.model import Seconds

WORLD = 2
SECONDS = 300
"""After which a process that hangs is ended, and the test fails."""
STEPS: list[list[list[int]]] = [rollouts(7), [[5, 6, 7, 8]]]
"""Rows of uneven lengths; one row, so that a rank has no row."""


def train(model: nn.Module, rank: int) -> list[tuple[Tensor, dict[str, Tensor]]]:
    """Loss and gradients of every step, by the recipe in the docstring of `assign`."""
    outcomes = []
    for rows in STEPS:
        own = treefx.scale.shard_rows(treefx.Forest.from_sequences(rows), WORLD, Seconds(0.0, 1.0, 0.01))[rank]
        model.zero_grad(set_to_none=True)
        with treefx.use(own):
            out = model(**own.model_inputs(), use_cache=False)
        loss = treefx.losses.sft(treefx.edge_logprobs(out.logits, own), own, reduction="token_mean")
        (WORLD * loss).backward()  # DDP divides by the number of ranks
        total = loss.detach().clone()
        dist.all_reduce(total)
        gradients = {name.removeprefix("module."): p.grad.clone() for name, p in model.named_parameters()}
        outcomes.append((total, gradients))
    return outcomes


def worker(rank: int, port: int, folder: str) -> None:
    """One of the processes; writes what came out."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=WORLD)
    model = Small()
    model.compile(backend="treefx", options={"inner": "eager", "min_sharing": 1.0})
    torch.save(train(DistributedDataParallel(model), rank), Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()


def test_every_rank_has_the_gradients_of_separate_rows(tmp_path: Path) -> None:
    for results in run_ranks(__name__, tmp_path, seconds=SECONDS):
        for rows, (loss, gradients) in zip(STEPS, results, strict=True):
            predicted = sum(len(row) - 1 for row in rows)
            expected = separate_rows(Small(), rows, [[1.0 / predicted] * len(row) for row in rows])
            assert_close(Outcome(loss, gradients), expected, FLOAT64)
