"""FSDP2 with ``treefx.convert``: two processes, each with batches of its own, gradients as without sharding."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch import nn
from torch.distributed.fsdp import fully_shard

import treefx
from tests.batches import distinct_with_padding
from tests.models import double
from tests.oracle import FLOAT32, FLOAT64
from tests.trainers.test_distributed import Cases, batches, check_ranks, run_ranks, small, train_cases

WINDOW = 4


def tiny(name: str, checkpointing: bool = False) -> Any:
    model = double(name, vocab_size=32, **({"sliding_window": WINDOW} if name in ("mistral", "gemma2") else {}))
    if name == "qwen3_moe":
        model.set_experts_implementation("batched_mm")  # the grouped product has no float64
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def shard(model: Any) -> None:
    for block in model.model.layers:
        fully_shard(block)
    fully_shard(model)


def shard_head_apart(model: Any) -> None:
    fully_shard([model.model.norm, model.lm_head])
    shard(model)


def converted_head_sharded_apart(name: str) -> tuple[nn.Module, nn.Module]:
    model = treefx.convert(tiny(name), lazy_outputs=True)
    shard_head_apart(model)
    return model, model


def converted_compiled_sharded(name: str) -> tuple[nn.Module, nn.Module]:
    model = treefx.convert(tiny(name), lazy_outputs=True)
    for block in model.model.layers:
        block.compile(backend="aot_eager")
    shard(model)
    return model, model


def sharded_converted(name: str, checkpointing: bool = False) -> tuple[nn.Module, nn.Module]:
    model = tiny(name, checkpointing)
    shard(model)
    return treefx.convert(model, lazy_outputs=True), model


CASES: Cases = {
    "llama, compiled blocks": (partial(converted_compiled_sharded, "llama"), False),
    "llama, head apart": (partial(converted_head_sharded_apart, "llama"), False),
    "mistral": (partial(sharded_converted, "mistral"), False),
    "gemma2, checkpointing, accumulation": (partial(sharded_converted, "gemma2", True), True),
    "qwen3_moe, checkpointing, accumulation": (partial(sharded_converted, "qwen3_moe", True), True),
}
"""How to build the model, in the order in which a user may do it; whether two forwards share a backward."""


def worker(rank: int, port: int, folder: str, name: str) -> None:
    """Train one case in one of the processes and write what came out."""
    train_cases(rank, port, folder, {name: CASES[name]})


@pytest.mark.parametrize("name", CASES)
@pytest.mark.sample(16)
def test_ranks_match_one_process(name: str, tmp_path: Path) -> None:
    limit = FLOAT32 if name.startswith("qwen3_moe") else FLOAT64  # its router has a softmax in float32
    results = run_ranks(__name__, tmp_path, name)
    window = WINDOW if name.startswith(("mistral", "gemma2")) else 1000
    for rank, result in enumerate(results):
        last = small(batches(rank)[-1])
        assert result[name][2]["head_tokens"] == distinct_with_padding(
            last["input_ids"], last["attention_mask"], window
        )
    check_ranks(results, name, tiny(name.split(",")[0]), CASES[name][1], limit)
