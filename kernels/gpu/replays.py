"""Replay one layer's launches for the next layers, with their own tensors.

Which kernels run with which arguments follows from the forest and from how the tensors lie; for all layers of a model
the host works it out once. Nothing but addresses differs after that.
"""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import count
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from treefx.kernels.tiles.tree_blocks import keep, recall

__all__ = ["VALUES", "Recorder", "Replay", "Step", "note", "of_forest", "replayed"]

_WRITTEN = {
    "Out", "Lse", "Delta", "PackedQ", "PackedGrad", "PackedHalves", "PackedLse", "PackedDelta", "SumsQ",
    "GradQ", "GradK", "GradV", "PartsK", "PartsV",
}  # fmt: skip
"""Parameters that a step writes before any read; their old contents do not matter."""
VALUES = "Made_"
"""So are those with such a name: values of a score."""
_LISTS = {"Low", "Size", "order", "start", "middle", "stop", "slot", "tiles", "split", "bounds"}
"""Parameters that belong to the forest."""
_ALIGNMENT = 16
"""Alignment in bytes that selects another kernel."""


@dataclass(frozen=True)
class _Made:
    """Memory that a step writes."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def like(cls, tensor: Tensor) -> "_Made":
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device)

    def empty(self) -> Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)


@dataclass(frozen=True)
class Step:
    """One call of a kernel; tensors have names.

    Attributes:
        run: takes the values in this order.
        values: with ``None`` in the places of tensors.
        places: of tensors, and their names.
        makes: memory that is there from this step on.
        frees: unused memory after it.
    """

    run: Callable[..., object]
    values: list[Any]
    places: list[tuple[int, str]]
    makes: list[tuple[str, _Made]]
    frees: tuple[str, ...] = ()


@dataclass(frozen=True)
class Replay:
    """Steps that run with other tensors.

    Attributes:
        steps: in their order.
        results: names of the results.
    """

    steps: list[Step]
    results: tuple[str, ...]

    def run(self, given: Mapping[str, Tensor]) -> list[Tensor]:
        """Run them.

        Args:
            given: the tensors that were there before, by the names they were recorded with, lying as those did.
        """
        tensors = dict(given)
        for step in self.steps:
            for name, made in step.makes:
                tensors[name] = made.empty()
            values = step.values.copy()
            for place, name in step.places:
                tensor = tensors[name]
                values[place] = tensor if tensor.dtype != torch.bool else tensor.view(torch.uint8)
            step.run(*values)
            for name in step.frees:
                del tensors[name]
        return [tensors[name] for name in self.results]


class Recorder:
    """Record the steps of a pass, without holding the tensors they read and write.

    Args:
        given: the caller's tensors, by names.
    """

    def __init__(self, given: Mapping[str, Tensor]) -> None:
        self._given = given
        # Steps read the caller's tensors: any other unwritten output would be undefined.
        self._written = _WRITTEN - {name.capitalize() for name in given}
        self._clear()

    def _clear(self) -> None:
        self._steps: list[Step] = []
        self._numbers = count()
        self._forest: dict[int, ref[Tensor]] = {}
        self._names: dict[int, tuple[ref[Tensor], str]] = {}
        for name, tensor in self._given.items():
            self._names[id(tensor)] = ref(tensor), name
        # One tensor in two places is one here; the next layer may have two.
        self._complete = len(self._names) == len(self._given)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Write down the steps of this thread from here on; those from before are forgotten."""
        self._clear()
        before, _tape.recorder = _tape.recorder, self
        try:
            yield
        finally:
            _tape.recorder = before

    def add(self, run: Callable[..., object], arguments: Mapping[str, Any]) -> None:
        """Write a step down."""
        step = Step(run, list(arguments.values()), [], [])
        for place, (parameter, value) in enumerate(arguments.items()):
            if not isinstance(value, Tensor):
                continue
            value = self._booleans(value)
            if self._name(value) is None and (parameter in self._written or parameter.startswith(VALUES)):
                step.makes.append((self._named(value), _Made.like(value)))
            name = self._name(value)
            if name is not None:
                step.places.append((place, name))
                step.values[place] = None
            elif parameter not in _LISTS and not self._belongs(value):
                self._complete = False
        self._steps.append(step)

    def _booleans(self, tensor: Tensor) -> Tensor:
        """Return the booleans behind these bytes, as kernels read them, or the tensor itself."""
        if tensor.dtype != torch.uint8:
            return tensor
        lies = tensor.data_ptr(), tensor.shape, tensor.stride()
        given = (x for x in self._given.values() if x.dtype == torch.bool)
        return next((x for x in given if (x.data_ptr(), x.shape, x.stride()) == lies), tensor)

    def keep(self, tensor: Tensor) -> None:
        """Declare a tensor the forest's, constant for all layers."""
        self._forest[id(tensor)] = ref(tensor)

    def _belongs(self, tensor: Tensor) -> bool:
        known = self._forest.get(id(tensor))
        return known is not None and known() is tensor

    def _named(self, tensor: Tensor) -> str:
        """Give a new tensor a fresh name."""
        name = f"made {next(self._numbers)}"
        self._names[id(tensor)] = ref(tensor), name
        return name

    def _name(self, tensor: Tensor) -> str | None:
        known, name = self._names.get(id(tensor), (None, None))
        return name if known is not None and known() is tensor else None

    def replay(self, results: Sequence[Tensor]) -> Replay | None:
        """Return the steps; ``None`` if they read a tensor of unknown origin.

        Known origins are the caller, a step and the forest.

        Args:
            results: results of the steps.
        """
        names = [self._name(tensor) for tensor in results]
        known = tuple(name for name in names if name is not None)
        if not self._complete or len(known) < len(names):
            return None
        return Replay(_freed(self._steps, known), known)


def _freed(steps: Sequence[Step], results: Sequence[str]) -> list[Step]:
    """Return the steps with each freeing the tensors of last use."""
    last = {name: number for number, step in enumerate(steps) for _, name in step.places}
    made = {name for step in steps for name, _ in step.makes} - set(results)
    return [
        replace(step, frees=tuple(name for name, at in last.items() if at == number and name in made))
        for number, step in enumerate(steps)
    ]


class _Tape(threading.local):
    recorder: Recorder | None = None


_tape = _Tape()


def note(run: Callable[..., object], arguments: Mapping[str, Any]) -> None:
    """Let a step that was run be written down, if this thread records.

    Args:
        run: runs it again; takes the arguments by position.
        arguments: by parameter.
    """
    if _tape.recorder is not None:
        _tape.recorder.add(run, arguments)


def of_forest(tensor: Tensor) -> Tensor:
    """Return a tensor that follows from the forest alone; a recorded step keeps it."""
    if _tape.recorder is not None:
        _tape.recorder.keep(tensor)
    return tensor


def replayed(
    kind: tuple[object, ...],
    forest: tuple[Tensor, ...],
    given: Mapping[str, Tensor],
    launch: Callable[[Recorder], list[Tensor]],
) -> list[Tensor]:
    """Return the results of a pass, replayed from one like it on this forest if known.

    Args:
        kind: dependencies of the steps, besides the forest and the tensors' layout.
        forest: the vectors from which lists of tiles are made; a hit is verified as in ``find_blocks``.
        given: the tensors that steps may read, by names.
        launch: runs the pass, and lets its steps be recorded.
    """
    settings = (kind, tuple(given), *map(_layout, given.values()))
    replay: Replay | None = recall(settings, forest)
    if replay is not None:
        return replay.run(given)
    recorder = Recorder(given)
    results = launch(recorder)
    replay = recorder.replay(results)
    if replay is not None:
        keep(settings, forest, replay)
    return results


def _layout(tensor: Tensor) -> tuple[object, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.data_ptr() % _ALIGNMENT
