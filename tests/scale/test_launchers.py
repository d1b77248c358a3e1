"""``examples/many_ranks.py`` under launchers: two gloo processes that accelerate or Ray Train starts, against one."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.trainers.support import NEEDS_RAY, NEEDS_TRAINERS, RAY_SETTINGS

EXAMPLE = Path(__file__).parents[2] / "examples" / "many_ranks.py"
SECONDS = 300
ACCELERATE = ["-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--main_process_port", "0"]


def printed(*command: str) -> tuple[set[str], list[float]]:
    """The ranks that said what they have, and the losses; lines of two processes may run into each other."""
    done = subprocess.run(
        [sys.executable, *command], env=os.environ | RAY_SETTINGS, capture_output=True, text=True, timeout=SECONDS
    )
    assert done.returncode == 0, done.stderr[-3000:]
    losses = re.findall(r"step \d+: loss (\d+\.\d{6})", done.stdout)
    return set(re.findall(r"(rank \d+): \d+ of \d+ rows", done.stdout)), [float(loss) for loss in losses]


@pytest.fixture(scope="module")
def expected() -> list[float]:
    """The losses of one process."""
    alone, losses = printed(str(EXAMPLE), "--tokens", "1", "--steps", "2")
    assert alone == {"rank 0"}
    assert len(losses) == 2 and losses[1] < losses[0]
    return losses


@pytest.mark.sample(6)
def test_accelerate_starts_the_example(expected: list[float]) -> None:
    pytest.importorskip("accelerate", reason=NEEDS_TRAINERS)
    ranks, losses = printed(*ACCELERATE, str(EXAMPLE), "--tokens", "2", "--steps", "2")
    assert ranks == {"rank 0", "rank 1"}
    assert losses == pytest.approx(expected, rel=1e-5)


@pytest.mark.sample(6)
def test_ray_starts_the_example(expected: list[float]) -> None:
    pytest.importorskip("ray.train", reason=NEEDS_RAY)
    ranks, losses = printed(str(EXAMPLE), "--ray", "2", "--tokens", "2", "--steps", "2")
    assert ranks == {"rank 0", "rank 1"}
    assert losses == pytest.approx(expected, rel=1e-5)
