"""The record of an observed run. It is frozen and becomes JSON field by field."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["SCHEMA", "Cost", "Figures", "ObservedStep", "Origin", "Prediction", "Scatter"]

SCHEMA = "treefx.observation/1"
"""Name and version of the form of an observation; a change that old readers cannot read gets another number."""


@dataclass(frozen=True)
class ObservedStep:
    """One optimizer step.

    Attributes:
        calls: Calls with gradients.
        rows: Sequences of all calls.
        raw_tokens: Of all rows, without padding.
        call_tokens: Distinct tokens of each call, summed over calls.
        step_tokens: Distinct tokens of all rows of the step together.
        seconds: To the beginning of the next step; None of the last one.
    """

    calls: int
    rows: int
    raw_tokens: int
    call_tokens: int
    step_tokens: int
    seconds: float | None = None


@dataclass(frozen=True)
class Scatter:
    """A setting because of which rows that share prefixes come in different calls.

    Attributes:
        setting: Of the trainer, with its value.
        where: "order", "batch", "steps" or "columns".
        tokens: That are computed again because of it, over the calls it was found in.
        of_tokens: Tokens of these calls with shared prefixes computed once per call.
        way_out: The change to make.
    """

    setting: str
    where: str
    tokens: int
    of_tokens: int
    way_out: str


@dataclass(frozen=True)
class Prediction:
    """Hold a dry run's prediction for one call of the last step (``treefx.explain``).

    No operator of it ran.

    Attributes:
        verdict: One sentence.
        flops: Of the model's forward on rows.
        flops_packed: On distinct tokens.
        seconds: Of a step, measured.
        seconds_packed: The same times the ratio of FLOPs, on the calls as they come.
        seconds_together: With all rows of a step in one call.
        kept_bytes: Bytes that the call's forward keeps for the backward, on rows; 0 where that is unknown.
        kept_bytes_packed: On distinct tokens; 0 where that is not known.
    """

    verdict: str
    flops: int
    flops_packed: int
    seconds: float | None = None
    seconds_packed: float | None = None
    seconds_together: float | None = None
    kept_bytes: int = 0
    kept_bytes_packed: int = 0


@dataclass(frozen=True)
class Figures:
    """Sums over all observed steps.

    Attributes:
        steps: Optimizer steps.
        calls: Calls with gradients, without those that got the very tensor of an earlier call of their step.
        repeats: How many of these were left out.
        calls_without_gradients: Of sampling, reference models and evaluation; not counted further.
        rows: Sequences.
        raw_tokens: Tokens of all rows, without padding: the present work, at least.
        call_tokens: Distinct tokens of each call, summed: the work of treefx on the calls unchanged.
        step_tokens: Distinct tokens of each step, summed: the work if all rows of a step came in one call.
        suffix_tokens: Distinct tokens of a step with one row through them.
        suffix_without_loss: The share of these that no loss predicts; None where the calls do not say which.
    """

    steps: int = 0
    calls: int = 0
    repeats: int = 0
    calls_without_gradients: int = 0
    rows: int = 0
    raw_tokens: int = 0
    call_tokens: int = 0
    step_tokens: int = 0
    suffix_tokens: int = 0
    suffix_without_loss: float | None = None

    @property
    def sharing(self) -> float:
        """Raw over distinct tokens of the calls as they come: the ideal speed-up in tokens."""
        return self.raw_tokens / self.call_tokens if self.call_tokens else 1.0

    @property
    def possible(self) -> float:
        """Return raw over distinct tokens of the steps: the speed-up if all rows of a step met."""
        return self.raw_tokens / self.step_tokens if self.step_tokens else 1.0


@dataclass(frozen=True)
class Cost:
    """Hold the cost of observing.

    Attributes:
        seconds: On the host, in the calls.
        of_seconds: From the first call to the last.
    """

    seconds: float = 0.0
    of_seconds: float = 0.0

    @property
    def share(self) -> float:
        """Of the run."""
        return self.seconds / self.of_seconds if self.of_seconds else 0.0


@dataclass(frozen=True)
class Origin:
    """Name the origin of the calls.

    Attributes:
        model: Class of the model.
        trainer: Its name; "" for a loop of the user's.
        line: ``file:line`` that calls the model or its trainer.
        rank: Of ``RANK``, 0 without one.
    """

    model: str
    trainer: str = ""
    line: str = ""
    rank: int = 0
