"""Choose the terms of a loss: one per edge, or per (edge, row) entry.

Entries are needed only for edges with unequal values of their rows.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from treefx.forests.edges import Edges
from treefx.forests.forest import Forest
from treefx.losses.reading import PerEdge, check_finite, read_per_edge, read_per_token

__all__ = ["Collect", "Terms", "align"]

Collect = Callable[[Tensor], Tensor]
"""Contributions of rows, float64 [entries] -> their sum per term, [K]."""


@dataclass(frozen=True, eq=False)
class Terms:
    """Pair log-probabilities with a reference, [K] each: K = E, or the number of entries.

    Attributes:
        edges: the forest's edges.
        logp: of the policy that is trained.
        other: of another policy, without gradient; where it was not set, `logp` itself.
        per_edge: whether K = E.
    """

    edges: Edges
    logp: Tensor
    other: Tensor
    per_edge: bool

    def collect(self, entries: Tensor) -> Tensor:
        """Sum [entries] per term, in `logp`'s dtype."""
        return (self.edges.sum_entries(entries) if self.per_edge else entries).to(self.logp.dtype)

    def log_ratio(self, needed: Tensor) -> Tensor:
        """Return `logp - other` [K], and 0 where no entry is needed, which avoids overflow."""
        return torch.where(self.collect(needed.double()) > 0, self.logp - self.other, 0.0)

    def spread(self) -> "Terms":
        """The same, one term per entry."""
        if not self.per_edge:
            return self
        edge = self.edges.edge_of_entry
        return Terms(self.edges, self.logp[edge], self.other[edge], False)


def align(logp: Tensor, forest: Forest, other: PerEdge | None, name: str, needed: Tensor) -> Terms:
    """Put the log-probabilities of another policy next to those of the edges.

    One term per edge if `other` has one value per edge, or if the rows of every edge gave equal ones; otherwise one per
    entry. Values of rows for tokens of weight 0 are never read.

    Args:
        logp: [E].
        forest: the forest.
        other: of the other policy; None stands for `logp` itself.
        name: of `other`, for messages.
        needed: bool [entries], where a value must be finite.
    """
    edges = forest.edges
    if other is None:
        return Terms(edges, logp, logp.detach(), True)
    values = read_per_edge(other, forest)
    if values is not None:
        check_finite(values[edges.edge_of_entry], name, needed)
        return Terms(edges, logp, _fill(values.to(logp.dtype), logp), True)
    given = read_per_token(other, forest, name)[edges.raw_index]
    check_finite(given, name, needed)
    given = given.where(edges.row_weight != 0, torch.nan)
    agreed = _agreed(given, edges)
    if agreed is not None:
        return Terms(edges, logp, _fill(agreed.to(logp.dtype), logp), True)
    spread = logp[edges.edge_of_entry]
    return Terms(edges, spread, _fill(given.to(logp.dtype), spread), False)


def _agreed(given: Tensor, edges: Edges) -> Tensor | None:
    """Return float64 [E], the value that all rows of an edge gave; None if they differ.

    An edge without a value gets NaN.
    """
    is_set = given.isfinite()
    low = torch.segment_reduce(given.where(is_set, torch.inf), "min", offsets=edges.row_offsets)
    high = torch.segment_reduce(given.where(is_set, -torch.inf), "max", offsets=edges.row_offsets)
    unset = low > high
    return low.where(~unset, torch.nan) if bool(((low == high) | unset).all()) else None


def _fill(values: Tensor, logp: Tensor) -> Tensor:
    return torch.where(values.isfinite(), values, logp.detach())
