"""Map hidden states of distinct tokens to the caller's form: rows, or a loss per label.

With labels, ``GPTModel`` returns the negative log-probability of each label, computed across the ranks of a vocabulary.
Equal (token, label) pairs are one prediction, so LM head and loss run on the M distinct pairs::

    hidden [N, 1, H] --expand(token of pair)--> [M, 1, H] --LM head, loss--> [1, M] --expand(pair)--> loss [B, T]

Each expansion sums gradients over its copies, which restores the gradient of separate rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from treefx.kernels.expand import expand

__all__ = ["Pairs", "across_ranks", "expand_hidden", "find_pairs", "on_rows"]


@dataclass(frozen=True)
class Pairs:
    """The M distinct (token, label) pairs of a call.

    Attributes:
        token_M1: int64 [M, 1], -1 for dropped positions and filler.
        label_1M: [1, M].
        pair_BT: int64 [B, T], the pair of each position.
    """

    token_M1: Tensor
    label_1M: Tensor
    pair_BT: Tensor


def find_pairs(token_TB: Tensor, label_BT: Tensor, multiple: int) -> Pairs:
    """Return the distinct (token, label) pairs of a call.

    Their number is padded to a multiple, for sequence parallelism.
    """
    both = torch.stack([token_TB.t().reshape(-1), label_BT.reshape(-1).to(torch.int64)])
    distinct, pair = torch.unique(both, dim=1, return_inverse=True)
    filler = -distinct.shape[1] % multiple
    token, label = F.pad(distinct[0], (0, filler), value=-1), F.pad(distinct[1], (0, filler))
    return Pairs(token[:, None], label[None].to(label_BT.dtype), pair.view(label_BT.shape))


def expand_hidden(hidden: Tensor, index: Tensor, is_split: bool) -> Tensor:
    """Expand values [N, 1, ...] by an index [T, B] to [T, B, ...]; zeros where it is -1.

    Args:
        hidden: This rank's N / ranks tokens if ``is_split``.
        index: Of all tokens, the same on every tensor-parallel rank.
        is_split: Whether tokens are split over tensor-parallel ranks; the result is too.
    """
    gather, scatter = across_ranks() if is_split else (_same, _same)
    found: Tensor = scatter(expand(gather(hidden)[:, 0], index))
    return found


def across_ranks() -> tuple[Any, Any]:
    """Return Megatron's all-gather and split of sequences over tensor-parallel ranks.

    For values that all ranks compute alike.

    The backward of the all-gather takes this rank's slice: behind it every rank has the whole gradient.
    """
    from megatron.core.tensor_parallel import (
        gather_from_sequence_parallel_region,
        scatter_to_sequence_parallel_region,
    )

    def gather(x: Tensor) -> Tensor:
        found: Tensor = gather_from_sequence_parallel_region(x, tensor_parallel_output_grad=False)
        return found

    return gather, scatter_to_sequence_parallel_region


def _same(x: Tensor) -> Tensor:
    return x


def on_rows(processor: Any, given: Mapping[str, Any]) -> Any:
    """Wrap an output processor of the caller to get hidden states and arguments of rows."""

    def process(**arguments: Any) -> Any:
        return processor(**{**arguments, **{name: x for name, x in given.items() if name in arguments}})

    return process
