"""Run one process of ``treefx bench overlap``, its case given as JSON."""

from __future__ import annotations

import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from treefx.passes.overlap import Rates, measure_rates
from treefx.tools.bench.overlap.link import EmulatedLink, connect
from treefx.tools.bench.overlap.mlp import LAYOUTS, Block, Way, compile_block, shared_block

__all__ = ["CHUNKS", "RATIOS", "OverlapCase", "measure"]

CHUNKS = (1, 2, 4, 8)
"""1 is the graph as it was."""
RATIOS = (0.5, 1.0, 2.0)
GATE = "gate"
RANKS = 2
_UNDER_WAY = 6
"""Collectives whose bytes may not have been received everywhere: that one has been is told with the next."""


@dataclass(frozen=True, kw_only=True)
class OverlapCase:
    """What one process is told."""

    name: str
    rank: int
    meeting: str
    """A file that no other run uses, where the ranks find each other."""
    rows: int
    width: int
    hidden: int
    repeats: int


@dataclass(frozen=True)
class _Step:
    """Seconds of one on this rank, and for how long its link carried something."""

    forward: float
    backward: float
    forward_link: float
    backward_link: float

    @property
    def whole(self) -> float:
        return self.forward + self.backward


def measure(case: OverlapCase) -> list[dict[str, Any]]:
    """Everything, on one rank; the records are the same on all.

    A record has ``wrong``, the ways whose results differ on any rank, and no times if there are any.
    """
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{case.meeting}", rank=case.rank, world_size=RANKS)
    link = connect(_UNDER_WAY * case.rows * case.width * torch.float32.itemsize)
    records = [record for collectives in LAYOUTS for record in _measure_layout(case, collectives, link)]
    dist.destroy_process_group()
    return records


def _measure_layout(case: OverlapCase, collectives: str, link: EmulatedLink) -> Iterator[dict[str, Any]]:
    torch._dynamo.reset()
    block, batch = shared_block(case.width, case.hidden, collectives, link), _batch(case, collectives)
    ways: dict[Any, Way] = {chunks: compile_block(block, chunks) for chunks in CHUNKS}
    for ratio in RATIOS:
        link.bytes_per_second = math.inf
        product = _product_seconds(case)
        size = case.rows * case.width * batch.itemsize * (2 if collectives == "all_reduce" else 1)
        link.bytes_per_second = size / (ratio * product)
        rates = measure_rates(link, rows=case.rows, width=case.width, repeats=case.repeats)
        ways[GATE] = compile_block(block, rates)
        record = {
            "collectives": collectives,
            "ratio": ratio,
            "product_ms": 1e3 * product,
            "link_GB_per_second": link.bytes_per_second / 1e9,
            "wrong": _different(block, batch, ways),
            "gate_chunks": list(ways[GATE].chosen),
            **_rates(rates),
        }
        yield record if record["wrong"] else record | _timed(block, batch, ways, case.repeats, link)


def _batch(case: OverlapCase, collectives: str) -> Tensor:
    """Of this rank: all rows, or its share of them."""
    share = collectives == "gather_scatter"
    random = torch.Generator().manual_seed(1 + dist.get_rank() if share else 0)
    rows = case.rows // RANKS if share else case.rows
    return torch.randn(1, rows, case.width, generator=random, requires_grad=True)


def _product_seconds(case: OverlapCase) -> float:
    """Time the product around a forward collective on all ranks; return the slowest."""
    left, right = torch.randn(case.rows, case.hidden // RANKS), torch.randn(case.hidden // RANKS, case.width)
    times = []
    for _ in range(case.repeats + 1):
        dist.barrier()
        start = time.perf_counter()
        left @ right
        times.append(time.perf_counter() - start)
    return statistics.median(_slowest(times[1:]))


def _slowest(seconds: list[float]) -> list[float]:
    """Of every repeat, the slowest rank's."""
    given: list[Any] = [None] * RANKS
    dist.all_gather_object(given, seconds)
    return [max(times) for times in zip(*given, strict=True)]


def _different(block: Block, batch: Tensor, ways: dict[Any, Way]) -> list[str]:
    """List ways with any output or gradient that differs in a bit from the untouched graph."""
    found = {way: _results(block, batch, ways[way].call) for way in ways}
    wrong = [str(way) for way in ways if not all(map(torch.equal, found[way], found[CHUNKS[0]]))]
    given: list[Any] = [None] * RANKS
    dist.all_gather_object(given, wrong)
    return sorted({way for names in given for way in names})


def _results(block: Block, batch: Tensor, call: Callable[[Tensor], Tensor]) -> list[Tensor]:
    block.zero_grad(set_to_none=True)
    batch.grad = None
    y = call(batch)
    torch.autograd.backward(y.square().sum())
    weights = [getattr(parameter.grad, "to_local")() for parameter in block.parameters()]
    assert batch.grad is not None
    return [y.detach(), batch.grad, *weights]


def _timed(block: Block, batch: Tensor, ways: dict[Any, Way], repeats: int, link: EmulatedLink) -> dict[str, Any]:
    """All ways in turn, each time another one first; medians of the slowest rank's seconds."""
    steps: dict[Any, list[_Step]] = {way: [] for way in ways}
    order = list(ways)
    for turn in range(repeats + 1):
        first = turn % len(order)
        for way in order[first:] + order[:first]:
            steps[way].append(_one_step(block, batch, ways[way].call, link))

    def median(part: Callable[[_Step], float]) -> dict[Any, float]:
        return {way: statistics.median(_slowest([part(step) for step in found[1:]])) for way, found in steps.items()}

    forward, backward, whole = median(lambda s: s.forward), median(lambda s: s.backward), median(lambda s: s.whole)
    untouched = steps[CHUNKS[0]][0]
    return {
        **_figures("forward", forward, untouched.forward_link),
        **_figures("backward", backward, untouched.backward_link),
        "gate_step": whole[GATE] / whole[CHUNKS[0]],
    }


def _one_step(block: Block, batch: Tensor, call: Callable[[Tensor], Tensor], link: EmulatedLink) -> _Step:
    block.zero_grad(set_to_none=True)
    batch.grad = None
    dist.barrier()
    start, carried = time.perf_counter(), link.carried_seconds
    y = call(batch)
    forward, forward_link = time.perf_counter() - start, link.carried_seconds - carried
    gradient = torch.ones_like(y)
    dist.barrier()
    start = time.perf_counter()
    torch.autograd.backward(y, gradient)
    backward = time.perf_counter() - start
    return _Step(forward, backward, forward_link, link.carried_seconds - carried - forward_link)


def _figures(name: str, seconds: dict[Any, float], on_link: float) -> dict[str, Any]:
    """Return milliseconds of every way and on the link, and the best number of chunks."""
    best = min(CHUNKS[1:], key=lambda chunks: seconds[chunks])
    saved = seconds[CHUNKS[0]] - seconds[best]
    return {
        **{f"{name}_{way}_ms": 1e3 * value for way, value in seconds.items()},
        f"{name}_link_ms": 1e3 * on_link,
        f"{name}_best": best,
        f"{name}_saved": saved / seconds[CHUNKS[0]],
        f"{name}_hidden": saved / on_link,
    }


def _rates(rates: Rates) -> dict[str, float]:
    return {
        "gate_GFLOP_per_second": rates.flops_per_second / 1e9,
        "gate_GB_per_second": rates.bytes_per_second / 1e9,
        "gate_latency_ms": 1e3 * rates.latency_seconds,
        "gate_product_ms": 1e3 * rates.product_seconds,
        "gate_hidden": rates.hidden,
    }


if __name__ == "__main__":
    print(json.dumps(measure(OverlapCase(**json.loads(sys.argv[1])))))
