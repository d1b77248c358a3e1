"""Sums over the calls of an optimizer step, and over the steps of a run."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np

from treefx.forests.trie import Codes
from treefx.runtime.observed.tokens import DistinctTokens, ObservedCall, merge
from treefx.runtime.records import MOST_TOKENS

__all__ = ["MOST_STEPS", "Epoch", "StepTally", "Totals", "TallyOfCalls"]

MOST_STEPS = 100
"""That are kept of one model; sums count all."""


@dataclass(frozen=True)
class StepTally:
    """The tokens of one optimizer step.

    Attributes:
        calls: Calls with gradients, without those that got the tensor of an earlier one.
        rows: Sequences of all calls.
        raw_tokens: Of all rows.
        call_tokens: Distinct tokens of each call, summed: the work of treefx on the calls unchanged.
        step_tokens: Distinct tokens of the step: the work of treefx if all rows came in one call.
        suffix_tokens: Distinct tokens with one row through them.
        suffix_without_loss: Of these, how many no loss predicts; None where the calls do not say so.
        seconds: To the beginning of the next step; None of the last one.
    """

    calls: int
    rows: int
    raw_tokens: int
    call_tokens: int
    step_tokens: int
    suffix_tokens: int
    suffix_without_loss: int | None
    seconds: float | None = None


@dataclass
class TallyOfCalls:
    """The calls of the step under way."""

    version: int
    started: float
    calls: list[ObservedCall] = field(default_factory=list)
    tokens: list[DistinctTokens] = field(default_factory=list)
    ends: list[Codes] = field(default_factory=list)
    raw_tokens: int = 0

    def count(self, call: ObservedCall) -> None:
        """Count one call."""
        tokens, ends = call.count()
        self.calls.append(call)
        self.tokens.append(tokens)
        self.ends.append(ends)
        self.raw_tokens += int(tokens.rows.sum())

    def close(self, seconds: float | None) -> tuple[StepTally, DistinctTokens]:
        """The sums of the step, and its distinct tokens."""
        step = merge(self.tokens)
        alone = step.rows == 1
        unpaid = None if step.has_loss is None else int((alone & ~step.has_loss).sum())
        each, rows = sum(map(len, self.tokens)), sum(map(len, self.ends))
        tally = StepTally(
            len(self.calls), rows, self.raw_tokens, each, len(step), int(alone.sum()), unpaid, seconds
        )  # fmt: skip
        return tally, step


@dataclass
class Epoch:
    """The first steps of a run together, until a row comes again or their tokens are too many.

    Attributes:
        steps: How many they are.
        step_tokens: Their distinct tokens, summed over steps.
    """

    steps: int = 0
    step_tokens: int = 0
    is_over: bool = False
    prefixes: list[Codes] = field(default_factory=list)
    ends: set[int] = field(default_factory=set)

    def add(self, step: DistinctTokens, ends: list[Codes]) -> None:
        """Add a step, unless it repeats a row of an earlier step, as later epochs do."""
        if self.is_over:
            return
        rows = {int(end) for each in ends for end in each}
        self.is_over = not self.ends.isdisjoint(rows) or self.step_tokens + len(step) > MOST_TOKENS
        if not self.is_over:
            self.steps, self.step_tokens = self.steps + 1, self.step_tokens + len(step)
            self.prefixes.append(step.prefixes)
            self.ends |= rows

    def distinct_tokens(self) -> int:
        """Of all steps together."""
        if len(self.prefixes) > 1:
            self.prefixes = [np.unique(np.concatenate(self.prefixes))]
        return sum(map(len, self.prefixes))


@dataclass
class Totals:
    """Sums over all steps of a run.

    Attributes:
        with_loss_known: Suffix tokens of steps with known loss positions.
    """

    steps: int = 0
    calls: int = 0
    rows: int = 0
    raw_tokens: int = 0
    call_tokens: int = 0
    step_tokens: int = 0
    suffix_tokens: int = 0
    with_loss_known: int = 0
    suffix_without_loss: int = 0
    last: deque[StepTally] = field(default_factory=lambda: deque(maxlen=MOST_STEPS))

    def add(self, step: StepTally) -> None:
        """Add one step."""
        for name in ("calls", "rows", "raw_tokens", "call_tokens", "step_tokens", "suffix_tokens"):
            setattr(self, name, getattr(self, name) + getattr(step, name))
        self.steps += 1
        if step.suffix_without_loss is not None:
            self.with_loss_known += step.suffix_tokens
            self.suffix_without_loss += step.suffix_without_loss
        self.last.append(step)
