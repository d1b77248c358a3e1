"""What the calls of one optimizer step share, over all of them: what a trainer's order of rows lost.

A call computes its own distinct tokens once. Rows that share a prefix but come in different calls of a step compute it
once a call. Here the distinct prefixes of all calls of a step are counted together, as if they had been one call. A
call of the very rows of an earlier call of the step is left out of the tokens: no order of rows would merge the two.

A step ends where the parameters change, so that nobody has to mark it: PyTorch tells of the steps of all its optimizers
(some fused ones leave the versions of tensors as they are), and counts other changes in place (``Tensor._version``).
What changes weights behind PyTorch's back (``parameter.data``) is not seen; then, and in steps of more than
`MOST_TOKENS` tokens, what is counted are pieces of that size.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Iterable, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.weak import WeakIdKeyDictionary

from treefx.forests.paths import Codes, Prefixes

__all__ = ["MOST_TOKENS", "StepSharing", "Steps", "steps_of", "version_of"]

MOST_TOKENS = 2**22
"""Distinct tokens that are remembered of one step: eight bytes each, or what tells them apart where none is shared."""


@dataclass(frozen=True)
class StepSharing:
    """The tokens of the calls of one step.

    Attributes:
        calls: how many calls with gradients there were.
        repeats: how many of them had the very rows of an earlier one; the figures below leave them out.
        raw_tokens: tokens of the rows of all calls.
        tokens: that ran, summed over calls.
        distinct_tokens: that would run if all rows came in one call.
    """

    calls: int
    raw_tokens: int
    tokens: int
    distinct_tokens: int
    repeats: int = 0

    @property
    def ratio(self) -> float:
        """Sharing ratio of the step as it ran."""
        return self.raw_tokens / self.tokens if self.tokens and self.raw_tokens else 1.0

    @property
    def possible(self) -> float:
        """Sharing ratio of the step as one call."""
        return self.raw_tokens / self.distinct_tokens if self.distinct_tokens and self.raw_tokens else 1.0


@dataclass
class _Window:
    """Calls between two changes of the parameters."""

    version: int
    calls: int = 0
    repeats: int = 0
    raw_tokens: int = 0
    tokens: int = 0
    waiting: list[tuple[int, int, Prefixes]] = field(default_factory=list)
    """Raw tokens, tokens and prefixes of the calls that are not counted yet."""
    distinct: Codes = field(default_factory=lambda: np.zeros(0, dtype=np.uint64))
    known: set[bytes] = field(default_factory=set)
    """Digests of the prefixes of the calls that are counted."""

    def sharing(self) -> StepSharing:
        """Number and sort the prefixes of the calls that wait."""
        for raw_tokens, tokens, prefixes in self.waiting:
            numbers = np.unique(prefixes.numbers)
            digest = hashlib.sha256(numbers.tobytes() + raw_tokens.to_bytes(8, "little")).digest()
            if digest in self.known:
                self.repeats += 1
                continue
            self.known.add(digest)
            self.raw_tokens += raw_tokens
            self.tokens += tokens
            self.distinct = np.union1d(self.distinct, numbers)
        self.waiting = []
        return StepSharing(self.calls, self.raw_tokens, self.tokens, len(self.distinct), self.repeats)

    @property
    def remembered(self) -> int:
        return len(self.distinct) + sum(len(prefixes) for _, _, prefixes in self.waiting)


class Steps:
    """The last two windows of one model: the one under way, and the one before."""

    def __init__(self) -> None:
        self._before: _Window | None = None
        self._now: _Window | None = None

    def count(self, version: int, raw_tokens: int, tokens: int, prefixes: Prefixes) -> None:
        """Count a call with gradients.

        Args:
            version: of the parameters, see `version_of`.
            raw_tokens: tokens of its rows.
            tokens: that ran.
            prefixes: of its distinct tokens.
        """
        now = self._now
        if now is None or now.version != version or now.remembered + len(prefixes) > MOST_TOKENS:
            self._before, self._now = now, _Window(version)
            now = self._now
        now.calls += 1
        now.waiting.append((raw_tokens, tokens, prefixes))

    def last(self, version: int) -> StepSharing | None:
        """The last step that is complete, or the one under way if there is none; None if nothing was counted."""
        complete = self._now is not None and self._now.version != version
        window = self._now if complete or self._before is None else self._before
        return None if window is None else window.sharing()


def version_of(parameters: Iterable[Tensor]) -> int:
    """A number that changes with every change of a parameter that is trained."""
    trained = [x for x in parameters if x.requires_grad and not x.is_inference()]
    steps = _steps_of_optimizer.get(trained[0], _Count()).number if trained else 0
    return steps + sum(x._version for x in trained)


@dataclass
class _Count:
    number: int = 0


_of_optimizer: MutableMapping[Optimizer, _Count] = weakref.WeakKeyDictionary()
_steps_of_optimizer: MutableMapping[Tensor, _Count] = WeakIdKeyDictionary()
"""By parameter, the steps that its optimizer has taken."""


def _count_step(optimizer: Optimizer, *_: Any) -> None:
    if torch.compiler.is_compiling():  # it would be traced into the user's graph, which counts versions anyway
        return
    if optimizer not in _of_optimizer:
        count = _of_optimizer[optimizer] = _Count()
        _steps_of_optimizer.update((x, count) for group in optimizer.param_groups for x in group["params"])
    _of_optimizer[optimizer].number += 1


register_optimizer_step_post_hook(_count_step)
_by_model: MutableMapping[Tensor, Steps] = WeakIdKeyDictionary()


def steps_of(parameters: Sequence[Tensor]) -> Steps:
    """Those of the model whose first parameter this is: all its graphs count together."""
    if not parameters:
        return Steps()
    return _by_model.setdefault(parameters[0], Steps())
