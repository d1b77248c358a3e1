"""``TreeBatchSampler`` on ranks that were not given the same: each says what differs, and none waits for ever."""

import datetime
import os
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.planning.costs import linear_cost
from tests.scale.ranks import run_ranks
from treefx.data import TreeBatchSampler
from treefx.errors import InputError
from treefx.scale import agreement

ROWS = [[1, 2, 3, row] for row in range(4, 16)]
OTHERS: dict[str, Callable[[], dict[str, Any]]] = {
    "the number of rows": lambda: {"sequences": ROWS[:-1]},
    "the token ids of the rows": lambda: {"sequences": [*ROWS[:-1], [1, 2, 9, 9]]},
    "the order of the rows": lambda: {"sequences": ROWS[::-1]},
    "the weights": lambda: {"weights": [0.5] * len(ROWS)},
    "seed": lambda: {"seed": 1},
    "shuffle": lambda: {"shuffle": False},
    "cost": lambda: {"cost": linear_cost(run=2.0)},
    "the budget in tokens": lambda: {"max_tokens": 9},
}
"""What rank 1 is given otherwise."""
PATIENCE = 1.0


def sampler(rank: int, **changes: Any) -> TreeBatchSampler:
    given: dict[str, Any] = {"sequences": ROWS, "max_tokens": 8, "cost": linear_cost(), **changes}
    return TreeBatchSampler(num_replicas=2, rank=rank, **given)


def worker(rank: int, port: int, folder: str) -> None:
    """One of the processes; writes what each case gave."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=2, timeout=datetime.timedelta(seconds=300))
    agreement._SECONDS = 200.0
    found = {name: said(sampler(rank, **(other() if rank else {}))) for name, other in OTHERS.items()}
    later = sampler(rank)
    later.set_epoch(rank)
    found["epoch"] = said(later)
    same = sampler(rank)
    found["same"] = said(same), said(same)
    dist.barrier()
    agreement._SECONDS = PATIENCE
    started = time.monotonic()
    found["alone"] = said(sampler(rank)) if rank == 0 else "", time.monotonic() - started
    found["other world"] = said(TreeBatchSampler(ROWS, 8, num_replicas=3, rank=rank))
    torch.save(found, Path(folder) / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def said(batches: TreeBatchSampler) -> str:
    """The error or the warning with which iteration begins."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            list(batches)
        except InputError as error:
            return str(error)
    return "".join(str(item.message) for item in caught)


def test_ranks_that_were_given_something_else_say_what(tmp_path: Path) -> None:
    results = run_ranks(__name__, tmp_path, seconds=300)
    for found in results:
        for name in [*OTHERS, "epoch"]:
            assert f"TreeBatchSampler needs the same arguments on all ranks, but {name} differs:" in found[name]
            assert "on rank 1," in found[name] and "on rank 0;" in found[name]
        assert "1 on rank 1, 0 on rank 0" in found["seed"]
        assert found["same"] == ("", "")
        assert found["other world"] == ""
    message, seconds = results[0]["alone"]
    assert "rank 1 did not begin within 1 s" in message
    assert PATIENCE <= seconds < 60


def test_without_other_ranks_nothing_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TreeBatchSampler, "_facts", lambda batches: pytest.fail("compared"))
    assert sorted(row for rank in (0, 1) for batch in sampler(rank) for row in batch) == list(range(len(ROWS)))
