"""The main job: rollouts to batches, and batches through a backend and a baseline."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from treefx.data import (
    Batch,
    ByteTokenizer,
    Conversation,
    Sample,
    Tokenizer,
    batches,
    collate,
    make_samples,
    train_tokenizer,
)
from treefx.errors import InputError
from treefx.tools.bench.job.report import TrainingReport
from treefx.tools.bench.job.training import TrainingRun, compare_training, gradient_error, reference_gradients

__all__ = ["RolloutBatches", "make_tokenizer", "prepare_batches", "train_and_compare"]


@dataclass(frozen=True, kw_only=True)
class RolloutBatches:
    """Batches of rows that share prefixes, and where they came from."""

    batches: list[Batch]
    samples: list[list[Sample]]
    """The rows of every batch."""
    rows: int
    """Rows that the conversations have."""
    too_long: int
    """Rows that were left out because they are longer than the limit."""


def make_tokenizer(conversations: Sequence[Conversation], kind: str = "bpe", vocab_size: int = 4096) -> Tokenizer:
    """A tokenizer for the text at hand: ``"bpe"`` trained on it, or ``"bytes"``.

    Raises:
        InputError: The kind is unknown, or BPE is asked for without the library ``tokenizers``.
    """
    if kind == "bytes":
        return ByteTokenizer()
    if kind != "bpe":
        raise InputError(f"tokenizer must be 'bpe' or 'bytes', got {kind!r}")
    # The library warns of a deadlock when the compiler forks its workers after a parallel training.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    return train_tokenizer((text for conversation in conversations for text in conversation.texts()), vocab_size)


def prepare_batches(
    conversations: Sequence[Conversation],
    tokenizer: Tokenizer,
    *,
    steps: int,
    rows: int,
    max_length: int,
    pad_multiple: int = 128,
) -> RolloutBatches:
    """One sample per assistant turn, in batches of exactly ``rows`` rows of one task each.

    Rows longer than ``max_length`` are left out and counted; cutting them would cut their completions.
    Batches with fewer rows (the rest of a task) are left out too, so that few shapes are compiled; where no
    task has enough rows, batches of the rows there are.

    Raises:
        InputError: No row is short enough.
    """
    samples = make_samples(conversations, tokenizer, "turns")
    short = [sample for sample in samples if len(sample) <= max_length]
    if not short:
        shortest = min((len(sample) for sample in samples), default=0)
        raise InputError(
            f"max_length must admit at least one row: the shortest of {len(samples)} rows "
            f"has {shortest} tokens, got a limit of {max_length}"
        )
    groups = batches(short, rows)
    groups = [group for group in groups if len(group) == rows] or groups
    # Spread over the tasks: neighbours in this order are batches of the same task.
    chosen = [groups[index * len(groups) // steps] for index in range(steps)]
    padded = [collate(group, tokenizer.pad_id, pad_multiple=pad_multiple) for group in chosen]
    return RolloutBatches(batches=padded, samples=chosen, rows=len(samples), too_long=len(samples) - len(short))


def train_and_compare(
    model: torch.nn.Module,
    batches: Sequence[Batch],
    *,
    backend: str = "treefx",
    baseline: str = "inductor",
    learning_rate: float = 3e-4,
    on_progress: Callable[[str], None] = lambda _: None,
) -> tuple[TrainingReport, TrainingRun]:
    """Train copies of ``model`` on both backends; judge gradients against float64.

    Returns:
        The report, and the run of ``backend``, whose ``compiled`` model can be inspected.
    """
    run = TrainingRun(model, backend, learning_rate)
    other = TrainingRun(model, baseline, learning_rate)
    records = compare_training([other, run], batches, on_progress)
    reference = reference_gradients(model, batches[0])
    on_progress("gradients compared with float64")
    report = TrainingReport(
        records=records,
        backend=backend,
        baseline=baseline,
        compile_seconds={each.backend: each.compile_seconds for each in (other, run)},
        gradient_errors={each.backend: gradient_error(each.first_gradients, reference)[0] for each in (other, run)},
    )
    return report, run
