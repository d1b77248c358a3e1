"""Chunked products and collectives on two ranks with gloo: forward and backward equal to the bit.

Behind AOTAutograd alone; test_packed.py cuts what inductor compiles.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.debugging import boxed_nop
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)

from tests.scale.ranks import WORLD, run_ranks
from treefx.errors import ConfigError
from treefx.passes.overlap import OverlapCollectives, Rates, measure_rates, overlap_collectives
from treefx.passes.overlap import send_chunks as sending

WIDTH, ROWS = 16, 150  # 75 rows of each rank: no number of chunks divides them
LAYOUTS = {"all_reduce": Replicate(), "gather_scatter": Shard(1)}
CUT = {"all_reduce": 1, "gather_scatter": 2}
"""How many collectives forward and backward have, each of them."""
CHUNKS = {torch.float32: (4,), torch.float64: (2, 4, 8)}
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


def run_aot(kind: str, dtype: torch.dtype, chunks: int, sizes: tuple[int, ...] = ()) -> tuple[list[Tensor], list[int]]:
    torch._dynamo.reset()
    model, counts = parallel(kind, dtype), list[int]()
    compiled = torch.compile(model, backend=with_aot(chunks, counts))
    return run(model, compiled, kind, sizes or (ROWS,), bool(sizes)), counts


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


def worker(rank: int, port: int, folder: str) -> None:
    """Run all cases in one of the processes and write what came out: a launch costs as much as ten of them."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=WORLD)
    torch.save(all_questions(rank), Path(folder) / f"{rank}.pt")
    dist.barrier()  # no rank ends while another still receives from it
    dist.destroy_process_group()


def equal_to_the_bit(kind: str) -> dict[Any, Any]:
    found = {}
    for dtype, cuts in CHUNKS.items():
        whole, _ = run_aot(kind, dtype, 1)
        for chunks in cuts:
            cut, counts = run_aot(kind, dtype, chunks)
            found[str(dtype), chunks] = equal(whole, cut), sum(counts)
    return found


def symbolic_rows() -> dict[str, Any]:
    """Sizes that change: more rows than at first, too few for any chunk, more again."""
    sizes = (150, 264, 30, 280)
    whole, _ = run_aot("gather_scatter", torch.float64, 1, sizes)
    cut, counts = run_aot("gather_scatter", torch.float64, 2, sizes)
    return {"equal": equal(whole, cut), "count": sum(counts)}


def wrong_shares() -> dict[str, Any]:
    whole, _ = run_aot("gather_scatter", torch.float64, 1)
    with whole_shares():
        cut, counts = run_aot("gather_scatter", torch.float64, 2)
    return {"close": all(torch.allclose(a, b) for a, b in zip(whole, cut, strict=True)), "counts": counts}


def agreement(rank: int) -> dict[str, Any]:
    rates = measure_rates(rows=64, width=32, repeats=2)
    OverlapCollectives(rates)
    try:
        OverlapCollectives(2 + rank)
    except ConfigError as error:
        return {"rates": repr(rates), "refused": str(error)}
    return {"rates": repr(rates), "refused": None}


def all_questions(rank: int) -> dict[str, dict[Any, Any]]:
    equals = {kind: equal_to_the_bit(kind) for kind in LAYOUTS}
    return {**equals, "symbolic": symbolic_rows(), "wrong": wrong_shares(), "agreement": agreement(rank)}


@pytest.fixture(scope="module")
def found_by_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict[Any, Any]]]:
    return run_ranks(__name__, tmp_path_factory.mktemp("ranks"), seconds=SECONDS)


@pytest.mark.parametrize("kind", LAYOUTS)
def test_chunks_equal_to_the_bit(kind: str, found_by_ranks: list[dict[str, dict[Any, Any]]]) -> None:
    for found in found_by_ranks:
        assert set(found[kind].values()) == {(True, 2 * CUT[kind])}
        assert len(found[kind]) == sum(map(len, CHUNKS.values()))


def test_symbolic_number_of_rows(found_by_ranks: list[dict[str, dict[Any, Any]]]) -> None:
    for found in found_by_ranks:
        assert found["symbolic"] == {"equal": True, "count": 4}  # the graph for too few rows has none


def test_chunks_of_all_rows_would_be_scattered_to_the_wrong_ranks(
    found_by_ranks: list[dict[str, dict[Any, Any]]],
) -> None:
    for found in found_by_ranks:
        assert found["wrong"] == {"close": False, "counts": [2, 2]}


def test_ranks_agree_on_rates_and_refuse_different_chunks(found_by_ranks: list[dict[str, dict[Any, Any]]]) -> None:
    first, second = (found["agreement"] for found in found_by_ranks)
    assert first["rates"] == second["rates"] and "Rates(" in first["rates"]
    for found in (first, second):
        assert "expected the same chunks or rates on all ranks, got [2, 3]" in found["refused"]


def test_rates_of_one_process_need_no_group() -> None:
    assert OverlapCollectives(Rates(flops_per_second=1e12, bytes_per_second=1e9)).count == 0
