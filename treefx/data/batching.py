"""Samples to padded batches, rows that share prefixes kept together."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from treefx.arguments import check_whole
from treefx.data.samples import IGNORED, Sample
from treefx.errors import InputError

__all__ = ["Batch", "batches", "collate", "prefix_order"]


@dataclass(frozen=True, eq=False)
class Batch:
    """Hold the inputs of a causal LM, padded on the right.

    Attributes:
        input_ids: int64 [B, T], token ids.
        attention_mask: int64 [B, T], 1 for tokens, 0 for padding.
        labels: int64 [B, T], the token itself, or `IGNORED`.
    """

    input_ids: torch.Tensor
    attention_mask: torch.Tensor
    labels: torch.Tensor

    def model_inputs(self) -> dict[str, torch.Tensor]:
        """Return keyword arguments of a transformers model, each [B, T]."""
        return {"input_ids": self.input_ids, "attention_mask": self.attention_mask, "labels": self.labels}

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and padded length, in tokens."""
        return (self.input_ids.shape[0], self.input_ids.shape[1])

    @property
    def raw_tokens(self) -> int:
        """Tokens that are not padding."""
        return int(self.attention_mask.sum())


def collate(samples: Sequence[Sample], pad_id: int, *, pad_multiple: int = 1, length: int | None = None) -> Batch:
    """Pad samples on the right to one batch.

    Args:
        samples: At least one.
        pad_id: Token id at padding; masked and unlabelled.
        pad_multiple: The length is rounded up to a multiple of it, so that few shapes have to be compiled.
        length: Pad to exactly this number of tokens instead.

    Returns:
        The batch, int64 [B, T] tensors, with labels of `IGNORED` at the padding.

    Raises:
        InputError: There is no sample, or one is longer than ``length``.
    """
    if not samples:
        raise InputError("a batch needs at least one sample, got none")
    check_whole(pad_id, "pad_id")
    check_whole(pad_multiple, "pad_multiple", least=1)
    if length is not None:
        check_whole(length, "length", least=1, or_none="the longest sample's")
    longest = max(len(sample) for sample in samples)
    if length is not None and longest > length:
        raise InputError(f"length must be at least the longest sample's {longest} tokens, got {length}")
    columns = length if length is not None else -(-longest // pad_multiple) * pad_multiple
    input_ids = np.full((len(samples), columns), pad_id, dtype=np.int64)
    labels = np.full((len(samples), columns), IGNORED, dtype=np.int64)
    mask = np.zeros((len(samples), columns), dtype=np.int64)
    for row, sample in enumerate(samples):
        input_ids[row, : len(sample)] = sample.tokens
        labels[row, : len(sample)] = sample.labels
        mask[row, : len(sample)] = 1
    return Batch(torch.from_numpy(input_ids), torch.from_numpy(mask), torch.from_numpy(labels))


def prefix_order(samples: Sequence[Sample]) -> list[Sample]:
    """Sort samples by task, and by tokens within a task, so that shared prefixes are adjacent.

    Args:
        samples: rows in any order.

    Returns:
        The same samples, sorted.
    """
    # Big-endian words compare as bytes exactly as the token ids compare as numbers.
    return sorted(samples, key=lambda sample: (sample.task, sample.tokens.astype(">u8").tobytes()))


def batches(samples: Sequence[Sample], rows: int, *, max_tokens: int | None = None) -> list[list[Sample]]:
    """Cut samples into batches of rows that share prefixes: no batch holds two tasks.

    Args:
        samples: In any order.
        rows: Most rows of a batch.
        max_tokens: Most tokens of a padded batch, rows times its longest row; a longer single row is refused.

    Returns:
        The batches, each of at least one row; every sample is in exactly one.

    Raises:
        InputError: ``rows`` is not positive, or one row alone is over ``max_tokens``.
    """
    check_whole(rows, "rows", least=1)
    if max_tokens is not None:
        check_whole(max_tokens, "max_tokens", least=1, or_none="any number")
    result: list[list[Sample]] = []
    longest = 0
    for sample in prefix_order(samples):
        if max_tokens is not None and len(sample) > max_tokens:
            raise InputError(
                f"max_tokens must hold at least one row, got {max_tokens} for a row of {len(sample)} tokens: "
                "raise it or drop long rows"
            )
        current = result[-1] if result else []
        longest = max(longest, len(sample))
        full = len(current) >= rows or (max_tokens is not None and (len(current) + 1) * longest > max_tokens)
        if not current or full or current[0].task != sample.task:
            result.append([sample])
            longest = len(sample)
        else:
            current.append(sample)
    return result
