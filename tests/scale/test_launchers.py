"""``examples/many_ranks.py`` under launchers, and with none: two gloo processes that accelerate starts, or one."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.trainers.support import NEEDS_TRAINERS

pytest.importorskip("accelerate", reason=NEEDS_TRAINERS)

EXAMPLE = Path(__file__).parents[2] / "examples" / "many_ranks.py"
SECONDS = 180
ACCELERATE = ["-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--main_process_port", "0"]


def printed(*command: str) -> tuple[set[str], list[float]]:
    """The ranks that said what they have, and the losses."""
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = done.stdout.splitlines()
    losses = [float(line.rpartition(" ")[2]) for line in lines if line.startswith("step")]
    return {line.partition(":")[0] for line in lines if line.startswith("rank")}, losses


@pytest.mark.sample(2)
def test_accelerate_starts_the_example() -> None:
    ranks, losses = printed(*ACCELERATE, str(EXAMPLE), "--tokens", "2", "--steps", "2")
    alone, expected = printed(str(EXAMPLE), "--tokens", "1", "--steps", "2")
    assert (ranks, alone) == ({"rank 0", "rank 1"}, {"rank 0"})
    assert len(losses) == 2 and losses[1] < losses[0]
    assert losses == pytest.approx(expected, rel=1e-5)
