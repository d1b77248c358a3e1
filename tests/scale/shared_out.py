"""A small model, how ranks share out its weights or a llama's, and what tests of tensor parallelism have in common."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
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
from torch.utils.checkpoint import checkpoint

from tests.batches import Batch
from tests.models import Output
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


class Small(nn.Module):
    """A llama by name, of few operators: learned positions, grouped heads, a gated MLP. One head of keys per rank.

    Args:
        ranks: How many share out its weights.
        layers: How many blocks it has.
        checkpointing: Whether the backward computes them again.
        length: Of the longest row.
    """

    def __init__(self, ranks: int = 1, layers: int = 1, checkpointing: bool = False, length: int = 64) -> None:
        super().__init__()
        torch.manual_seed(0)
        width, vocab = 16 * ranks, 64 + -64 % ranks
        self.model = nn.Module()
        self.model.embed_tokens, self.model.place = nn.Embedding(vocab, width), nn.Embedding(length, width)
        self.model.layers = nn.ModuleList(Block(width, ranks) for _ in range(layers))
        self.model.norm = nn.LayerNorm(width)
        self.lm_head, self.checkpointing = nn.Linear(width, vocab, bias=False), checkpointing
        self.double()

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        position_ids: Tensor | None = None,
        use_cache: bool = False,
    ) -> Output:
        columns = torch.arange(input_ids.shape[1], device=input_ids.device)
        seen = None
        if attention_mask is not None:
            seen = (columns[:, None] >= columns) & attention_mask.bool()[:, None, None]
        x = self.model.embed_tokens(input_ids)
        x = x + self.model.place(columns if position_ids is None else position_ids)
        for block in self.model.layers:
            x = checkpoint(block, x, seen=seen, use_reentrant=False) if self.checkpointing else block(x, seen=seen)
        hidden = self.model.norm(x)
        logits = self.lm_head(hidden)
        loss = None
        if labels is not None:
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return Output(loss, logits, hidden)


class Block(nn.Module):
    """Attention and MLP, each behind a norm."""

    def __init__(self, width: int, kv_heads: int) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.self_attn, self.mlp = Attention(width, kv_heads), Gated(width)

    def forward(self, x: Tensor, seen: Tensor | None) -> Tensor:
        x = x + self.self_attn(hidden_states=self.input_layernorm(x), seen=seen)
        return x + self.mlp(self.post_attention_layernorm(x))


class Attention(nn.Module):
    """Two heads of queries to each of keys; scores larger than usual, so that the mask shows in the gradients."""

    def __init__(self, width: int, kv_heads: int) -> None:
        super().__init__()
        self.q_proj, self.o_proj = nn.Linear(width, 16 * kv_heads), nn.Linear(16 * kv_heads, width)
        self.k_proj, self.v_proj = nn.Linear(width, 8 * kv_heads, bias=False), nn.Linear(width, 8 * kv_heads)

    def forward(self, hidden_states: Tensor, seen: Tensor | None) -> Tensor:
        batch, length, _ = hidden_states.shape
        q, k, v = (
            project(hidden_states).view(batch, length, -1, 8).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        mixed = F.scaled_dot_product_attention(2.0 * q, k, v, seen, is_causal=seen is None, enable_gqa=True)
        return self.o_proj(mixed.transpose(1, 2).reshape(batch, length, -1))


class Gated(nn.Module):
    """The gated MLP."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(width, width), nn.Linear(width, width)
        self.down_proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
