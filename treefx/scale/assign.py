"""``treefx.scale.shard_rows``: a forest per rank, the same answer on every rank."""

import dataclasses
from collections.abc import Sequence
from functools import cache
from typing import overload

import torch

from treefx.errors import InputError
from treefx.forests.forest import Forest
from treefx.forests.share import Share
from treefx.forests.subset import select_rows
from treefx.scale.outline import Outline
from treefx.scale.price import Cost
from treefx.scale.split import Split, split

__all__ = ["Assignment", "assign_rows", "rank_forest", "shard_rows"]


class Assignment(Sequence[Forest]):
    """Hold the forests of all ranks; each is built on first use.

    Attributes:
        forest: the whole.
        split: rows, tokens and predicted cost of every rank.
    """

    def __init__(self, forest: Forest, found: Split) -> None:
        self.forest, self.split = forest, found
        self._build = cache(self._make)

    def __len__(self) -> int:
        """Number of ranks."""
        return len(self.split.rows)

    @overload
    def __getitem__(self, rank: int) -> Forest: ...

    @overload
    def __getitem__(self, rank: slice) -> list[Forest]: ...

    def __getitem__(self, rank: int | slice) -> Forest | list[Forest]:
        """The forest of a rank."""
        ranks = range(len(self))[rank]
        return self._build(ranks) if isinstance(ranks, int) else [self._build(each) for each in ranks]

    def __repr__(self) -> str:
        found = self.split
        idle = sum(not len(rows) for rows in found.rows)
        return (
            f"Assignment({len(self.forest)} rows to {len(self)} ranks, busiest at {found.balance:.3f} of the lower "
            f"bound, {found.duplicated:.1%} of the tokens computed twice" + (f", {idle} ranks idle)" if idle else ")")
        )

    def _make(self, rank: int) -> Forest:
        return rank_forest(self.forest, self.split.rows[rank].tolist())


def rank_forest(forest: Forest, rows: list[int]) -> Forest:
    """Build the forest of some rows of a step, with the whole's denominators; see `assign`.

    Args:
        forest: all rows of the step.
        rows: ascending numbers of a rank's own; none: the shortest row with weight 0.
    """
    if rows:
        own = select_rows(forest, rows)
        return dataclasses.replace(own, share=_share(forest, rows, is_idle=False))
    rows = [int(forest.row_lengths.argmin())]
    own = Forest.from_sequences([forest.tokens[forest.token_of[rows[0]]]], weights=[0.0])
    return dataclasses.replace(own, share=_share(forest, rows, is_idle=True))


def _share(forest: Forest, rows: list[int], *, is_idle: bool) -> Share:
    """Describe rows as a share of the whole step, also where the forest is a share itself."""
    chosen = torch.tensor(rows, device=forest.device)
    above = forest.share
    if above is not None:
        return dataclasses.replace(above, rows=above.rows[chosen], is_idle=above.is_idle or is_idle)
    return Share(chosen, forest.row_weight, forest.row_has_weight, is_idle)


def shard_rows(forest: Forest, ranks: int, cost: Cost = None) -> Assignment:
    """Shard a forest over data-parallel ranks: evenly, with few prefixes on several ranks.

    Every row is on exactly one rank, so that edge weights, which sum over a rank's rows, count a shared prefix once
    however many ranks compute it. The means of `treefx.losses` divide by the whole's weights (`Forest.share`). So
    losses and gradients **sum** over the ranks to the whole's: with DDP, which divides by their number, multiply the
    loss by it; with FSDP2 use `set_gradient_divide_factor(1.0)` on every sharded module. Values per row may be given
    for all rows. A rank for which nothing is left gets the shortest row with weight 0, so that it takes part in every
    collective; `treefx.backward`, which has none in its parts, does not run it.

    Args:
        forest: all rows of the step, the same on every rank.
        ranks: number of processes.
        cost: balanced quantity: the result of `treefx.profile` or its cost model; a function of a rank's `Size`
            (`size.tokens`, `size.pairs`) that never falls with the size; None: tokens.

    Returns:
        A sequence of `ranks` forests, built when asked for. It depends on the arguments alone, so every rank may
        compute it and take its own.

    Raises:
        InputError: an argument of the wrong type or value.

    Example:
        >>> whole = treefx.Forest.from_sequences([[1, 2, 3], [1, 2, 4], [7, 8, 9]])
        >>> [len(own) for own in treefx.scale.shard_rows(whole, 2)]
        [2, 1]
    """
    if not isinstance(forest, Forest):
        kind = type(forest).__name__
        raise InputError(f"shard_rows expected a treefx.Forest, got {kind}; build it with from_sequences")
    return Assignment(forest, split(Outline.of_forest(forest), ranks, cost))


def assign_rows(outline: Outline, ranks: int, cost: Cost = None) -> Split:
    """Assign rows to ranks by lengths and hashes alone, if no process holds all rows.

    Args:
        outline: `Outline.of_fingerprints` of the fingerprints that ranks exchanged (`treefx.scale.fingerprint`).
        ranks: number of processes.
        cost: as for `assign`.

    Returns:
        Row numbers per rank and their cost.

    Raises:
        InputError: an argument of the wrong value.
    """
    return split(outline, ranks, cost)
