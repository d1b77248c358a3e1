"""``treefx bench overlap``: every way equal to the bit, no time for one that is not, a link that takes its time."""

import json
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from typer.testing import CliRunner

from tests.trainers.test_distributed import WORLD, run_ranks
from treefx.bench.overlap import link as link_module
from treefx.bench.overlap import run as bench
from treefx.bench.overlap.link import EmulatedLink, connect
from treefx.bench.overlap.mlp import LAYOUTS, Way, shared_block
from treefx.bench.overlap.rank import CHUNKS, RATIOS, _different
from treefx.bench.overlap.run import OverlapError
from treefx.cli import app

PLACES = {"all_reduce": 2, "gather_scatter": 4}
"""Products with a collective, forward and backward."""
SENT = 1 << 12


class Clock:
    """Stands still unless someone sleeps."""

    def __init__(self) -> None:
        self.now, self.sleeps = 100.0, list[float]()

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.sleeps.append(seconds)
        self.now += seconds


def worker(rank: int, port: int, folder: str) -> None:
    """In one of the processes: collectives over a link, and ways of which one is a bit off on the second rank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=WORLD)
    link = connect()
    torch.save((collectives(link, rank), differences(link, rank)), Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()


def collectives(link: EmulatedLink, rank: int) -> tuple[list[Tensor], list[float]]:
    clock, c10d = Clock(), torch.ops._c10d_functional
    link_module.time = clock  # type: ignore[assignment]
    link.bytes_per_second = float(SENT)
    whole = torch.arange(SENT // 4, dtype=torch.float32) + rank
    summed = c10d.all_reduce(whole, "sum", link.group_name)
    scattered = c10d.reduce_scatter_tensor(whole, "sum", WORLD, link.group_name)
    clock.sleep(0.5)  # computes meanwhile
    summed, scattered = c10d.wait_tensor(summed), c10d.wait_tensor(scattered)
    gathered = c10d.wait_tensor(c10d.all_gather_into_tensor(scattered, WORLD, link.group_name))
    assert link.carried_seconds == 4.0
    link.bytes_per_second, link_module.time = float("inf"), time
    return [summed, scattered, gathered], clock.sleeps


def differences(link: EmulatedLink, rank: int) -> list[str]:
    block = shared_block(16, 32, "all_reduce", link)

    def off(x: Tensor) -> Tensor:
        y = block(x)
        return y + (rank == 1) * (torch.nextafter(y, torch.tensor(torch.inf)) - y).detach()

    ways = {1: Way(block), 2: Way(block), 4: Way(off)}
    return _different(
        block, torch.randn(1, 4, 16, generator=torch.Generator().manual_seed(0), requires_grad=True), ways
    )


def test_a_link_carries_one_after_the_other_and_a_way_one_bit_off_is_named(tmp_path: Path) -> None:
    expected = 2 * torch.arange(SENT // 4, dtype=torch.float32) + 1
    for rank, ((results, sleeps), wrong) in enumerate(run_ranks(__name__, tmp_path)):
        summed, scattered, gathered = results
        assert torch.equal(summed, expected) and torch.equal(gathered, expected)
        assert torch.equal(scattered, expected.chunk(WORLD)[rank])
        assert sleeps == [0.5, 1.5, 1.0, 1.0], "twice around but for what was computed meanwhile, once, once"
        assert wrong == ["4"]


@pytest.mark.sample(2)
def test_records_of_a_small_block() -> None:
    records = bench.run(rows=256, width=16, hidden=32, repeats=2, seconds=300)
    assert [(record["collectives"], record["ratio"]) for record in records] == [
        (collectives, ratio) for collectives in LAYOUTS for ratio in RATIOS
    ]
    for record in records:
        assert "wrong" not in record
        assert len(record["gate_chunks"]) == PLACES[record["collectives"]]
        assert set(record["gate_chunks"]) <= set(CHUNKS)
        link_ms = record["ratio"] * record["product_ms"] * (PLACES[record["collectives"]] // 2)
        for half in ("forward", "backward"):
            times = {way: record[f"{half}_{way}_ms"] for way in (*CHUNKS, "gate")}
            assert min(times.values()) > 0 and record[f"{half}_best"] in CHUNKS[1:]
            assert record[f"{half}_link_ms"] == pytest.approx(link_ms)
            assert times[1] >= link_ms and record[f"{half}_saved"] < 1
        assert record["gate_step"] > 0


def test_no_times_for_wrong_results(monkeypatch: pytest.MonkeyPatch) -> None:
    records = [{"collectives": "all_reduce", "ratio": ratio, "wrong": ["4"]} for ratio in RATIOS]
    monkeypatch.setattr(bench, "_collect", lambda cases, seconds: records)
    result = CliRunner().invoke(app, ["bench", "overlap", "--json"])
    assert isinstance(result.exception, OverlapError) and "differ, so no time is reported: all_reduce, 4" in str(
        result.exception
    )


def test_the_command_prints_the_records(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "_collect", lambda cases, seconds: [{"ratio": case.rank, "wrong": []} for case in cases])
    result = CliRunner().invoke(app, ["bench", "overlap", "--json"], catch_exceptions=False)
    assert json.loads(result.stdout) == [{"ratio": 0}, {"ratio": 1}]


def test_a_rank_that_fails_is_named() -> None:
    with pytest.raises(OverlapError, match="(?s)rank 0: .*rank 1: "):
        bench.run(rows=256, width=-1, hidden=32, repeats=1, seconds=100)
