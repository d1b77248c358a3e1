"""``treefx.observed``: the figures of an observed model."""

from __future__ import annotations

import os
import weakref
from collections.abc import MutableMapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from treefx.errors import InputError
from treefx.inspection.compiled_modules import modules_of
from treefx.inspection.observation.prediction import predict as predict_call
from treefx.inspection.observation.records import (
    SCHEMA,
    Cost,
    Figures,
    ObservedStep,
    Origin,
    Prediction,
    Scatter,
)
from treefx.inspection.observation.scatter import find_scatter
from treefx.inspection.observation.table import describe
from treefx.inspection.report.codec import from_text, to_text
from treefx.runtime.observed.observer import Observer, observers
from treefx.runtime.observed.tallies import StepTally, Totals

__all__ = ["Observation", "account", "observed"]


@dataclass(frozen=True)
class Observation:
    """Report the shared tokens of a model's calls, and predict the gain of treefx.

    Attributes:
        origin: Model, trainer, line and rank.
        figures: Sums over all steps.
        cost: The cost of observing.
        scatter: Settings because of which rows that share prefixes come in different calls, the largest loss first.
        prediction: A dry run of one call; None where the model cannot be read.
        not_predicted: Why there is none.
        steps: The last hundred.
        stopped: Why calls were not counted any more; "" where all were.
        schema: Name and version of this form.
    """

    origin: Origin
    figures: Figures = field(default_factory=Figures)
    cost: Cost = field(default_factory=Cost)
    scatter: tuple[Scatter, ...] = ()
    prediction: Prediction | None = None
    not_predicted: str = ""
    steps: tuple[ObservedStep, ...] = ()
    stopped: str = ""
    schema: str = SCHEMA

    def summary(self) -> str:
        """Format the observation as a table."""
        return describe(
            self.origin, self.figures, self.cost, self.scatter, self.prediction, self.not_predicted, self.stopped,
        )  # fmt: skip

    def to_json(self) -> str:
        """Format the observation as JSON, key ``schema`` first."""
        return to_text(self)

    @staticmethod
    def from_json(text: str) -> Observation:
        """Read the text of ``to_json``.

        Raises:
            InputError: The text is no observation, or one of another version.
        """
        found: Observation = from_text(Observation, text, SCHEMA, "observation")
        return found


def observed(model: Any, *, predict: bool = True) -> Observation:
    """Report the shared tokens of an observed model's calls, up to now.

    Args:
        model: Of ``treefx.observe``, or compiled with ``options={"observe": True}``; called at least once.
        predict: Whether to predict time and memory by a dry run of one call (``treefx.explain``), which takes seconds.

    Returns:
        The counts of all observed steps, in tokens, seconds and bytes.

    Raises:
        InputError: It is no model, or none that was observed and called.
    """
    modules = modules_of(model)
    found = observers(parameter for module in modules for parameter in module.parameters())
    if not found:
        raise InputError(
            "treefx.observed expects a model that was called after treefx.observe(model), or one compiled with "
            f"backend='treefx' and options={{'observe': True}}, got {type(model).__name__}"
        )
    largest = max(found, key=lambda observer: observer.until_now()[0].raw_tokens)
    return account(largest, model=getattr(modules[0], "_orig_mod", modules[0]), predicts=predict)


def account(observer: Observer, *, model: nn.Module | None = None, predicts: bool = True) -> Observation:
    """Make the record of an observer's counts.

    Args:
        observer: Of one model.
        model: The model, where the caller has it.
        predicts: Whether to make the dry run.
    """
    totals, epoch, calls = observer.until_now()
    settings = observer.settings
    origin = Origin(observer.name, settings.trainer, observer.line, int(os.environ.get("RANK", "0")))
    steps = tuple(_step(step) for step in totals.last)
    scatter = find_scatter(calls, epoch, settings)
    made, why = _predicted.get(observer, (None, "the run was not over"))
    if predicts and made is None:
        known = model if observer.model is None else observer.model()
        made, why = _predicted[observer] = predict_call(known or model, calls, steps)
    cost = Cost(observer.seconds, observer.ended - observer.began)
    return Observation(origin, _figures(observer, totals), cost, scatter, made, why, steps, observer.failure)


_predicted: MutableMapping[Observer, tuple[Prediction | None, str]] = weakref.WeakKeyDictionary()
"""Predictions made while the model was alive."""


def _step(step: StepTally) -> ObservedStep:
    return ObservedStep(step.calls, step.rows, step.raw_tokens, step.call_tokens, step.step_tokens, step.seconds)


def _figures(observer: Observer, totals: Totals) -> Figures:
    known = totals.with_loss_known
    return Figures(
        totals.steps, totals.calls, observer.repeats, observer.calls_without_gradients, totals.rows,
        totals.raw_tokens, totals.call_tokens, totals.step_tokens, totals.suffix_tokens,
        totals.suffix_without_loss / known if known else None,
    )  # fmt: skip
