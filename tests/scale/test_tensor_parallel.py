"""Models in tensor parallelism: they run on rows, exactly, and say why. Two processes, one batch."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import treefx
from tests.oracle import FLOAT64, Outcome, assert_close
from tests.trainers.test_distributed import WORLD, batches, llama, run_ranks, small

INNER = ("eager", "aot_eager", "inductor")


def parallel(model: Any) -> nn.Module:
    plan = {
        f"model.layers.{i}.{name}": style()
        for i in range(model.config.num_hidden_layers)
        for names, style in (
            (
                ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"),
                ColwiseParallel,
            ),
            (("self_attn.o_proj", "mlp.down_proj"), RowwiseParallel),
        )
        for name in names
    }
    return parallelize_module(model, init_device_mesh("cpu", (WORLD,)), plan)


def steps(model: Any, compiled: Any) -> list[Outcome]:
    """Loss and whole gradients of three batches of one shape: PyTorch 2.13 compiles no other one (RecursionError)."""
    found = []
    for batch in batches(0):
        model.zero_grad()
        loss = compiled(**small(batch)).loss
        loss.backward()
        whole = {
            n: p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for n, p in model.named_parameters()
        }
        found.append(Outcome(loss.detach().clone(), {n: g.clone() for n, g in whole.items()}))
    return found


def worker(rank: int, port: int, folder: str, inner: str) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, WORLD, rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD)
    model = parallel(llama())
    compiled = torch.compile(model, backend="treefx", options={"inner": inner, "min_sharing": 1.0})
    found = steps(model, compiled)
    stats = dict(treefx.inspect(compiled).stats)
    torch.save({"fallback": stats["fallback"], "found": [(x.loss, x.gradients) for x in found]}, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.parametrize("inner", INNER)
@pytest.mark.sample(2)
def test_tensor_parallel_models_run_on_rows(inner: str, tmp_path: Path) -> None:
    model = llama()
    expected = steps(model, model)
    for result in run_ranks(__name__, tmp_path, inner):
        for (loss, gradients), want in zip(result["found"], expected, strict=True):
            assert_close(Outcome(loss, gradients), want, FLOAT64)
        assert "DTensor" in result["fallback"]
