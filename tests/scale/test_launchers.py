"""``examples/many_ranks.py`` on a mesh of forked ranks, and under accelerate and Ray Train, against one process.

accelerate starts what torchrun starts: two interpreters that find each other by their environment.
"""

import contextlib
import importlib.util
import io
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.scale.ranks import run_ranks
from tests.scale.shared_out import SECONDS
from tests.trainers.support import NEEDS_RAY, NEEDS_TRAINERS, RAY_SETTINGS

EXAMPLE = Path(__file__).parents[2] / "examples" / "many_ranks.py"
COMPILES = 'model.compile(backend="treefx")'
STEPS = 2
ACCELERATE = ["-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--main_process_port", "0"]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example without inductor, which takes most of its time."""
    source = EXAMPLE.read_text(encoding="utf-8")
    assert source.count(COMPILES) == 1
    path = tmp_path_factory.mktemp("example") / EXAMPLE.name
    path.write_text(source.replace(COMPILES, COMPILES[:-1] + ', options={"inner": "eager"})'), encoding="utf-8")
    return path


def worker(rank: int, port: int, folder: str, world: int, program: str, tokens: int) -> None:
    """One of the ranks, which find each other by the environment that launchers make, or a process without any."""
    if world > 1:
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    with contextlib.redirect_stdout(io.StringIO()) as text:
        load(program).train({"tokens": tokens, "steps": STEPS})
    dist.destroy_process_group()
    torch.save(text.getvalue(), Path(folder) / f"{rank}.pt")


def load(program: str) -> Any:
    spec = importlib.util.spec_from_file_location("many_ranks", program)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def read(text: str) -> tuple[set[str], list[float]]:
    """The ranks that said what they have, and the losses; lines of two processes may run into each other."""
    losses = re.findall(r"step \d+: loss (\d+\.\d{6})", text)
    return set(re.findall(r"(rank \d+): \d+ of \d+ rows", text)), [float(loss) for loss in losses]


def launched(*command: str) -> tuple[set[str], list[float]]:
    done = subprocess.run(
        [sys.executable, *command], env=os.environ | RAY_SETTINGS, capture_output=True, text=True, timeout=SECONDS
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return read(done.stdout)


@pytest.fixture(scope="module")
def expected(program: Path, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of one process."""
    (text,) = run_ranks(__name__, tmp_path_factory.mktemp("alone"), 1, str(program), 1, seconds=SECONDS, world=1)
    alone, losses = read(text)
    assert alone == {"rank 0"}
    assert len(losses) == STEPS and losses[1] < losses[0]
    return losses


def test_a_mesh_of_rows_and_tokens_has_the_losses_of_one_process(
    expected: list[float], program: Path, tmp_path: Path
) -> None:
    texts = run_ranks(__name__, tmp_path, 4, str(program), 2, seconds=SECONDS, world=4)
    ranks, losses = read("".join(texts))
    assert ranks == {f"rank {rank}" for rank in range(4)}
    assert losses == pytest.approx(expected, rel=1e-5)


def test_accelerate_starts_the_example(expected: list[float], program: Path) -> None:
    pytest.importorskip("accelerate", reason=NEEDS_TRAINERS)
    ranks, losses = launched(*ACCELERATE, str(program), "--tokens", "2", "--steps", str(STEPS))
    assert ranks == {"rank 0", "rank 1"}
    assert losses == pytest.approx(expected, rel=1e-5)


def test_ray_starts_the_example(expected: list[float], program: Path) -> None:
    pytest.importorskip("ray.train", reason=NEEDS_RAY)
    ranks, losses = launched(str(program), "--ray", "2", "--tokens", "2", "--steps", str(STEPS))
    assert ranks == {"rank 0", "rank 1"}
    assert losses == pytest.approx(expected, rel=1e-5)
