"""Measure rates of products and collectives, alone and at once; agree over all ranks."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from treefx.passes.overlap.gate import Rates

__all__ = ["measure_rates"]

_CUT = 8
_c10d = torch.ops._c10d_functional


def measure_rates(
    group: dist.ProcessGroup | None = None,
    *,
    rows: int = 2048,
    width: int = 1024,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    repeats: int = 7,
    symbolic_rows: int | None = None,
) -> Rates:
    """Measure rates for ``OverlapCollectives``; every rank calls it and gets the same.

    Args:
        group: The group that the collectives of the model run in. None: all ranks.
        rows: Tokens of a typical step.
        width: Of the product: ``[rows, width] @ [width, width]``.
        dtype: Of the product and the messages.
        device: Where both happen.
        repeats: Of each measurement; the median counts.
        symbolic_rows: As in ``Rates``.
    """
    left, right = torch.ones(rows, width, dtype=dtype, device=device), torch.ones(width, width, dtype=dtype).to(device)
    used: Any = group or dist.group.WORLD
    name, small, pieces = used.group_name, left[:1].clone(), torch.tensor_split(left, _CUT)

    def issue(value: Tensor) -> Any:
        return _c10d.all_reduce(value, "sum", name)

    def both() -> None:
        sent = issue(left)
        left @ right
        _c10d.wait_tensor(sent)

    runs: list[Callable[[], Any]] = [
        lambda: left @ right,
        lambda: [piece @ right for piece in pieces],
        lambda: _c10d.wait_tensor(issue(left)),
        lambda: _c10d.wait_tensor(issue(small)),
        both,
    ]
    product, cut, sent, latency, at_once = _agree([_median(run, left, repeats) for run in runs])
    sending = max(sent - latency, 1e-9)
    hidden = (product + sent - at_once) / min(product, sent)
    return Rates(
        flops_per_second=2.0 * rows * width * width / product,
        bytes_per_second=2.0 * left.nbytes / sending,
        product_seconds=max(0.0, cut - product) / _CUT,
        latency_seconds=latency,
        hidden=min(1.0, max(0.0, hidden)),
        symbolic_rows=symbolic_rows,
    )


def _median(run: Callable[[], Any], value: Tensor, repeats: int) -> float:
    """Seconds of a run, without its first, which all ranks begin together."""
    times = []
    for _ in range(repeats + 1):
        dist.barrier()
        start = _now(value)
        run()
        times.append(_now(value) - start)
    return statistics.median(times[1:])


def _now(value: Tensor) -> float:
    if value.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter()


def _agree(seconds: list[float]) -> list[float]:
    """Return the slowest rank's seconds on all ranks, so that all decide alike."""
    given: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(given, seconds)
    return [max(times) for times in zip(*given, strict=True)]
