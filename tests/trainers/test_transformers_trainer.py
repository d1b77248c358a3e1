"""``transformers.Trainer``."""

from collections.abc import Callable
from pathlib import Path

import pytest
from torch import nn
from transformers import Trainer, TrainingArguments

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

pytest.importorskip("accelerate", reason=NEEDS_TRAINERS)


def test_trainer_matches_the_uncompiled_run(tmp_path: Path) -> None:
    arguments = {"gradient_accumulation_steps": 2, "gradient_checkpointing": True}
    encode = tokenizer()
    rows = [encode(PROMPT + tail) for tail in TAILS]
    dataset = [{"input_ids": row.input_ids, "labels": [-100] * 4 + row.input_ids[4:]} for row in rows]

    def train(compile_model: Callable[[nn.Module], None]) -> Training:
        model = llama()
        compile_model(model)
        trainer = Trainer(model, TrainingArguments(str(tmp_path), **COMMON, **arguments), train_dataset=dataset)
        trainer.train()
        return Training(model, [entry["loss"] for entry in trainer.state.log_history if "loss" in entry])

    assert_shared(assert_same_training(train).model)
