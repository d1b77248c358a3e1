"""``transformers.Trainer``."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch import nn
from transformers import DataCollatorWithFlattening, Trainer, TrainingArguments

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

plain_flattening = DataCollatorWithFlattening
whole_flattening = partial(DataCollatorWithFlattening, return_flash_attn_kwargs=True, return_seq_idx=True)
"""Rows of a batch one behind another, alone or with the ends and numbers of sequences."""


@pytest.mark.parametrize("collator", [None, plain_flattening, whole_flattening])
def test_trainer_matches_the_uncompiled_run(tmp_path: Path, collator: Any) -> None:
    arguments = {"gradient_accumulation_steps": 2, "gradient_checkpointing": True}
    more = {} if collator is None else {"data_collator": collator()}
    encode = tokenizer()
    rows = [encode(PROMPT + tail) for tail in TAILS]
    dataset = [{"input_ids": row.input_ids, "labels": [-100] * 4 + row.input_ids[4:]} for row in rows]

    def train(compile_model: Callable[[nn.Module], None]) -> Training:
        model = llama()
        compile_model(model)
        trainer = Trainer(model, TrainingArguments(str(tmp_path), **COMMON, **arguments), train_dataset=dataset, **more)
        trainer.train()
        return Training(model, [entry["loss"] for entry in trainer.state.log_history if "loss" in entry])

    assert_shared(assert_same_training(train, inner="aot_eager" if collator is None else "eager").model)
