"""DDP, and FSDP2 with ``treefx.convert``: two processes, each with other batches."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import treefx
from tests.batches import Batch, distinct_with_padding, shared_batch
from tests.models import double
from tests.oracle import FLOAT32, FLOAT64, Outcome, assert_close
from tests.scale.ranks import run_ranks
from tests.trainers.converted import sharded

WORLD = 2
RATE = 0.3


def batches(rank: int) -> list[Batch]:
    """Three batches of one shape, whose forests differ in size from rank to rank and step to step."""
    return [shared_batch(rows=4, length=12, shared=n + rank, seed=10 * n + rank) for n in (4, 6, 7)]


def llama(checkpointing: bool = False) -> Any:
    model = double("llama", num_hidden_layers=1, hidden_size=32, intermediate_size=32, head_dim=8, vocab_size=32)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def small(batch: Batch) -> dict[str, Tensor]:
    """The batch with its tokens in a vocabulary of 32; rows stay as far apart as they were."""
    inputs = dict(batch.inputs())
    real = inputs["input_ids"] > 0
    inputs["input_ids"] = torch.where(real, inputs["input_ids"] % 29 + 3, 0)
    inputs["labels"] = torch.where(inputs["labels"] >= 0, inputs["input_ids"], -100)
    return inputs


def train(model: nn.Module, rank: int, accumulate: bool) -> list[float]:
    """Steps of plain gradient descent; the losses."""
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    losses, waiting = [], []
    for batch in batches(rank):
        waiting.append(model(**small(batch)).loss)
        losses.append(float(waiting[-1].detach()))
        if accumulate and len(waiting) < 2:
            continue  # the backward of this forward comes after the next forward, on another tree
        torch.stack(waiting).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        waiting = []
    return losses


def reference(model: nn.Module, accumulate: bool = False) -> tuple[list[list[float]], nn.Module]:
    """What all ranks together must compute: the mean of their gradients, in one process without any compiler."""
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    losses: list[list[float]] = [[] for _ in range(WORLD)]
    given = [batches(rank) for rank in range(WORLD)]
    for step in range(len(given[0])):
        for rank in range(WORLD):
            loss = model(**small(given[rank][step])).loss
            losses[rank].append(float(loss.detach()))
            (loss / WORLD).backward()
        if accumulate and step % 2 == 0:
            continue
        optimizer.step()
        optimizer.zero_grad()
    return losses, model


def compiled_in_ddp() -> tuple[nn.Module, nn.Module]:
    model = llama()
    model.compile(backend="treefx", options={"inner": "eager"})
    return DistributedDataParallel(model), model


def compiled_around_ddp() -> tuple[nn.Module, nn.Module]:
    """As accelerate does it; with buckets so small that Dynamo would cut the graph between them."""
    setattr(dist, "_DEFAULT_FIRST_BUCKET_BYTES", 1000)
    model = llama()
    wrapped = DistributedDataParallel(model, bucket_cap_mb=0.001)
    return torch.compile(wrapped, backend="treefx", options={"inner": "aot_eager"}), model


Cases = dict[str, tuple[Callable[[], tuple[nn.Module, nn.Module]], bool]]

CASES: Cases = {
    "ddp of compiled": (compiled_in_ddp, False),
    "compiled ddp": (compiled_around_ddp, False),
}
"""How to build the model that is called and the one that holds the weights; whether two forwards share a backward."""


def worker(rank: int, port: int, folder: str) -> None:
    """Train every case in one of the processes and write what came out."""
    train_cases(rank, port, folder, CASES | sharded.CASES)


def train_cases(rank: int, port: int, folder: str, cases: Cases) -> None:
    """Join the other processes, then train case after case."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=WORLD)
    torch.save(outcomes(rank, cases), Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()


def outcomes(rank: int, cases: Cases) -> dict[str, Any]:
    """Of every case: the losses, the weights at the end, and what treefx says of it."""
    results = {}
    for name, (build, accumulate) in cases.items():
        torch._dynamo.reset()
        called, model = build()
        losses = train(called, rank, accumulate)
        stats = treefx.inspect(model).stats
        weights = {
            name: p.full_tensor() if hasattr(p, "full_tensor") else p.detach() for name, p in model.named_parameters()
        }
        kept = ("fallback", "sharing_ratio", "attention_rewritten", "expansions", "ran", "head_tokens")
        results[name] = (losses, weights, {key: stats[key] for key in kept})
    return results


def test_ranks_match_one_uncompiled_process(tmp_path: Path) -> None:
    results = run_ranks(__name__, tmp_path)
    for name, (_, accumulate) in CASES.items():
        check_ranks(results, name, llama(), accumulate)
    for name, (_, accumulate) in sharded.CASES.items():
        limit = FLOAT32 if name == "qwen3_moe" else FLOAT64  # its router has a softmax in float32
        check_ranks(results, name, sharded.tiny(name.split(",")[0]), accumulate, limit)
        for rank, result in enumerate(results):
            last = small(batches(rank)[-1])
            window = sharded.WINDOW if name.startswith("gemma2") else 1000
            met = distinct_with_padding(last["input_ids"], last["attention_mask"], window)
            assert result[name][2]["head_tokens"] == met, name


def check_ranks(
    results: list[dict[str, Any]], name: str, model: nn.Module, accumulate: bool, limit: float = FLOAT64
) -> None:
    """Losses and updates of weights of every rank against the model as it was before, trained in one process."""
    first = {key: p.detach().clone() for key, p in model.named_parameters()}
    losses, model = reference(model, accumulate)
    expected = {f"{name}: {key}": p.detach() - first[key] for key, p in model.named_parameters()}
    for rank in range(WORLD):
        got, weights, stats = results[rank][name]
        updates = {f"{name}: {key}": weights[key].detach() - first[key] for key in weights}
        assert_close(
            Outcome(torch.tensor(got), dict(updates)), Outcome(torch.tensor(losses[rank]), dict(expected)), limit
        )
        assert stats["fallback"] is None, name
        assert stats["ran"] == "packed", name
        assert [item["op"] for item in stats["expansions"]] == (["layers.1.conv"] if "lfm2" in name else []), name
        assert stats["sharing_ratio"] > 1.2, name
        assert stats["attention_rewritten"] >= 1, name
