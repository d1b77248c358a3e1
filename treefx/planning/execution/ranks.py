"""The processes that train one model together, while each of them runs a plan of its own.

Plans differ in their numbers of parts, and a rank may have none. So nothing that all ranks do together happens in a
part: parameters are gathered before the first one, gradients are reduced after the last, each in an order that is the
model's. In between a rank may do what it likes, and may fail: then all hear of it, and none changes a gradient.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from treefx.errors import RankError

__all__ = ["Ranks", "agree", "apart", "common_dtype"]

_FAILED = (
    "rank {} failed in a step that all ranks run together, so no rank changed its gradients; its own error says why. "
    "Run the step again on all ranks, or end them all"
)
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class Ranks:
    """One process by itself: nothing to gather, nothing to reduce.

    Attributes:
        groups: whom it meets, process groups that reach all ranks one after the other; empty: nobody.
        device: where what the ranks tell each other lies.
    """

    groups: Sequence[dist.ProcessGroup] = ()
    device: torch.device = torch.device("cpu")

    def begin(self) -> None:
        """With all other ranks: make the model one that runs without them."""

    def resident_bytes(self) -> int:
        """What is held while parts run, beside the model's parameters and gradients as it then has them."""
        return 0

    def settle(self) -> None:
        """Between two backwards: put gradients where they add up."""

    def end(self) -> None:
        """Make the model again what it was; parameters stay where they are."""

    def forget(self) -> None:
        """Forget the gradients made since `begin`."""

    def abandon(self) -> None:
        """The same, for good: what earlier backwards made is there again."""

    def reduce(self) -> None:
        """With all other ranks: reduce gradients as the model's owner has set it up."""


@contextmanager
def apart(ranks: Ranks) -> Iterator[None]:
    """Run parts without the other ranks; whoever leaves waits for them, and hears whether all got there.

    Raises:
        RankError: another rank failed.
    """
    ranks.begin()
    try:
        try:
            yield
        finally:
            ranks.end()
    except Exception:
        _tell(ranks)
        ranks.abandon()
        raise
    failing = _failing(ranks, False)
    if failing:
        ranks.abandon()
        raise RankError(_FAILED.format(", ".join(map(str, failing))))


def _tell(ranks: Ranks) -> None:
    """Say that this rank failed; its own error comes first, even where nobody is there to hear it."""
    try:
        _failing(ranks, True)
    except RuntimeError as lost:
        warnings.warn(f"the other ranks could not be told that this one failed: {lost}", stacklevel=2)


def _failing(ranks: Ranks, failed: bool) -> list[int]:
    """The ranks that failed, where there are others."""
    if not ranks.groups:
        return []
    flags = torch.zeros(dist.get_world_size(), dtype=torch.bool)
    flags[dist.get_rank()] = failed
    return [rank for rank, flag in enumerate(agree(ranks, flags).tolist()) if flag]


def agree(ranks: Ranks, flags: Tensor) -> Tensor:
    """What is true on any rank, bool [K], on the CPU."""
    told = flags.to(ranks.device, torch.int32)
    for group in ranks.groups:
        dist.all_reduce(told, dist.ReduceOp.MAX, group)
    return told.cpu() != 0


def common_dtype(ranks: Ranks, dtype: torch.dtype) -> torch.dtype:
    """The widest of all ranks' dtypes: a loss of no edges has none of its own, and what ranks add up has to agree."""
    told = agree(ranks, torch.tensor([dtype == each for each in _DTYPES])) if ranks.groups else torch.zeros(0)
    return _DTYPES[int(told.nonzero().max())] if told.any() else dtype
