"""Collect the metrics that trainers log: means over tokens or rows, as separate rows give."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from torch import Tensor

__all__ = ["Metrics", "all_or_nothing"]


class Metrics:
    """Collect means over any number of calls: parts of a plan, micro-batches, steps.

    Losses take one as `metrics=` and add to it, without waiting for the device. A mean over tokens weighs each token of
    each row by the forest's weight, so a shared token counts as often as its rows do.

    Attributes:
        totals: by name, float64 [2]: the weighted sum and the weight. Both add up over ranks:
            `torch.distributed.all_reduce(metrics.totals[name])`.

    Example:
        >>> metrics = treefx.losses.Metrics()
        >>> loss = treefx.losses.clipped(logp, forest, old_logp, advantages, metrics=metrics)
        >>> metrics.means()
        {'clip_ratio/low_mean': 0.01, 'clip_ratio/high_mean': 0.02, ...}
    """

    def __init__(self) -> None:
        self.totals: dict[str, Tensor] = {}

    def add(self, name: str, values: Tensor, weight: Tensor) -> None:
        """Add sum(values * weight) to the numerator of a mean, and sum(weight) to its denominator.

        Args:
            name: of the mean.
            values: [K]; entries of weight 0 may hold any value, NaN included.
            weight: [K].
        """
        weight = weight.detach().double()
        weighted = (values.detach().double() * weight).where(weight != 0, 0.0)
        self.add_sums(name, weighted.sum(), weight.sum())

    def add_sums(self, name: str, value: Tensor, weight: Tensor) -> None:
        """Add a weighted sum and its weight.

        Args:
            name: Of the mean.
            value: Scalar, the weighted sum.
            weight: Scalar, the sum of weights.
        """
        total = value.new_empty(2, dtype=value.double().dtype)
        total[0], total[1] = value.detach(), weight.detach()
        changed = _CHANGED.get()
        if changed is not None:
            changed.setdefault(id(self), (self, dict(self.totals)))
        self.totals[name] = self.totals[name] + total if name in self.totals else total

    def means(self) -> dict[str, float]:
        """Return every mean by name; those without any weight are left out."""
        found = {name: total.tolist() for name, total in self.totals.items()}
        return {name: value / weight for name, (value, weight) in found.items() if weight != 0}

    def clear(self) -> None:
        """Discard all totals."""
        self.totals.clear()


_CHANGED: ContextVar[dict[int, tuple[Metrics, dict[str, Tensor]]] | None] = ContextVar("changed", default=None)
"""Metrics that were added to in `all_or_nothing`, and their totals before."""


@contextmanager
def all_or_nothing() -> Iterator[None]:
    """Roll back all metrics if an exception leaves the context, so that a rerun counts once."""
    changed: dict[int, tuple[Metrics, dict[str, Tensor]]] = {}
    around, token = _CHANGED.get(), _CHANGED.set(changed)
    try:
        yield
    except BaseException:
        for metrics, before in changed.values():
            metrics.totals = before
        raise
    finally:
        _CHANGED.reset(token)
    if around is not None:
        around.update(changed | around)
