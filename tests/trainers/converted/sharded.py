"""FSDP2 with ``treefx.convert``: models for the processes of ``tests.trainers.test_distributed``."""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn
from torch.distributed.fsdp import fully_shard

import treefx
from tests.libraries import double_with_libraries
from tests.models import double

__all__ = ["CASES", "WINDOW", "tiny"]

WINDOW = 4


def tiny(name: str, checkpointing: bool = False) -> Any:
    if name == "lfm2":
        return double_with_libraries(name, vocab_size=32, num_hidden_layers=2, layer_types=["full_attention", "conv"])
    more = {"sliding_window": WINDOW} if name == "gemma2" else {"num_hidden_layers": 1}
    model = double(name, vocab_size=32, **more)
    if name == "qwen3_moe":
        model.set_experts_implementation("batched_mm")  # the grouped product has no float64
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def shard(model: Any) -> None:
    for block in model.model.layers:
        fully_shard(block)
    fully_shard(model)


def converted_compiled_sharded(name: str) -> tuple[nn.Module, nn.Module]:
    """The head in a group with the norm before it."""
    model = treefx.convert(tiny(name), lazy_outputs=True)
    for block in model.model.layers:
        block.compile(backend="aot_eager")
    fully_shard([model.model.norm, model.lm_head])
    shard(model)
    return model, model


def sharded_converted(name: str, checkpointing: bool = False) -> tuple[nn.Module, nn.Module]:
    model = tiny(name, checkpointing)
    shard(model)
    return treefx.convert(model, lazy_outputs=True), model


CASES: dict[str, tuple[Callable[[], tuple[nn.Module, nn.Module]], bool]] = {
    "llama, compiled blocks, head apart": (partial(converted_compiled_sharded, "llama"), False),
    "gemma2, checkpointing, accumulation": (partial(sharded_converted, "gemma2", True), True),
    "qwen3_moe": (partial(sharded_converted, "qwen3_moe"), False),
    "lfm2, convolutions on paths": (partial(sharded_converted, "lfm2"), False),
}
"""How to build the model, in the order in which a user may do it; whether two forwards share a backward."""
