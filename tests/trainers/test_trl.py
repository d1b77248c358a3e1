"""TRL's trainers: supervised, preferences, and on-policy with their own generation and reference models.

One file, so that one worker imports TRL.
"""

import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import treefx
from tests.backend.flash import flash_stubs, with_flash
from tests.trainers.liger import patch_llama
from tests.trainers.support import (
    COMMON,
    NEEDS_TRAINERS,
    PROMPT,
    TAILS,
    Training,
    assert_same_training,
    assert_shared,
    llama,
    tokenizer,
)

datasets = pytest.importorskip("datasets", reason=NEEDS_TRAINERS)
peft = pytest.importorskip("peft", reason=NEEDS_TRAINERS)
trl = pytest.importorskip("trl", reason=NEEDS_TRAINERS)

from treefx.integrations import accelerate  # noqa: E402

Build = Callable[[nn.Module, Path], Any]
"""A trainer around a model; the path is a folder to write to."""

SUPERVISED = datasets.Dataset.from_list([{"prompt": PROMPT, "completion": tail} for tail in TAILS])
PAIRS = datasets.Dataset.from_list(
    [{"prompt": PROMPT, "chosen": a, "rejected": b} for a, b in zip(TAILS, TAILS[3:] + TAILS[:3], strict=True)]
)
JUDGED = datasets.Dataset.from_list(
    [{"prompt": PROMPT, "completion": tail, "label": i % 3 > 0} for i, tail in enumerate(TAILS)]
)
PROMPTS = datasets.Dataset.from_list([{"prompt": PROMPT}] * 4)
SAMPLING = {"num_generations": 4, "max_completion_length": 2, "generation_kwargs": {"min_new_tokens": 2}}


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    datasets.disable_progress_bars()
    yield


def lora() -> dict[str, Any]:
    """Arguments of a trainer that puts an adapter around its model."""
    return {"peft_config": peft.LoraConfig(r=2, lora_dropout=0.0, init_lora_weights=False, task_type="CAUSAL_LM")}


def sft(model: nn.Module, path: Path, more: Any = dict, **changes: Any) -> trl.SFTTrainer:
    args = trl.SFTConfig(str(path), **COMMON | changes)  # gradient checkpointing is TRL's default
    return trl.SFTTrainer(model, args, train_dataset=SUPERVISED, processing_class=tokenizer(), **more())


def sft_with_flash(model: nn.Module, path: Path) -> trl.SFTTrainer:
    """Rows one behind another, which the kernel keeps apart by their ends."""
    return sft(with_flash(model), path, padding_free=True, max_length=None)


def dpo(model: nn.Module, path: Path, more: Any = dict, **changes: Any) -> trl.DPOTrainer:
    args = trl.DPOConfig(str(path), **COMMON | {"gradient_checkpointing": False} | changes)
    return trl.DPOTrainer(model, None, args, train_dataset=PAIRS, processing_class=tokenizer(), **more())


def kto(model: nn.Module, path: Path, more: Any = dict, **changes: Any) -> trl.KTOTrainer:
    args = trl.KTOConfig(str(path), **COMMON | {"gradient_checkpointing": False} | changes)
    return trl.KTOTrainer(model, None, args, train_dataset=JUDGED, processing_class=tokenizer(), **more())


def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Something that differs from sample to sample."""
    return [float(sum(ids) % 7) for ids in completion_ids]


def grpo(model: nn.Module, path: Path, more: Any = dict, **changes: Any) -> trl.GRPOTrainer:
    args = trl.GRPOConfig(str(path), **COMMON | SAMPLING | {"gradient_checkpointing": False, "beta": 0.1} | changes)
    return trl.GRPOTrainer(model, reward, args, train_dataset=PROMPTS, processing_class=tokenizer(), **more())


def rloo(model: nn.Module, path: Path, more: Any = dict, **changes: Any) -> trl.RLOOTrainer:
    args = trl.RLOOConfig(str(path), **COMMON | SAMPLING | {"gradient_checkpointing": False} | changes)
    return trl.RLOOTrainer(model, reward, args, train_dataset=PROMPTS, processing_class=tokenizer(), **more())


CHECKPOINTED = {"gradient_checkpointing": True}
ACCUMULATED = {"gradient_accumulation_steps": 4}
RUNS: dict[str, Build] = {
    "sft, checkpoints": sft, "sft, packing": partial(sft, packing=True, max_length=40),
    "sft, padding free, flash": sft_with_flash, "dpo, lora, steps": partial(dpo, more=lora, **ACCUMULATED),
    "kto, checkpoints": partial(kto, **CHECKPOINTED),
    "grpo, lora, steps, checkpoints": partial(grpo, more=lora, **ACCUMULATED, **CHECKPOINTED),
}  # fmt: skip
"""Every trainer but RLOO, which compiles by name below.

Checkpoints, adapters and accumulated gradients with preferences and with sampling.
"""


def run_of(build: Build, path: Path) -> Callable[[Callable[[Any], None]], Training]:
    def train(compile_model: Callable[[Any], None]) -> Training:
        model = llama(path / "model")
        compile_model(model)
        torch.manual_seed(0)
        trainer = build(model, path / "out")
        trainer.train()
        return Training(trainer.model, [entry["loss"] for entry in trainer.state.log_history if "loss" in entry])

    return train


@pytest.mark.parametrize("name", RUNS)
def test_trl_trainer_matches_the_uncompiled_run(tmp_path: Path, name: str) -> None:
    with flash_stubs():
        inner = "aot_eager" if name == "sft, checkpoints" else "eager"
        got = assert_same_training(run_of(RUNS[name], tmp_path), inner=inner)
    assert_shared(got.model)


def test_with_functions_of_ligers_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As ``use_liger_kernel`` leaves a model; its own kernels need a GPU."""
    patch_llama(monkeypatch, module=sys.modules[type(llama()).__module__])
    assert_shared(assert_same_training(run_of(sft, tmp_path), inner="eager").model)


class ByName:
    """Stands for a model that is to be compiled: the trainer does it, by the arguments it gets."""

    def compile(self, backend: str, options: Any) -> None:
        accelerate.compile_with(options)
        COMMON.update(torch_compile=True, torch_compile_backend=backend)


def test_trl_trainer_compiles_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``torch_compile_backend="treefx"``, with gradients accumulated: accelerate wraps what the trainer has patched."""
    accumulated = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    for name, value in {**accumulated, "torch_compile": False, "torch_compile_backend": None}.items():
        monkeypatch.setitem(COMMON, name, value)

    def train(compile_model: Callable[[Any], None]) -> Training:
        compile_model(ByName())
        return run_of(rloo, tmp_path)(lambda model: None)

    got = assert_same_training(train, inner="eager")
    assert_shared(got.model)
    stats = treefx.inspect(got.model).stats
    assert stats["step_calls"] == 2 and stats["sharing_possible"] > stats["step_sharing_ratio"]
    accelerate.compile_with()
