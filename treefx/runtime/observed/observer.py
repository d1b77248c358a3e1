"""The record of one observed model."""

from __future__ import annotations

import logging
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from treefx.runtime.observed.host_copies import is_recording
from treefx.runtime.observed.tallies import Epoch, StepTally, TallyOfCalls, Totals
from treefx.runtime.observed.tokens import ObservedCall, read_call
from treefx.runtime.records import MOST_TOKENS, version_of

__all__ = ["Observer", "Settings", "observer_of", "observers"]

_log = logging.getLogger("treefx")
_MOST_MODELS = 16
_MOST_INPUTS = 64
_LIBRARIES = (str(Path(torch.__file__).parents[1]), str(Path(__file__).parents[2]), "<frozen")


@dataclass(frozen=True)
class Settings:
    """Hold a trainer's settings that decide which rows come in one call.

    Attributes:
        trainer: Its name.
        batch: The setting of the number of rows, or tokens, of a call, with its value.
        order: The setting of the order of rows, with its value.
        way_out: The remedy that keeps rows with shared prefixes together.
        samples: Whether rows are drawn from the model for few steps, so that none can move to another step.
    """

    trainer: str = ""
    batch: str = ""
    order: str = ""
    way_out: str = ""
    samples: bool = False


class Observer:
    """Counts the calls of a model.

    Args:
        name: Of the model's class.
        model: The model where there is one; it is kept weakly.
    """

    on_step: ClassVar[Callable[[Observer], None] | None] = None
    """Called when a step of any model is over."""

    def __init__(self, name: str, model: nn.Module | None = None) -> None:
        self.name, self.settings, self.line = name, Settings(), _calling_line()
        self.model = None if model is None else weakref.ref(model)
        self.totals, self.epoch = Totals(), Epoch()
        self.calls_without_gradients = self.calls_without_ids = self.repeats = 0
        self.failure = ""
        """Why calls are not counted any more."""
        self.seconds = 0.0
        """Seconds of observing on the host."""
        self.sample: list[ObservedCall] = []
        """The calls of the last step that is over."""
        self.began = self.ended = time.perf_counter()
        self._now: TallyOfCalls | None = None
        self._pending: ObservedCall | None = None
        self._seen: deque[tuple[weakref.ref[Tensor], int]] = deque(maxlen=_MOST_INPUTS)

    def note(self, named: Mapping[str, Any], parameters: Iterable[Tensor]) -> None:
        """Note a call that is about to run.

        Args:
            named: Its arguments by name.
            parameters: Of the model.
        """
        started = time.perf_counter()
        if self.failure:
            return
        try:
            self._count(named, parameters, started)
        except Exception as error:  # the call itself must run as if there were no observer
            self.failure = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
            _log.warning("treefx stops observing %s: %s", self.name, self.failure)
        self.ended = time.perf_counter()
        self.seconds += self.ended - started

    def _count(self, named: Mapping[str, Any], parameters: Iterable[Tensor], started: float) -> None:
        if not torch.is_grad_enabled():
            self.calls_without_gradients += 1
        elif not is_recording():
            with torch.no_grad():
                self._note(named, version_of(parameters), started)

    def _note(self, named: Mapping[str, Any], version: int, started: float) -> None:
        self._count_pending()
        now = self._now
        if now is not None and (now.version != version or now.raw_tokens > MOST_TOKENS):
            self._close(now, started - now.started)
            now = None
        found = read_call(named)
        if found is None:
            self.calls_without_ids += 1
            return
        call, ids = found
        if now is None:
            self.began = started if not self.totals.steps else self.began
            self._now = TallyOfCalls(version, started)
            self._seen.clear()
        if self._is_repeated(ids):
            self.repeats += 1
            return
        self._pending = call

    def _is_repeated(self, ids: Tensor) -> bool:
        """Return whether an earlier call of the step got this tensor.

        No order of rows would merge the two.
        """
        if ids.is_inference():
            return False
        if any(known() is ids and version == ids._version for known, version in self._seen):
            return True
        self._seen.append((weakref.ref(ids), ids._version))
        return False

    def _count_pending(self) -> None:
        if self._pending is not None and self._now is not None:
            self._now.count(self._pending)
        self._pending = None

    def _close(self, step: TallyOfCalls, seconds: float) -> None:
        tally, tokens = step.close(seconds)
        self.totals.add(tally)
        self.epoch.add(tokens, step.ends)
        self.sample, self._now = step.calls, None
        if Observer.on_step is not None:
            Observer.on_step(self)

    @property
    def last_step(self) -> StepTally | None:
        """The last step that is over; the one under way where there is none."""
        if self.totals.last:
            return self.totals.last[-1]
        self._count_pending()
        return self._now.close(None)[0] if self._now is not None and self._now.calls else None

    def until_now(self) -> tuple[Totals, Epoch, list[ObservedCall]]:
        """The sums, the first epoch and the calls of the last step, the step under way among them."""
        self._count_pending()
        if self._now is None or not self._now.calls:
            return self.totals, self.epoch, self.sample
        totals, epoch = copy(self.totals), copy(self.epoch)
        totals.last, epoch.prefixes, epoch.ends = totals.last.copy(), [*epoch.prefixes], {*epoch.ends}
        tally, tokens = self._now.close(None)
        totals.add(tally)
        epoch.add(tokens, self._now.ends)
        return totals, epoch, self._now.calls if not self.sample else self.sample


_by_parameter: MutableMapping[Tensor, Observer] = WeakIdKeyDictionary()
_all: deque[Observer] = deque(maxlen=_MOST_MODELS)


def observer_of(parameter: Tensor | None, name: str, model: nn.Module | None = None) -> Observer:
    """Return the observer of the model with this first parameter.

    It outlives the model, as the last sixteen do.
    """
    found = None if parameter is None else _by_parameter.get(parameter)
    if found is None:
        found = Observer(name, model)
        _all.append(found)
        if parameter is not None:
            _by_parameter[parameter] = found
    return found


def observers(parameters: Iterable[Tensor] | None = None) -> list[Observer]:
    """List observers, the oldest first; with parameters, those of their models."""
    if parameters is None:
        return list(_all)
    found = (_by_parameter.get(parameter) for parameter in parameters)
    return list(dict.fromkeys(observer for observer in found if observer is not None))


def _calling_line() -> str:
    """``file:line`` of the user's line that calls the model, or the trainer which does."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_LIBRARIES):
        frame = frame.f_back
    return "" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"
