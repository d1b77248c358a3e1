"""Check that a loss is a sum over edges, so that parts of a plan may be summed.

A mean over a part's edges is none.
"""

from __future__ import annotations

from collections import OrderedDict
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor

from treefx.errors import CoupledLossError
from treefx.forests.subset import EdgeSubset
from treefx.losses.metrics import all_or_nothing
from treefx.planning.execution.execute import Loss, scalar
from treefx.runtime.cut import forest_as

__all__ = ["SumCheck"]

_NO_SUM = (
    "treefx.forward_backward sums a loss over the parts of a plan, but this one is no sum over edges: {both:.6g} on "
    "the edges of two parts together, {one:.6g} and {other:.6g} on each of them. Divide by the whole forest's total, "
    "as treefx.losses.sft(..., reduction='token_mean') does, not of a part; or pass additive=False, and it "
    "is called once, on all edges"
)
_TOLERANCE = 0.01
"""Of the values and gradients themselves: a mean is off by about a half, rounding in bfloat16 by less."""
_KEPT = 64
_known: OrderedDict[Any, bool] = OrderedDict()
"""Functions that were checked, the latest last, and whether they are sums."""


class SumCheck:
    """A loss that is compared with itself: on two parts together, and on each of them.

    A sum's gradients by edges are those of its terms; its value shows added constants. Both are compared once
    per function, on the first two parts that have gradients.

    Attributes:
        loss: the loss.
        is_sum: earlier result; None: none yet.
        error: the error of an earlier comparison, if any.

    Raises:
        CoupledLossError: the loss is no sum.
    """

    def __init__(self, loss: Loss) -> None:
        self.loss = loss
        self.error: CoupledLossError | None = None
        self._key = _function_key(loss)
        self.is_sum = _known.get(self._key)
        self._first: _Called | None = None

    def __call__(self, logp: Tensor, part: EdgeSubset) -> Tensor:
        value = scalar(self.loss(logp, part))
        if not self.is_sum and logp.shape[:1] == part.edge_index.shape:
            self._check(_Called(logp, part, value))
        return value

    def _check(self, called: _Called) -> None:
        first = self._first
        if first is None or first.gradient is None:
            self._first = called
        elif called.gradient is not None:
            both = _together(self.loss, first, called)
            agrees = _agrees(first, called, both)
            if agrees is None:
                return
            if not agrees:
                self._remember(False)
                figures = {"both": float(both.value), "one": float(first.value), "other": float(called.value)}
                self.error = CoupledLossError(_NO_SUM.format(**figures))
                raise self.error
            self._remember(True)

    def _remember(self, is_sum: bool) -> None:
        self.is_sum, self._first = is_sum, None
        if self._key is not None:
            _known[self._key] = is_sum
            _known.move_to_end(self._key)
            while len(_known) > _KEPT:
                _known.popitem(last=False)


class _Called:
    """A call of a loss on some edges of a forest: its value, and its gradient if there is any."""

    def __init__(self, logp: Tensor, part: EdgeSubset, value: Tensor) -> None:
        self.logp, self.part = logp.detach(), part
        self.value = value.detach().double().reshape(())
        self.gradient: Tensor | None = None
        if value.requires_grad and logp.requires_grad:
            (found,) = torch.autograd.grad(value, logp, torch.ones_like(value), retain_graph=True, allow_unused=True)
            self.gradient = found if found is not None and bool(found.any()) else None


class _Undone(Exception):
    """Leaves a block and discards its metrics."""


def _together(loss: Loss, first: _Called, second: _Called) -> _Called:
    """Compute the loss on the edges of two parts, in the order of the forest.

    Recorded metrics are discarded.
    """
    forest = first.part.uncut
    edges = torch.cat([first.part.edge_index, second.part.edge_index])
    order = edges.argsort()
    part: EdgeSubset = forest_as(EdgeSubset, forest, uncut=forest, edge_index=edges[order])
    logp = torch.cat([first.logp, second.logp])[order].requires_grad_()
    with suppress(_Undone), all_or_nothing():
        called = _Called(logp, part, scalar(loss(logp, part)))
        raise _Undone
    if called.gradient is not None:
        called.gradient = torch.empty_like(called.gradient).index_copy_(0, order, called.gradient)
    return called


def _agrees(first: _Called, second: _Called, both: _Called) -> bool | None:
    """Whether value and gradient of two parts are those of each; None if that cannot be seen."""
    assert first.gradient is not None and second.gradient is not None
    apart = torch.cat([first.gradient, second.gradient]).double()
    together = torch.zeros_like(apart) if both.gradient is None else both.gradient.double()
    size = (apart * torch.cat([first.logp, second.logp]).double()).nan_to_num(0.0, 0.0, 0.0).abs().sum()
    off = both.value - first.value - second.value
    scale = size + first.value.abs() + second.value.abs()
    if not bool(torch.stack([off, scale, apart.sum(), together.sum()]).isfinite().all()):
        return None
    same_gradient = (together - apart).abs().max() <= _TOLERANCE * apart.abs().max()
    return bool(same_gradient & (off.abs() <= _TOLERANCE * scale))


def _function_key(function: Any, depth: int = 3) -> Any:
    """Return a key equal for closures of one definition with the same switches.

    Switches are strings, booleans and functions. None: no key.
    """
    if isinstance(function, partial):
        given = [function.func, *function.args, *function.keywords.values()]
        return (partial, *(_switch(x, depth) for x in given), *function.keywords)
    code = getattr(function, "__code__", None)
    if code is None or not depth:
        return None
    cells = [cell.cell_contents for cell in function.__closure__ or () if _is_filled(cell)]
    return (code, *(_switch(x, depth - 1) for x in [*cells, *(function.__defaults__ or ())]))


def _switch(value: Any, depth: int) -> Any:
    """Return the key of a captured value: itself if it is a switch, else its type.

    Tensors and numbers change from step to step.
    """
    if value is None or isinstance(value, str | bool):
        return value
    if not callable(value):
        return type(value)
    return _function_key(value, depth) or (type(value), id(value))


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:  # a variable that is set later
        return False
