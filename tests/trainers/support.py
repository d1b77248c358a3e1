"""A tiny model, a tokenizer trained on its own texts, and the comparison of two trainings."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.trainers import WordLevelTrainer
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerFast
from transformers.loss.loss_utils import ForCausalLMLoss

import treefx
from tests.models import double
from tests.oracle import FLOAT32, Outcome, assert_close
from tests.trainers.leftovers import forget_accelerate

__all__ = [
    "COMMON",
    "NEEDS_RAY",
    "NEEDS_TRAINERS",
    "PROMPT",
    "RAY_SETTINGS",
    "TAILS",
    "Training",
    "assert_same_training",
    "assert_shared",
    "llama",
    "tokenizer",
]

NEEDS_TRAINERS = "the libraries of the trainers are not installed: pip install -e '.[trainers]'"
"""Why tests of trainers are skipped."""
NEEDS_RAY = "Ray Train is not installed: pip install 'ray[train]'"
"""Why tests of it are skipped."""
RAY_SETTINGS = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}
"""Nothing is reported to anyone, and workers are not put behind all else that runs."""

PROMPT = "the cat sat on the red mat and"
TAILS = [" ran home", " saw birds", " ate fish", " ran away", " saw fish", " ate birds", " sat home", " fell down"]
"""What follows the prompt, row by row: all of one length, so that every batch has one shape."""

COMMON: dict[str, Any] = {
    "per_device_train_batch_size": 4,
    "max_steps": 2,
    "logging_steps": 1,
    "optim": "sgd",  # linear in the gradients: Adam would blow rounding of those near zero up to its learning rate
    "learning_rate": 0.3,
    "lr_scheduler_type": "constant",
    "report_to": "none",
    "save_strategy": "no",
    "disable_tqdm": True,
    "use_cpu": True,
    "bf16": False,
    "seed": 0,
}
"""Arguments of transformers' and TRL's trainers."""


@dataclass(frozen=True)
class Training:
    """One run of a trainer."""

    model: nn.Module
    losses: list[float]


def tokenizer() -> PreTrainedTokenizerFast:
    """A word-level tokenizer trained on the prompt and the tails."""
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    core = Tokenizer(WordLevel(unk_token="<unk>"))
    core.pre_tokenizer = WhitespaceSplit()
    core.train_from_iterator([PROMPT, *TAILS], WordLevelTrainer(special_tokens=list(special.values())))
    return PreTrainedTokenizerFast(tokenizer_object=core, **special)


def llama(folder: Path | None = None) -> PreTrainedModel:
    """One block of width 16 in float64, the same weights every time; only the loss is cast to float32, as everywhere.

    In float32 an update of a hundredth on a weight of one keeps five digits, too few to compare updates by.

    Args:
        folder: where the model is saved, for trainers that load their reference by its name.
    """
    model = double(
        "llama", num_hidden_layers=1, hidden_size=16, intermediate_size=32, num_attention_heads=2,
        num_key_value_heads=1, vocab_size=len(tokenizer()), bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    model.loss_function = ForCausalLMLoss
    if folder is not None:
        model.save_pretrained(folder)
        model.config._name_or_path = str(folder)
    return model


def assert_same_training(train: Callable[[Callable[[nn.Module], None]], Training], **options: Any) -> Training:
    """Train with the plain model and with ``model.compile(backend="treefx")``; losses and updates must agree.

    Args:
        train: builds model and trainer from scratch, calls its argument on the model where a user would compile it,
            trains, and returns the model with the logged losses.
        options: of the backend, on top of the inner compiler that compiles fastest.

    Returns:
        The compiled training.
    """
    torch.manual_seed(0)
    forget_accelerate()
    expected = train(lambda model: None)
    torch.manual_seed(0)
    forget_accelerate()
    settings = {"inner": "aot_eager", **options}
    got = train(lambda model: model.compile(backend="treefx", options=settings))
    assert len(set(expected.losses)) == len(expected.losses) > 1, f"nothing was trained: {expected.losses}"
    assert_close(_updates(got), _updates(expected), FLOAT32)
    return got


def _updates(training: Training) -> Outcome:
    """Losses, and how far every weight went from its first value."""
    first = dict(llama().named_parameters())
    updates = {}
    for name, parameter in training.model.named_parameters():
        base = first.get(name.removeprefix("base_model.model.").replace(".base_layer.", "."))
        updates[name] = parameter.detach() - (base.detach() if base is not None else 0.0)
    return Outcome(torch.tensor(training.losses, dtype=torch.float64), updates)


def assert_shared(model: nn.Module) -> None:
    """The last call of the compiled model ran packed, on fewer tokens than its rows have."""
    stats = treefx.inspect(model).stats
    assert stats["fallback"] is None
    assert stats["expansions"] == []
    assert stats["sharing_ratio"] > 1.0
