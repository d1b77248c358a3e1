"""Build one forest of samples, pairs, judged answers or groups, with indices for losses."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from treefx.data.grouping import TrialGroup
from treefx.data.rows import EncodedRow, Encoder
from treefx.data.samples import AnyTokenizer, Form, Sample, as_encoder, make_samples, named_place, sample_of
from treefx.data.trajectories import Conversation, Judged, Preference
from treefx.errors import InputError
from treefx.forests.forest import Forest
from treefx.rl.steps import StepTree

__all__ = [
    "GroupBatch",
    "JudgedBatch",
    "PreferenceBatch",
    "forest_of",
    "group_batch",
    "judged_batch",
    "preference_batch",
]


def forest_of(samples: Sequence[Sample]) -> Forest:
    """Build the forest of the samples' tokens; labels give weights of 1, others are 0.

    Args:
        samples: training rows, `tokens` int64 [T] and `labels` [T] each.

    Returns:
        The forest, with the samples as rows in their order.

    Raises:
        ForestError: there is no sample.
    """
    return Forest.from_sequences([sample.tokens for sample in samples], [sample.weights for sample in samples])


@dataclass(frozen=True, eq=False)
class PreferenceBatch:
    """Hold pairs as rows: the chosen answers first, then the rejected ones, as in TRL.

    Attributes:
        samples: 2 P rows; ``collate(samples, pad_id)`` pads them for a trainer.
        forest: of these rows; the prompt of a pair stands in it once.
        pairs: int64 [P, 2], the row numbers (chosen, rejected) that ``treefx.losses.dpo`` and its like take.
    """

    samples: list[Sample]
    forest: Forest
    pairs: Tensor


def preference_batch(preferences: Iterable[Preference], tokenizer: AnyTokenizer) -> PreferenceBatch:
    """Encode pairs of answers for `treefx.losses.dpo` and its relatives.

    The assistant's text of an answer is trained, or all of a plain-text answer.

    Args:
        preferences: from `read_preferences`.
        tokenizer: one of ours, a `ChatTokenizer`, or a tokenizer of transformers.

    Returns:
        The forest of all rows, with the indices of pairs.

    Raises:
        InputError: there is no pair, or the tokenizer or its chat template refuses one; the message names its line.

    Example:
        >>> batch = preference_batch(islice(read_preferences("pairs.jsonl"), 8), tokenizer)  # doctest: +SKIP
        >>> with treefx.use(batch.forest):  # doctest: +SKIP
        ...     logits = compiled(**batch.forest.model_inputs(), use_cache=False).logits
        >>> logp = treefx.edge_logprobs(logits, batch.forest)  # doctest: +SKIP
        >>> loss = treefx.losses.dpo(logp, batch.forest, ref_logp, batch.pairs)  # doctest: +SKIP
    """
    encoder = as_encoder(tokenizer)
    chosen: list[Sample] = []
    rejected: list[Sample] = []
    for number, pair in enumerate(preferences):
        with named_place(pair.place):
            rows = encoder.answers(pair.prompt, (pair.chosen, pair.rejected), pair.tools, pair.template_options)
        for row, side in zip(rows, (chosen, rejected), strict=True):
            side.append(sample_of(row, str(number)))
    if not chosen:
        raise InputError("a batch needs at least one pair, got none")
    samples, count = [*chosen, *rejected], len(chosen)
    return PreferenceBatch(samples, forest_of(samples), torch.arange(2 * count).reshape(2, count).T)


@dataclass(frozen=True, eq=False)
class JudgedBatch:
    """Judged answers as rows, and after them the mismatched ones of KTO's reference point.

    Attributes:
        samples: J judged rows; with mismatched ones, J more.
        forest: of these rows.
        desirable: bool [rows]; False at mismatched ones, where it is not read.
        kl_rows: int64 [J], the numbers of the mismatched rows; None without.
    """

    samples: list[Sample]
    forest: Forest
    desirable: Tensor
    kl_rows: Tensor | None


def judged_batch(judged: Iterable[Judged], tokenizer: AnyTokenizer, *, mismatched: bool = True) -> JudgedBatch:
    """Encode judged answers for `treefx.losses.kto`.

    ``treefx.losses.kto(logp, forest, ref, batch.desirable, kl_rows=batch.kl_rows)``.

    Args:
        judged: from `read_judged`.
        tokenizer: as for `preference_batch`.
        mismatched: add a row per prompt with the answer to the batch's previous prompt, as TRL does it: the tokens that
            are trained of that answer behind those of this prompt.

    Returns:
        The forest of all rows, with the indices of answers for `treefx.losses.kto`.

    Raises:
        InputError: as for `preference_batch`; or mismatched rows are wanted of fewer than two answers.
    """
    encoder = as_encoder(tokenizer)
    given = list(judged)
    if len(given) < (2 if mismatched else 1):
        raise InputError(
            f"a batch needs at least one judged answer, and two for mismatched rows, got {len(given)}; "
            "mismatched=False leaves those out"
        )
    rows = [_encode_judged(each, encoder) for each in given]
    samples = [sample_of(row, str(number)) for number, row in enumerate(rows)]
    desirable = [each.label for each in given]
    kl_rows = None
    if mismatched:
        kl_rows = torch.arange(len(rows), 2 * len(rows))
        samples += [sample_of(_mismatch(row, rows[at - 1]), str(at)) for at, row in enumerate(rows)]
        desirable += [False] * len(rows)
    return JudgedBatch(samples, forest_of(samples), torch.tensor(desirable), kl_rows)


@dataclass(frozen=True, eq=False)
class GroupBatch:
    """Hold trials of some tasks as rows. R rows, K trials; a trial may have several rows.

    Attributes:
        samples: R rows.
        forest: of these rows.
        rewards: float64 [K].
        steps: the K trials as the trajectories that ``treefx.rl.grpo`` and its like compare, group by group.
        trial_of_row: int64 [R]; ``grpo(batch.steps, batch.rewards)[batch.trial_of_row]`` is the advantage of each row.
    """

    samples: list[Sample]
    forest: Forest
    rewards: Tensor
    steps: StepTree
    trial_of_row: Tensor


def group_batch(groups: Iterable[TrialGroup], tokenizer: AnyTokenizer, form: Form = "merged") -> GroupBatch:
    """Encode groups of trials.

    Args:
        groups: from `read_groups`.
        tokenizer: as for `preference_batch`.
        form: as for `make_samples`.

    Returns:
        The forest of all rows, with the indices of groups and trials.

    Raises:
        InputError: there is no group, a trial has no reward or no message of the assistant, or the chat template
            refuses it.
    """
    given = list(groups)
    trials = [trial for group in given for trial in group.trials]
    if not trials:
        raise InputError("a batch needs at least one group of trials, got none")
    rewards = torch.tensor([reward for group in given for reward in group.rewards], dtype=torch.float64)
    rows = [_trial_rows(trial, tokenizer, form) for trial in trials]
    samples = [sample for each in rows for sample in each]
    numbers = [number for number, group in enumerate(given) for _ in group.trials]
    steps = StepTree.from_paths([[number] for number in range(len(trials))], numbers)
    trial_of_row = torch.repeat_interleave(torch.arange(len(trials)), torch.tensor([len(each) for each in rows]))
    return GroupBatch(samples, forest_of(samples), rewards, steps, trial_of_row)


def _trial_rows(trial: Conversation, tokenizer: AnyTokenizer, form: Form) -> list[Sample]:
    rows = make_samples([trial], tokenizer, form)
    if not rows or not any(row.weights.any() for row in rows):
        raise InputError(f"{trial.place or trial.source}: a trial needs a message of the assistant, got none")
    return rows


def _encode_judged(judged: Judged, encoder: Encoder) -> EncodedRow:
    with named_place(judged.place):
        (row,) = encoder.answers(judged.prompt, (judged.completion,), judged.tools, judged.template_options)
    return row


def _mismatch(row: EncodedRow, other: EncodedRow) -> EncodedRow:
    """Join the prompt of one row with the answer of another, from its first trained token."""
    prompt, answer = int(row.trained.argmax()), int(other.trained.argmax())
    tokens = np.concatenate([row.tokens[:prompt], other.tokens[answer:]])
    return EncodedRow(tokens, np.concatenate([np.zeros(prompt, dtype=np.bool_), other.trained[answer:]]))
