"""DDP over two processes, each with its rank's forest: loss and gradients are those of separate rows in one process."""

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import treefx
from tests.backend.native import rollouts
from tests.models import double
from tests.oracle import FLOAT64, Outcome, assert_close, separate_rows
from treefx.planning.cost.model import Seconds

pytestmark = pytest.mark.sample(8)

WORLD = 2
SECONDS = 300
"""After which a process that hangs is ended, and the test fails."""
STEPS: list[list[list[int]]] = [rollouts(7), [[5, 6, 7, 8]]]
"""Rows of uneven lengths; one row, so that a rank has nothing of its own."""


def llama() -> Any:
    return double("llama", num_hidden_layers=1, hidden_size=16, intermediate_size=16, head_dim=8)


def train(model: nn.Module, rank: int) -> list[tuple[Tensor, dict[str, Tensor]]]:
    """Loss and gradients of every step, by the recipe in the docstring of `assign`."""
    outcomes = []
    for rows in STEPS:
        own = treefx.scale.assign(treefx.Forest.from_sequences(rows), WORLD, Seconds(0.0, 1.0, 0.01))[rank]
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
    model = llama()
    model.compile(backend="treefx", options={"inner": "eager", "min_sharing": 1.0})
    torch.save(train(DistributedDataParallel(model), rank), Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[list[tuple[Tensor, dict[str, Tensor]]]]:
    """By rank, the outcome of every step."""
    folder = tmp_path_factory.mktemp("ranks")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = []
    for rank in range(WORLD):
        # The folder of the repository comes last: libraries look for packages called kernels.
        call = f"worker({rank}, {port}, {str(folder)!r})"
        code = f"import sys; sys.path.append({str(Path(__file__).parents[2])!r}); from {__name__} import worker; {call}"
        ranks.append(subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True))
    try:
        for process in ranks:
            _, errors = process.communicate(timeout=SECONDS)
            assert process.returncode == 0, errors[-3000:]
    finally:
        for process in ranks:
            process.kill()
    return [torch.load(folder / f"{rank}.pt") for rank in range(WORLD)]


@pytest.mark.parametrize("step", range(len(STEPS)), ids=["uneven rows", "one rank without rows"])
def test_every_rank_has_the_gradients_of_separate_rows(results: Any, step: int) -> None:
    rows = STEPS[step]
    predicted = sum(len(row) - 1 for row in rows)
    expected = separate_rows(llama(), rows, [[1.0 / predicted] * len(row) for row in rows])
    for rank in range(WORLD):
        loss, gradients = results[rank][step]
        assert_close(Outcome(loss, gradients), expected, FLOAT64)
