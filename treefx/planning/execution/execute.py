"""Run the parts of a forest through a compiled model, in a plan's order.

Forwards, K/V at the cuts, backwards.

A part runs as the native level runs a forest, in one call of the compiled model on its packed row, with the K/V of its
ancestors as further inputs of the graph. Where tokens lie on their path (positions, masks, windows) comes from the
uncut forest. Work goes by the plan's list of steps, without recursion, so that depth has no limit.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from treefx.errors import InputError, UnsupportedError
from treefx.forests.context import use
from treefx.forests.forest import Forest
from treefx.forests.subset import EdgeSubset
from treefx.inspection.compiled_modules import modules_of
from treefx.kernels.tiles.structure import forget_structures
from treefx.kernels.tiles.tree_blocks import forget_blocks
from treefx.logprobs import edge_logprobs
from treefx.planning.execution.boundary import Crossing, Store, edges_of, make_row
from treefx.planning.search.part import Part, Schedule, Step
from treefx.runtime.converted.sequence_parallel import split_over
from treefx.runtime.cut import Cut, PartRow

__all__ = ["ENDINGS", "Backward", "Executor", "LogProbs", "Loss", "Model", "logits_logprobs", "scalar"]

ENDINGS: ContextVar[list[tuple[Step, float]] | None] = ContextVar("endings", default=None)
"""Where a list is set, it gets the steps of the last run, and when each ended (``time.perf_counter``)."""

Loss = Callable[[Tensor, EdgeSubset], Tensor]
"""Output of the model and its packed row -> log-probabilities [E_p] of its edges, or [E_p, ...]."""
LogProbs = Callable[[Any, Forest], Tensor]
"""The model's output for a packed row, and the row -> log-probabilities [E_p] of its edges, or [E_p, ...]."""
Backward = Callable[[Sequence[Tensor], Sequence[Tensor | None], Sequence[Tensor]], list[Tensor | None]]
"""`Gradients.backward`."""


def logits_logprobs(output: Any, row: Forest) -> Tensor:
    """Log-probabilities from `output.logits`."""
    return edge_logprobs(output.logits, row)


def scalar(loss: Any) -> Tensor:
    """Check that a loss returned a scalar tensor.

    Raises:
        InputError: it is no scalar tensor.
    """
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        got = f"a tensor {list(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise InputError(f"loss(logp, forest) must return a scalar tensor, got {got}")
    return loss


@dataclass(frozen=True)
class Model:
    """A compiled model and how it is called.

    Attributes:
        compiled: takes `input_ids` and `position_ids` [1, N].
        kwargs: further keyword arguments.
        logprobs: reads log-probabilities from the model's output.
    """

    compiled: Callable[..., Any]
    kwargs: Mapping[str, Any]
    logprobs: LogProbs

    def run(self, row: PartRow) -> Any:
        """Run a part; its K/V are in `row.cut` afterwards.

        Raises:
            UnsupportedError: the call did not reach a graph compiled by treefx.
        """
        with use(row):
            output = self.compiled(**row.model_inputs(), **self.kwargs)
            if not row.cut.handed:
                raise UnsupportedError(
                    "parts need a model compiled by treefx, whose graph returns keys and values, but none arrived; "
                    'compile it with model.compile(backend="treefx")'
                )
        return output


@dataclass(eq=False)
class _Live:
    """Hold a forward until its backward."""

    crossings: list[Crossing]
    cut: Cut
    loss: Tensor | None


@dataclass(eq=False)
class Executor:
    """Carries out the steps of a schedule.

    Attributes:
        model: the model.
        forest: the uncut forest, on the model's device.
        schedule: its parts and their steps.
        loss: called on each part's edges, if there are any.
        backward: runs a backward from roots with their gradients, and returns the gradients of some of its leaves.
    """

    model: Model
    forest: Forest
    schedule: Schedule
    loss: Loss
    backward: Backward
    value: Tensor | None = None
    _changes: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    _latest: Part | None = None
    _live: dict[int, _Live] = field(default_factory=dict)

    def __post_init__(self) -> None:
        ranks = split_over(*modules_of(self.model.compiled))
        self.store = Store(self.forest, self.schedule.parts, ranks)

    def run(self, steps: Iterable[Step]) -> None:
        """Carry out steps in order."""
        actions: dict[str, Callable[[Part], None]] = {
            "forward": self._forward,
            "backward": self._backward,
            "kv": self._kv,
            "offload": lambda part: self.store.move(part, "cpu"),
            "fetch": lambda part: self.store.move(part, self.forest.device),
        }
        endings = ENDINGS.get()
        if endings is not None:
            endings.clear()
        for step in steps:
            actions[step.kind](self.schedule.parts[step.part])
            if endings is not None:
                endings.append((step, self._now()))

    def _now(self) -> float:
        """The time, once the device has done what it was told."""
        if self.forest.device.type != "cpu":
            torch.accelerator.synchronize(self.forest.device)
        return time.perf_counter()

    def logprobs(self, parts: Iterable[Part]) -> Tensor:
        """Compute the log-probabilities of all edges, [E, ...], without gradients.

        K/V of one path are held at a time.

        Args:
            parts: all parts, depth first.
        """
        result: Tensor | None = None
        path: list[Part] = []
        for part in parts:
            while path and path[-1].index not in part.ancestors:
                self.store.drop(path.pop())
            path.append(part)
            row, _ = make_row(self.store, part, "infer")
            logp = self.model.logprobs(self.model.run(row), row).detach()
            self.store.put(part, row.cut.handed)
            result = logp.new_zeros(len(self.forest.edges), *logp.shape[1:]) if result is None else result
            result[row.edge_index] = logp
        while path:
            self.store.drop(path.pop())
        assert result is not None, "a forest has at least one token"
        return result

    def write_changes(self) -> None:
        """Write buffer updates of the model's forward: once a step, not once a part."""
        with torch.no_grad():
            for buffer, value in self._changes:
                buffer.copy_(value)

    def _kv(self, part: Part) -> None:
        _forget_others()
        row, _ = make_row(self.store, part, "kv")
        self.model.run(row)
        self.store.put(part, row.cut.handed)

    def _forward(self, part: Part) -> None:
        _forget_others()
        row, crossings = make_row(self.store, part, "train")
        output = self.model.run(row)
        self._changes = row.cut.changes
        loss = self._loss(output, row) if len(row.edge_index) else None
        if part.keep == "keep":
            self.store.put(part, row.cut.handed)
        self._live[part.index], self._latest = _Live(crossings, row.cut, loss), part

    def _loss(self, output: Any, row: PartRow) -> Tensor:
        logp = self.model.logprobs(output, row)
        loss = scalar(self.loss(logp, edges_of(row)))
        value = loss.detach()
        self.value = value.clone() if self.value is None else self.value + value
        return loss

    def _backward(self, part: Part) -> None:
        if part is not self._latest:
            _forget_others()
        self._latest = None
        live = self._live.pop(part.index)
        crossed = [*live.cut.taken, *live.cut.handed]
        roots, gradients = self._roots(part, live)
        if roots:
            self.store.add_gradients(live.crossings, self.backward(roots, gradients, live.cut.taken))
        for value in crossed:
            # Compiled code may hold the graph of this part until the next call, and with it these.
            value.untyped_storage().resize_(0)
        self.store.drop(part)

    def _roots(self, part: Part, live: _Live) -> tuple[list[Tensor], list[Tensor | None]]:
        """Return the roots of a part's backward: its loss, and its outgoing K/V with gradients."""
        roots: list[Tensor] = []
        gradients: list[Tensor | None] = []
        if live.loss is not None and live.loss.requires_grad:
            roots.append(live.loss)
            gradients.append(None)
        for handed, total in zip(live.cut.handed, self.store.gradients(part) or (), strict=False):
            if handed.requires_grad:
                roots.append(handed)
                gradients.append(total.to(handed.dtype))
        live.cut.handed = []
        return roots, gradients


def _forget_others() -> None:
    """Free kernels' caches of other forests, masks and lists of tiles; a part runs alone."""
    forget_structures()
    forget_blocks()
