"""Coordinate processes that train one model together, each with its own plan.

Plans differ in their numbers of parts, and a rank may have none. So no collective runs in a part: parameters are
gathered before the first one, gradients are reduced after the last, each in an order that is the model's. In between
ranks run independently. If one fails, all are notified, and none changes a gradient.
"""

from __future__ import annotations

import signal
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from treefx.errors import RankError

__all__ = ["Agreement", "Ranks", "agree", "agreed", "apart"]

_FAILED = (
    "rank {} failed in a step that all ranks run together, so no rank changed its gradients; its own error says why. "
    "Run the step again on all ranks, or end them all"
)
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class Ranks:
    """One process by itself: nothing to gather, nothing to reduce.

    Attributes:
        groups: process groups that together reach all ranks, one after the other; empty: a single process.
        device: device of the tensors that ranks exchange.
    """

    groups: Sequence[dist.ProcessGroup] = ()
    device: torch.device = torch.device("cpu")

    def begin(self) -> None:
        """With all other ranks: make the model one that runs without them."""

    def resident_bytes(self) -> int:
        """Return bytes held while parts run, besides the parameters and gradients."""
        return 0

    def reduced(self) -> Mapping[Tensor, torch.dtype]:
        """Map leaves that `reduce` takes from its argument, not from `.grad`, to their dtype."""
        return {}

    def end(self) -> None:
        """Restore the model; parameters stay where they are."""

    def abandon(self) -> None:
        """Free the memory of `begin` after a failure; may be called twice."""

    def reduce(self, gradients: Mapping[Tensor, Tensor]) -> None:
        """With all other ranks: reduce gradients as the model's owner has set it up.

        Args:
            gradients: of the leaves in `reduced`; those of others are in `.grad`.
        """


class Agreement:
    """Hold the facts that ranks agree on at the end of a block.

    Attributes:
        dtype: of this rank's loss; afterwards the widest of all ranks' dtypes: a loss without edges has no dtype, and
            summands have to agree.
        is_done: whether all ranks got through.
    """

    def __init__(self) -> None:
        self.dtype: torch.dtype | None = None
        self.is_done = False


@contextmanager
def agreed(ranks: Ranks, then: Callable[[], object] = lambda: None) -> Iterator[Agreement]:
    """Run a block on all ranks, and fail on all of them if it raises on one.

    Args:
        ranks: this rank and the others.
        then: runs with all other ranks if no block failed; interrupts wait until it is done, since it cannot stop on
            one rank alone.

    Raises:
        RankError: another rank failed.
    """
    agreement = Agreement()
    try:
        try:
            yield agreement
        except BaseException:
            _report_failure(ranks)
            raise
        with _interrupts_wait(ranks):
            failing = _exchange(ranks, False, agreement)
            if failing:
                raise RankError(_FAILED.format(", ".join(map(str, failing))))
            then()
            agreement.is_done = bool(ranks.groups)
    except BaseException:
        if not agreement.is_done:
            ranks.abandon()
        raise


@contextmanager
def apart(ranks: Ranks) -> Iterator[None]:
    """Run parts without the other ranks, and wait for these at the end.

    Raises:
        RankError: another rank failed.
    """
    with agreed(ranks):
        try:
            with _interrupts_wait(ranks):
                ranks.begin()
            yield
        finally:
            ranks.end()


def _report_failure(ranks: Ranks) -> None:
    """Notify the other ranks of a failure.

    If they cannot be reached, this rank's own error still comes first.
    """
    try:
        with _interrupts_wait(ranks):
            _exchange(ranks, True, Agreement())
    except RuntimeError as lost:
        warnings.warn(f"the other ranks could not be told that this one failed: {lost}", stacklevel=2)


def _exchange(ranks: Ranks, failed: bool, agreement: Agreement) -> list[int]:
    """The ranks that failed; the agreement gets the common dtype."""
    if not ranks.groups:
        return []
    world = dist.get_world_size()
    flags = torch.zeros(world + len(_DTYPES), dtype=torch.bool)
    flags[dist.get_rank()] = failed
    if agreement.dtype in _DTYPES:
        flags[world + _DTYPES.index(agreement.dtype)] = True
    told = agree(ranks, flags)
    if told[world:].any():
        agreement.dtype = _DTYPES[int(told[world:].nonzero().max())]
    return [rank for rank, flag in enumerate(told[:world].tolist()) if flag]


@contextmanager
def _interrupts_wait(ranks: Ranks) -> Iterator[None]:
    """Hold Ctrl-C back while ranks communicate.

    A rank that left a collective alone would stay a step ahead.
    """
    handler = signal.getsignal(signal.SIGINT)
    if not ranks.groups or not callable(handler) or threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[tuple[Any, ...]] = []
    signal.signal(signal.SIGINT, lambda *given: came.append(given))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if came:
            handler(*came[0])


def agree(ranks: Ranks, flags: Tensor) -> Tensor:
    """Reduce flags over ranks by OR: bool [K], on the CPU."""
    told = flags.to(ranks.device, torch.int32)
    for group in ranks.groups:
        dist.all_reduce(told, dist.ReduceOp.MAX, group)
    return told.cpu() != 0
