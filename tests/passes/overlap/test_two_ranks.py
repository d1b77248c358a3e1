"""Chunked products and collectives on two ranks with gloo: forward and backward equal to the bit."""

import functools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.debugging import boxed_nop
from torch._inductor import config as inductor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)

from tests.trainers.test_distributed import WORLD, run_ranks
from treefx.errors import ConfigError
from treefx.passes.overlap import OverlapCollectives, Rates, measure_rates, overlap_collectives
from treefx.passes.overlap import send_chunks as sending

pytestmark = pytest.mark.sample(3)

WIDTH, ROWS = 16, 150  # 75 rows of each rank: no number of chunks divides them
LAYOUTS = {"all_reduce": Replicate(), "gather_scatter": Shard(1)}
CUT = {"all_reduce": 1, "gather_scatter": 2}
"""How many collectives forward and backward have, each of them."""
CHUNKS = (2, 4, 8)
DTYPES = {"float32": torch.float32, "float64": torch.float64}
SECONDS = 400


class Gated(nn.Module):
    """An MLP with two products before its middle, so that the backward sends a sum of products."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 48)
        self.gate = nn.Linear(WIDTH, 48, bias=False)
        self.down = nn.Linear(48, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)) * self.gate(x))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = Gated()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.mlp(x)
        return y


def parallel(kind: str, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    layout = LAYOUTS[kind]
    plan: dict[str, Any] = {
        "mlp": PrepareModuleInput(input_layouts=layout, desired_input_layouts=Replicate()),
        "mlp.up": ColwiseParallel(),
        "mlp.gate": ColwiseParallel(),
        "mlp.down": RowwiseParallel(output_layouts=layout),
    }
    return parallelize_module(Model().to(dtype), init_device_mesh("cpu", (WORLD,)), plan)


def run(model: nn.Module, called: Any, kind: str, sizes: tuple[int, ...], symbolic: bool = False) -> list[Tensor]:
    """Output and gradients of every batch, the gradients of weights this rank's share."""
    found = []
    for rows in sizes:
        rows, seed = (rows // WORLD, 1 + dist.get_rank()) if kind == "gather_scatter" else (rows, 0)
        random = torch.Generator().manual_seed(seed)
        dtype = next(model.parameters()).dtype
        x = torch.randn(1, rows, WIDTH, dtype=dtype, generator=random, requires_grad=True)
        if symbolic:
            torch._dynamo.mark_dynamic(x, 1)
        model.zero_grad()
        y = called(x)
        y.square().sum().backward()
        found += [y.detach(), x.grad, *(p.grad.to_local() for p in model.parameters())]  # type: ignore[union-attr]
    return found


def with_aot(chunks: int, counts: list[int]) -> Any:
    def compiler(gm: fx.GraphModule, inputs: Any) -> Any:
        counts.append(overlap_collectives(gm.graph, chunks))
        gm.recompile()
        return boxed_nop(gm, inputs)

    return aot_autograd(fw_compiler=compiler, bw_compiler=compiler)


def run_aot(kind: str, dtype: torch.dtype, chunks: int) -> tuple[list[Tensor], list[int]]:
    torch._dynamo.reset()
    model, counts = parallel(kind, dtype), list[int]()
    return run(model, torch.compile(model, backend=with_aot(chunks, counts)), kind, (ROWS,)), counts


def run_inductor(
    kind: str, dtype: torch.dtype, chunks: int, sizes: tuple[int, ...] = (), backend: str = "inductor"
) -> tuple[list[Tensor], list[int]]:
    torch._dynamo.reset()
    model, overlap = parallel(kind, dtype), OverlapCollectives(chunks)
    uncached = torch._functorch.config.patch(enable_autograd_cache=False)
    with uncached, inductor.patch(post_grad_custom_pre_pass=overlap, fx_graph_cache=False):
        found = run(model, torch.compile(model, backend=backend), kind, sizes or (ROWS,), bool(sizes))
    return found, [overlap.count]


Runs = dict[str, Callable[..., tuple[list[Tensor], list[int]]]]
RUNS: Runs = {"aot": run_aot, "inductor": run_inductor}


def equal(first: list[Tensor], second: list[Tensor]) -> bool:
    return len(first) == len(second) and all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@contextmanager
def whole_shares() -> Iterator[None]:
    """The plausible mistake: chunk j of a reduce-scatter as the j-th piece of all rows, not of every rank's."""
    right = sending._cut
    sending._cut = lambda site, product, emit, chunks: emit.cut(product.args[0], 0, chunks)
    try:
        yield
    finally:
        sending._cut = right


def worker(rank: int, port: int, folder: str, name: str) -> None:
    """Run one of the cases in one of the processes and write what came out."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=WORLD)
    torch.save(CASES[name](rank), Path(folder) / f"{rank}.pt")
    dist.barrier()  # no rank ends while another still receives from it
    dist.destroy_process_group()


def equal_to_the_bit(rank: int, inner: str, kind: str) -> dict[Any, Any]:
    found = {}
    for name, dtype in DTYPES.items():
        whole, _ = RUNS[inner](kind, dtype, 1)
        for chunks in CHUNKS:
            cut, counts = RUNS[inner](kind, dtype, chunks)
            found[name, chunks] = equal(whole, cut), sum(counts)
    return found


def symbolic_rows(rank: int) -> dict[Any, Any]:
    """Sizes that change: more rows than at first, too few for any chunk, more again."""
    sizes = (150, 264, 30, 280)
    whole, _ = run_inductor("gather_scatter", torch.float64, 1, sizes)
    cut, counts = run_inductor("gather_scatter", torch.float64, 2, sizes)
    return {"equal": equal(whole, cut), "count": counts[0]}


def backend_treefx(rank: int) -> dict[Any, Any]:
    """A graph that treefx runs ordinarily is compiled with the pass that inductor has."""
    whole, _ = run_inductor("all_reduce", torch.float64, 1, backend="treefx")
    cut, counts = run_inductor("all_reduce", torch.float64, 4, backend="treefx")
    return {"equal": equal(whole, cut), "count": counts[0]}


def wrong_shares(rank: int) -> dict[Any, Any]:
    whole, _ = run_aot("gather_scatter", torch.float64, 1)
    with whole_shares():
        cut, counts = run_aot("gather_scatter", torch.float64, 2)
    return {"close": all(torch.allclose(a, b) for a, b in zip(whole, cut, strict=True)), "counts": counts}


def agreement(rank: int) -> dict[Any, Any]:
    rates = measure_rates(rows=64, width=32, repeats=2)
    OverlapCollectives(rates)
    try:
        OverlapCollectives(2 + rank)
    except ConfigError as error:
        return {"rates": repr(rates), "refused": str(error)}
    return {"rates": repr(rates), "refused": None}


CASES: dict[str, Callable[[int], dict[Any, Any]]] = {
    **{f"{i} {kind}": functools.partial(equal_to_the_bit, inner=i, kind=kind) for i in RUNS for kind in LAYOUTS},
    "symbolic": symbolic_rows,
    "treefx": backend_treefx,
    "wrong": wrong_shares,
    "agreement": agreement,
}


@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize("inner", ["aot", pytest.param("inductor", marks=pytest.mark.sample(8))])
def test_chunks_equal_to_the_bit(inner: str, kind: str, tmp_path: Path) -> None:
    for found in run_ranks(__name__, tmp_path, f"{inner} {kind}", seconds=SECONDS):
        assert set(found.values()) == {(True, 2 * CUT[kind])}
        assert len(found) == len(DTYPES) * len(CHUNKS)


@pytest.mark.sample(2)
def test_symbolic_number_of_rows(tmp_path: Path) -> None:
    for found in run_ranks(__name__, tmp_path, "symbolic", seconds=SECONDS):
        assert found == {"equal": True, "count": 4}  # the graph for too few rows has none


@pytest.mark.sample(2)
def test_backend_treefx_leaves_the_pass_to_inductor(tmp_path: Path) -> None:
    for found in run_ranks(__name__, tmp_path, "treefx", seconds=SECONDS):
        assert found["equal"] and found["count"] >= 2


def test_chunks_of_all_rows_would_be_scattered_to_the_wrong_ranks(tmp_path: Path) -> None:
    for found in run_ranks(__name__, tmp_path, "wrong", seconds=SECONDS):
        assert found == {"close": False, "counts": [2, 2]}


def test_ranks_agree_on_rates_and_refuse_different_chunks(tmp_path: Path) -> None:
    first, second = run_ranks(__name__, tmp_path, "agreement", seconds=SECONDS)
    assert first["rates"] == second["rates"] and "Rates(" in first["rates"]
    for found in (first, second):
        assert "expected the same chunks or rates on all ranks, got [2, 3]" in found["refused"]


def test_rates_of_one_process_need_no_group() -> None:
    assert OverlapCollectives(Rates(flops_per_second=1e12, bytes_per_second=1e9)).count == 0
