"""Llamas whose weights ranks share out (tensor and sequence parallelism), and what their tests have in common."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from tests.batches import Batch
from tests.oracle import Outcome
from tests.trainers.test_distributed import batches, small

SECONDS = 300
"""After which ranks that hang are ended, and the test fails."""
RATE = 0.1
COLUMNS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
ROWS = ("self_attn.o_proj", "mlp.down_proj")
NORMS = ("input_layernorm", "post_attention_layernorm")


def mesh() -> DeviceMesh:
    """All processes, in one dimension."""
    return init_device_mesh("cpu", (dist.get_world_size(),))


def blocks(model: Any, styles: dict[str, ParallelStyle]) -> dict[str, ParallelStyle]:
    """The same for every block."""
    return {f"model.layers.{i}.{name}": style for i in range(len(model.model.layers)) for name, style in styles.items()}


def parallel(model: Any, head: bool = False) -> nn.Module:
    plan = blocks(
        model, {**{name: ColwiseParallel() for name in COLUMNS}, **{name: RowwiseParallel() for name in ROWS}}
    )
    if head:
        plan["lm_head"] = ColwiseParallel(output_layouts=Replicate())
    return parallelize_module(model, mesh(), plan)


def gathered(name: str | None = None) -> PrepareModuleInput:
    """Takes tokens that are shared out, as its first argument or as one by name, and gives a module all of them."""
    if name is None:
        return PrepareModuleInput(
            input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),), use_local_output=True
        )
    return PrepareModuleInput(
        input_kwarg_layouts={name: Shard(1)}, desired_input_kwarg_layouts={name: Replicate()}, use_local_output=True
    )


def sequence_parallel(model: Any, norms: Sequence[str] = NORMS) -> nn.Module:
    """Each rank has its part of the tokens between the products: all of them equally many."""
    plan: dict[str, ParallelStyle] = blocks(
        model,
        {
            **{name: ColwiseParallel() for name in COLUMNS},
            **{name: RowwiseParallel(output_layouts=Shard(1)) for name in ROWS},
            **{name: SequenceParallel(use_local_output=True) for name in norms},
            "self_attn": gathered("hidden_states"), "mlp": gathered(),
        },
    )  # fmt: skip
    plan["model.norm"] = gathered()
    plan["model.layers.0"] = PrepareModuleInput(
        input_layouts=(Replicate(),), desired_input_layouts=(Shard(1),), use_local_output=True
    )
    return parallelize_module(model, mesh(), plan)


def vocabulary(model: Any) -> nn.Module:
    """The rows of the embedding, the vocabulary, are shared out too, as torchtitan does it."""
    parallel(model, head=True)
    plan = {"model.embed_tokens": RowwiseParallel(input_layouts=Replicate())}
    return parallelize_module(model, mesh(), plan)


def whole_gradients(model: nn.Module) -> dict[str, Tensor]:
    """The gradients of all parameters, put together of what the ranks have."""
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return {n: (g.full_tensor() if isinstance(g, DTensor) else g).clone() for n, g in grads.items()}


def steps(model: Any, compiled: Any, given: Sequence[Batch] | None = None) -> list[Outcome]:
    """Loss and whole gradients of batches, the weights a step further every time."""
    optimizer, found = torch.optim.SGD(model.parameters(), lr=RATE, foreach=False), []
    for batch in batches(0) if given is None else given:
        optimizer.zero_grad()
        loss = compiled(**small(batch)).loss
        loss.backward()
        found.append(Outcome(loss.detach().clone(), whole_gradients(model)))
        optimizer.step()
    return found


def run_rank(rank: int, port: int, folder: str, work: Callable[[], Any], world: int = 2) -> None:
    """Join the other ranks, and write what ``work`` finds there."""
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, world, rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    torch.save(work(), Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()
