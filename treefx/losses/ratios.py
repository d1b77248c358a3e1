"""Compute ratios of the trained to the sampling policy's probabilities.

The unit is a token, a sequence or a group of tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from treefx.errors import ForestError, InputError
from treefx.forests.forest import Forest
from treefx.losses.reading import (
    PerEdge,
    check_weights,
    counted,
    read_entries,
    read_per_token,
    require_whole,
)
from treefx.losses.terms import Collect, align

__all__ = ["Groups", "Level", "Ratios", "compute_ratios", "read_groups"]

Level: TypeAlias = Literal["token", "sequence", "sequence_token"]
Groups: TypeAlias = Tensor | Sequence[int] | Sequence[Tensor]
"""[R] integers: rows with the same number are one sequence. Or per row a vector as long as the row: the row's tokens
with the same number are one sequence, as the tokens of one step."""


@dataclass(frozen=True, eq=False)
class Ratios:
    """Ratios [K], one per edge, per entry or per sequence.

    Attributes:
        log: log-ratios, with gradient; 0 where nothing needs them.
        seen: log-ratios for metrics, without gradient; 0 where they are not known.
        collect: sums the contributions of rows, [entries], into [K].
        weight: float64 [entries], the weight of an entry in a metric.
        logp: the log-probabilities of the K terms; None for one ratio per sequence.
    """

    log: Tensor
    seen: Tensor
    collect: Collect
    weight: Tensor
    logp: Tensor | None


def compute_ratios(
    logp: Tensor, forest: Forest, old_logp: PerEdge | None, level: Level, groups: Groups | None, needed: Tensor
) -> Ratios:
    """The ratios of a level, as `treefx.losses.clipped` describes them.

    Args:
        logp: [E].
        forest: the forest.
        old_logp: of the policy that sampled; None: the same policy.
        level: "token" or a level of sequences, as in `clipped`.
        groups: the sequence of each token; None: its row.
        needed: bool [entries], where the ratio counts.
    """
    weight = forest.edges.row_weight
    if level == "token":
        if groups is not None:
            raise InputError("groups say what a sequence is; use them with level='sequence' or 'sequence_token'")
        terms = align(logp, forest, old_logp, "old_logp", needed)
        seen = (terms.logp - terms.other).detach()
        return Ratios(terms.log_ratio(needed), seen, terms.collect, weight, terms.logp)
    if level not in ("sequence", "sequence_token"):
        raise InputError(f"level must be 'token', 'sequence' or 'sequence_token', got {level!r}")
    require_whole(forest, f"a ratio with level={level!r}")
    check_weights(forest, f"level={level!r}")
    terms = align(logp, forest, old_logp, "old_logp", weight != 0).spread()
    sequences = _Sequences(forest, groups)
    mean = sequences.mean(terms.log_ratio(weight != 0))
    mean, seen = torch.where(sequences.sum(needed.double()) > 0, mean, 0.0), mean.detach()
    if level == "sequence":
        shares = (weight / sequences.total[sequences.index]).where(weight != 0, 0.0)
        return Ratios(mean, seen, lambda entries: sequences.sum(entries).to(logp.dtype), shares, None)
    own = counted(terms.logp, weight != 0)
    log = mean.detach()[sequences.index] + (own - own.detach())
    return Ratios(log, seen[sequences.index], terms.collect, weight, terms.logp)


@dataclass(frozen=True, eq=False)
class _Sequences:
    """The entries of a forest, by sequence."""

    forest: Forest
    groups: Groups | None

    @cached_property
    def index(self) -> Tensor:
        """int64 [entries]: the sequence of each entry."""
        edges = self.forest.edges
        return edges.row_index if self.groups is None else read_groups(self.groups, self.forest)[edges.raw_index]

    @cached_property
    def _sorted(self) -> tuple[Tensor, Tensor]:
        """The entries, sequence by sequence, and where each of them begins."""
        sizes = torch.bincount(self.index)
        return self.index.argsort(stable=True), torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])

    def sum(self, entries: Tensor) -> Tensor:
        """Sum [entries] per sequence."""
        order, offsets = self._sorted
        return torch.segment_reduce(entries[order], "sum", offsets=offsets, initial=0.0)

    @cached_property
    def total(self) -> Tensor:
        """float64: the weight of each sequence."""
        return self.sum(self.forest.edges.row_weight)

    def mean(self, entries: Tensor) -> Tensor:
        """Weighted mean of [entries] per sequence, 0 for those without weight."""
        inverse = torch.where(self.total > 0, 1.0 / self.total, 0.0)
        share = self.forest.edges.row_weight * inverse[self.index]
        return self.sum(share.to(entries.dtype) * entries)


def read_groups(groups: Groups, forest: Forest) -> Tensor:
    """int64 [raw]: the group of every raw token, counting from 0."""
    given = [] if isinstance(groups, Tensor) else read_entries(groups, "groups")
    if (groups.ndim == 1) if isinstance(groups, Tensor) else all(isinstance(group, int) for group in given):
        numbers = torch.as_tensor(groups, device=forest.device)
        if numbers.shape != (len(forest),) or numbers.is_floating_point() or numbers.is_complex():
            got = f"{numbers.dtype} {list(numbers.shape)}"
            raise ForestError(f"groups must be one integer per row [{len(forest)}] or a vector per row, got {got}")
        found = torch.repeat_interleave(torch.unique(numbers, return_inverse=True)[1], forest.row_lengths)
    else:
        step = read_per_token(groups, forest, "groups", torch.int64)  # type: ignore[arg-type]
        row = torch.repeat_interleave(forest.row_lengths).to(step.dtype)
        found = torch.unique(torch.stack([row, step], 1), dim=0, return_inverse=True)[1]
    return found
