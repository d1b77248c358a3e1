"""Count sharing over all calls of an optimizer step, and the loss by order of rows.

A call computes its own distinct tokens once. Rows that share a prefix but come in different calls of a step compute it
once a call. Here the distinct prefixes of all calls of a step are counted together, as if they had been one call.

A step ends where the parameters change, so no caller has to mark it: PyTorch reports the steps of all its optimizers
(some fused ones leave the versions of tensors unchanged), and counts other changes in place (``Tensor._version``). A
call of the very tensor of an earlier call of the step is left out: no optimizer step came between the two, and no order
of rows would merge them. Changes behind PyTorch's back (``parameter.data``) are not seen; then, and in steps of more
than `MOST_TOKENS` tokens, pieces of that size are counted.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable, MutableMapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from treefx.forests.paths import Prefixes
from treefx.runtime.kept.optimizer_clock import steps_taken

__all__ = ["MOST_TOKENS", "StepSharing", "Steps", "steps_of", "version_of"]

MOST_TOKENS = 2**22
"""Most distinct tokens remembered of a step: eight bytes each, or their keys if none is shared."""


_MOST_INPUTS = 64


@dataclass(frozen=True)
class StepSharing:
    """The tokens of the calls of one step.

    Attributes:
        calls: how many calls with gradients there were.
        repeats: how many of them got the tensor of an earlier one; the figures below leave them out.
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
    raw_tokens: int = 0
    tokens: int = 0
    repeats: int = 0
    prefixes: list[Prefixes] = field(default_factory=list)
    remembered: int = 0
    """Length of all prefixes."""
    seen: deque[tuple[weakref.ref[Tensor], tuple[int, ...]]] = field(default_factory=lambda: deque(maxlen=_MOST_INPUTS))
    """Token ids of calls, how often each had been changed in place, and the calls' tokens."""

    def repeats_call(self, ids: Tensor | None, raw_tokens: int, tokens: int) -> bool:
        """Whether a call has the tensor and the tokens of an earlier one."""
        if ids is None or ids.is_inference():
            return False
        call = ids._version, raw_tokens, tokens
        for known, earlier in self.seen:
            if known() is ids and earlier == call:
                return True
        self.seen.append((weakref.ref(ids), call))
        return False

    def sharing(self) -> StepSharing:
        """Count lazily: it numbers and sorts the prefixes."""
        distinct = np.unique(np.concatenate([prefixes.numbers for prefixes in self.prefixes]))
        self.prefixes = [Prefixes(len(distinct), lambda: distinct)]
        self.remembered = len(distinct)
        return StepSharing(self.calls, self.raw_tokens, self.tokens, len(distinct), self.repeats)


class Steps:
    """The last two windows of one model: the one under way, and the one before."""

    def __init__(self) -> None:
        self._before: _Window | None = None
        self._now: _Window | None = None
        self.is_announced = False
        """Whether the log has its line about the first compiled call."""

    def count(self, version: int, raw_tokens: int, tokens: int, prefixes: Prefixes, ids: Tensor | None = None) -> None:
        """Count a call with gradients.

        Args:
            version: of the parameters, see `version_of`.
            raw_tokens: tokens of its rows.
            tokens: that ran.
            prefixes: of its distinct tokens.
            ids: the caller's tensor of token ids.
        """
        now = self._now
        if now is None or now.version != version or now.remembered + len(prefixes) > MOST_TOKENS:
            self._before, self._now = now, _Window(version)
            now = self._now
        now.calls += 1
        if now.repeats_call(ids, raw_tokens, tokens):
            now.repeats += 1
            return
        now.raw_tokens += raw_tokens
        now.tokens += tokens
        now.prefixes.append(prefixes)
        now.remembered += len(prefixes)

    def last(self, version: int) -> StepSharing | None:
        """Return the last complete step, or the running one; None if nothing was counted."""
        complete = self._now is not None and self._now.version != version
        window = self._now if complete or self._before is None else self._before
        return None if window is None else window.sharing()


def version_of(parameters: Iterable[Tensor]) -> int:
    """A number that changes with every change of a parameter that is trained."""
    trained = [x for x in parameters if x.requires_grad and not x.is_inference()]
    steps = steps_taken(trained[0]) if trained else 0
    return steps + sum([x._version for x in trained])


_by_model: MutableMapping[Tensor, Steps] = WeakIdKeyDictionary()


def steps_of(parameters: Sequence[Tensor]) -> Steps:
    """Return the step counts of a model by its first parameter; its graphs count together."""
    if not parameters:
        return Steps()
    return _by_model.setdefault(parameters[0], Steps())
