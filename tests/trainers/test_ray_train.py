"""Ray Train's ``TorchTrainer``: two workers on the CPU against one process without a compiler."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from tests.data import test_rank_steps as rank_steps
from tests.trainers.converted import sharded
from tests.trainers.support import NEEDS_RAY, RAY_SETTINGS
from tests.trainers.test_distributed import WORLD, Cases, check_ranks, llama, outcomes

ray = pytest.importorskip("ray", reason=NEEDS_RAY)
ray_train = pytest.importorskip("ray.train", reason=NEEDS_RAY)
ray_torch = pytest.importorskip("ray.train.torch", reason=NEEDS_RAY)

ROOT = Path(__file__).parents[2]
SECONDS = 500


def prepared(model: Any) -> nn.Module:
    """Compiled, then put into DDP by Ray."""
    model.compile(backend="treefx", options={"inner": "eager", "min_sharing": 1.0})
    wrapped: nn.Module = ray_torch.prepare_model(model)
    return wrapped


def in_ddp() -> tuple[nn.Module, nn.Module]:
    model = llama()
    return prepared(model), model


CASES: Cases = {"prepare_model": (in_ddp, False), "fsdp2": sharded.CASES["llama, compiled blocks, head apart"]}

# On every worker ------------------------------------------------------------------------------------------------------


def worker(folder: str) -> None:
    """What one of them does; writes what came out."""
    torch.set_num_threads(1)
    rank = ray_train.get_context().get_world_rank()
    found = {
        "cases": outcomes(rank, CASES),
        "steps": [rank_steps.train(prepared(rank_steps.llama()), rank, whole) for whole in (True, False)],
        "kept": batches(rank, add_dist_sampler=False),
        "lost": batches(rank),
    }
    torch.save(found, Path(folder) / f"{rank}.pt")


def batches(rank: int, **options: Any) -> list[Any]:
    """The batches of a tree as Ray hands them over, by the numbers of their rows."""
    sampler = rank_steps.sampler_of(rank)
    rows: Any = range(len(sampler.forest))
    loader = DataLoader(rows, batch_sampler=sampler, collate_fn=lambda given: given)
    return list(ray_torch.prepare_data_loader(loader, **options))


def start(folder: str) -> None:
    """In a separate process, which Ray ends with all its children."""

    def loop(options: dict[str, str]) -> None:
        sys.path.append(options["root"])  # last: libraries look for packages called kernels
        from tests.trainers.test_ray_train import worker

        worker(options["folder"])

    ray.init(num_cpus=WORLD, include_dashboard=False)
    ray_torch.TorchTrainer(
        loop,
        train_loop_config={"root": str(ROOT), "folder": folder},
        scaling_config=ray_train.ScalingConfig(num_workers=WORLD),
        run_config=ray_train.RunConfig(storage_path=f"{folder}/ray"),
    ).fit()


# ----------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """By rank, what each worker found."""
    folder = tmp_path_factory.mktemp("ray")
    code = f"import sys; sys.path.append({str(ROOT)!r}); from {__name__} import start; start({str(folder)!r})"
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | RAY_SETTINGS, capture_output=True, text=True, timeout=SECONDS
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [torch.load(folder / f"{rank}.pt") for rank in range(WORLD)]


@pytest.mark.parametrize("name", CASES)
def test_workers_match_one_uncompiled_process(results: list[dict[str, Any]], name: str) -> None:
    model = llama() if name == "prepare_model" else sharded.tiny("llama")
    check_ranks([found["cases"] for found in results], name, model, CASES[name][1])


def test_workers_with_shares_of_the_same_rows_have_the_losses_and_gradients_of_all(
    results: list[dict[str, Any]],
) -> None:
    """And other ones where each divides by its own rows alone."""
    rank_steps.check_ranks([found["steps"] for found in results])


def test_batches_of_the_tree_come_through_where_ray_adds_no_sampler(results: list[dict[str, Any]]) -> None:
    """By default it puts its own in their place, which hands out rows one by one."""
    for rank, found in enumerate(results):
        assert found["kept"] == list(rank_steps.sampler_of(rank))
        assert all(isinstance(row, int) for row in found["lost"])
