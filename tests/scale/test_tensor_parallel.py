"""Converted models in tensor and sequence parallelism. Two or four processes, the same batches, gradients of one."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import treefx
from tests.models import double
from tests.oracle import FLOAT64, Outcome, assert_close
from tests.scale.ranks import run_ranks
from tests.scale.shared_out import (
    COLUMNS,
    ROWS,
    SECONDS,
    blocks,
    parallel,
    run_rank,
    sequence_parallel,
    steps,
)
from tests.trainers.test_distributed import WORLD, batches
from treefx.runtime.call_plan import build_batch, pad_batch


def sharded_too(model: Any) -> nn.Module:
    """A mesh of two dimensions, of which one shards the parameters of a model in tensor parallelism."""
    mesh = init_device_mesh("cpu", (1, WORLD), mesh_dim_names=("data", "tensor"))
    plan = blocks(
        model, {**{name: ColwiseParallel() for name in COLUMNS}, **{name: RowwiseParallel() for name in ROWS}}
    )
    parallelize_module(model, mesh["tensor"], plan)
    for block in model.model.layers:
        fully_shard(block, mesh=mesh["data"])
    return fully_shard(model, mesh=mesh["data"])


CONVERTED: dict[str, tuple[Any, bool]] = {
    "tensor, head": (partial(parallel, head=True), True),
    "sequence": (sequence_parallel, False),
    "sequence, head packed": (sequence_parallel, True),
    "tensor, sharded": (sharded_too, True),
}
"""How the model is made, and whether its head runs on distinct tokens."""


def llama(ranks: int) -> Any:
    """One that so many ranks can share out: each has one head of keys and values."""
    sizes = {"hidden_size": 16 * ranks, "intermediate_size": 16 * ranks, "vocab_size": 32}
    heads = {"num_attention_heads": 2 * ranks, "num_key_value_heads": ranks, "head_dim": 8}
    return double("llama", num_hidden_layers=1, **sizes, **heads)


def worker(rank: int, port: int, folder: str, name: str) -> None:
    run_rank(rank, port, folder, partial(outcomes, name, partial(llama, WORLD)))


def one_of_four(rank: int, port: int, folder: str, name: str) -> None:
    run_rank(rank, port, folder, partial(outcomes, name, partial(llama, 4)), 4)


def outcomes(name: str, one: Callable[[], Any]) -> dict[str, Any]:
    make, lazy = CONVERTED[name]
    model = treefx.convert(make(one()), min_sharing=1.0, lazy_outputs=lazy)
    found, stats = [], []
    for batch in batches(0):
        found += steps(model, model, [batch])
        stats.append(dict(treefx.inspect(model).stats))
    kept = [{key: item[key] for key in ("ran", "fallback", "tokens", "head_tokens")} for item in stats]
    return {"stats": kept, "found": [(x.loss, x.gradients) for x in found]}


@pytest.mark.parametrize("name", CONVERTED)
def test_converted_models_run_on_distinct_tokens(name: str, tmp_path: Path) -> None:
    stats = check(name, llama(WORLD), run_ranks(__name__, tmp_path, name, seconds=SECONDS))
    # Some are odd, which ranks cannot share out: gloo ends both of them where nothing is added.
    assert {item["tokens"] % WORLD for item in stats} == {0, 1}


def test_four_ranks_with_a_head_of_keys_each(tmp_path: Path) -> None:
    name = "sequence, head packed"
    found = run_ranks(__name__, tmp_path, name, seconds=SECONDS, world=4, worker="one_of_four")
    assert any(item["tokens"] % 4 for item in check(name, llama(4), found))


def check(name: str, model: Any, results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Compare what ranks give with a model on one process; what the ranks say of how they ran."""
    expected = steps(model, model)
    for result in results:
        for (loss, gradients), want in zip(result["found"], expected, strict=True):
            assert_close(Outcome(loss, gradients), want, FLOAT64)
    stats = [item for result in results for item in result["stats"]]
    assert all((item["ran"], item["fallback"]) == ("packed", None) for item in stats)
    assert all((item["head_tokens"] is not None) == CONVERTED[name][1] for item in stats)
    return stats


def test_tokens_are_made_so_many_that_ranks_can_share_them_out() -> None:
    batch = build_batch([torch.tensor([[5, 6, 7], [5, 8, 9]])], None)
    padded = pad_batch(batch, 4)
    assert (batch.tokens, padded.tokens, padded.size) == (5, 5, 8) and pad_batch(batch, 5) is batch
    end = padded.metadata[2]
    assert end.tolist() == [5, 3, 3, 5, 5, 6, 7, 8]  # a companion is seen by itself alone
    assert padded.metadata[3] is batch.metadata[3]  # and unused
