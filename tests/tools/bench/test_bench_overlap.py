"""``treefx bench overlap``: every way equal to the bit, no time for one that is not, a link that takes its time."""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from typer.testing import CliRunner

from tests.cli.validation import assert_measured
from tests.scale.ranks import run_ranks
from tests.trainers.test_distributed import WORLD
from treefx.cli import app
from treefx.errors import InputError
from treefx.tools.bench.overlap import link as link_module
from treefx.tools.bench.overlap import run as bench
from treefx.tools.bench.overlap.link import EmulatedLink, connect
from treefx.tools.bench.overlap.mlp import LAYOUTS, Way, shared_block
from treefx.tools.bench.overlap.outbox import Outbox
from treefx.tools.bench.overlap.rank import CHUNKS, RATIOS, _different
from treefx.tools.bench.overlap.run import OverlapError

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


class Carrier:
    """What a link may ask of gloo, and in tensors of which sizes it did."""

    def __init__(self, gloo: dist.ProcessGroup) -> None:
        self.gloo, self.sizes = gloo, set[int]()

    def allreduce(self, tensors: list[Tensor], options: Any) -> dist.Work:
        self.sizes.update(tensor.nbytes for tensor in tensors)
        return self.gloo.allreduce(tensors, options)


def worker(rank: int, port: int, folder: str) -> None:
    """In one of the processes: collectives over a link, and ways of which one is a bit off on the second rank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=WORLD)
    link = connect(8 * SENT)
    carrier = Carrier(link._carrier)
    link._carrier = carrier  # type: ignore[assignment]
    found = [collectives(link, rank), differences(link, rank), again_and_again(link, rank), carrier.sizes]
    torch.save(found, Path(folder) / f"{rank}.pt")
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


def again_and_again(link: EmulatedLink, rank: int) -> list[float]:
    """Many times what the ranks' memory holds, two at once, the later one waited for first."""
    c10d, sums = torch.ops._c10d_functional, []
    for step in range(40):
        sent = [c10d.all_reduce(torch.full((SENT // 4,), step + rank + i), "sum", link.group_name) for i in (0.0, 0.5)]
        sums += [float(c10d.wait_tensor(one).unique()) for one in reversed(sent)]
    with pytest.raises(InputError, match="expected a sum over the ranks of an emulated link, got .*MAX"):
        c10d.all_reduce(torch.ones(1), "max", link.group_name)
    return sums


def test_a_link_carries_one_after_the_other_and_a_way_one_bit_off_is_named(tmp_path: Path) -> None:
    expected = 2 * torch.arange(SENT // 4, dtype=torch.float32) + 1
    for rank, ((results, sleeps), wrong, sums, told) in enumerate(run_ranks(__name__, tmp_path)):
        summed, scattered, gathered = results
        assert torch.equal(summed, expected) and torch.equal(gathered, expected)
        assert torch.equal(scattered, expected.chunk(WORLD)[rank])
        assert sleeps == [0.5, 1.5, 1.0, 1.0], "twice around but for what was computed meanwhile, once, once"
        assert wrong == ["4"]
        assert sums == [2 * step + 1 + more for step in range(40) for more in (1, 0)]
        assert told == {16}, "gloo carries when a collective was issued, and no message"


def outboxes(size: int) -> tuple[Outbox, Outbox]:
    """Of two ranks in one process."""
    shared = [torch.zeros(size, dtype=torch.uint8) for _ in range(2)]
    return Outbox(shared, 0), Outbox(shared, 1)


def test_what_is_sent_stays_until_all_have_read_it() -> None:
    ranks, sent = outboxes(1024), torch.arange(64, dtype=torch.float32)
    found = [[box.put(sent + rank + 10 * i) for rank, box in enumerate(ranks)] for i in range(4)]
    for i, both in enumerate(found):
        for parts in both:
            assert all(torch.equal(part, sent + rank + 10 * i) for rank, part in enumerate(parts))
    with pytest.raises(InputError, match="at most 1,024 bytes, got one of 256 next to others"):
        ranks[0].put(sent)
    ranks[0].read_by_all(1)
    assert torch.equal(ranks[0].put(-sent)[0], -sent)
    assert torch.equal(found[1][0][0], sent + 10)
    with pytest.raises(InputError, match="next to others"):
        ranks[0].put(sent)


def test_what_no_outbox_holds_is_refused() -> None:
    with pytest.raises(InputError, match="at most 1,024 bytes, got one of 1,028"):
        outboxes(1024)[0].put(torch.zeros(257))


def test_records_of_a_small_block() -> None:
    records = bench.run(rows=256, width=16, hidden=32, repeats=2, seconds=300)
    assert_measured("overlap", records)
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
    named = {"schema": "treefx.bench.overlap/1"}
    assert json.loads(result.stdout) == [named | {"ratio": 0}, named | {"ratio": 1}]


def test_a_rank_that_fails_ends_those_that_wait_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """And is the one that the error names, not the rank that waited."""
    codes = ["import time; time.sleep(600)", "import sys; sys.exit('no memory')"]

    def start(case: Any) -> Any:
        command = [sys.executable, "-c", codes[case.rank]]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    monkeypatch.setattr(bench, "_start", start)
    with pytest.raises(OverlapError, match="(?s)expected all ranks to end well, but:\nrank 1: no memory"):
        bench.run(seconds=300)
    codes[1] = codes[0]
    with pytest.raises(OverlapError, match="within 0.5 seconds"):
        bench.run(seconds=0.5)


def test_ranks_end_with_the_bench(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever ends it: a rank that cannot start, an interrupt while it waits."""
    started: list[subprocess.Popen[str]] = []

    def start(case: Any) -> Any:
        if case.rank == refused:
            raise OSError("no process")
        command = [sys.executable, "-c", "import time; time.sleep(600)"]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
        return started[-1]

    def interrupt(*_: Any) -> bool:
        raise KeyboardInterrupt

    monkeypatch.setattr(bench, "_start", start)
    monkeypatch.setattr(bench, "_wait", interrupt)
    for refused, expected in ((1, OSError), (None, KeyboardInterrupt)):
        with pytest.raises(expected):
            bench.run(seconds=300)
    assert [rank.wait(timeout=60) for rank in started] == [-9, -9, -9]
