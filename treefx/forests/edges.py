"""Edges of a forest: each (source token, target token) once, with the rows that take it."""

from dataclasses import dataclass

import torch

from treefx.kernels.memory import lasting_property

__all__ = ["Edges"]


@dataclass(frozen=True, eq=False, repr=False)
class Edges:
    """Hold the E predictions of a forest, ordered by target.

    Predicting token j is the edge parent(j) -> j.

    A fork token has one edge per child. The rows of edge e are `row_index[row_offsets[e]:row_offsets[e + 1]]`
    (compressed sparse rows); an *entry* is one (edge, row) pair, of which there are as many as raw
    predictions. Everything about entries is computed when first asked for: a plain sum needs none of it.

    Attributes:
        source: int64 [E], packed index of the token at which the model predicts.
        target: int64 [E], packed index of the token that is predicted.
        token: int64 [E], its token id.
        weight: float64 [E], the sum over the edge's rows of their weights of predicting it.
        depth: int32 [E], depth of the target.
        multiplicity: int64 [E], number of rows that take the edge.
        first_rank: int64 [E], rank in `row_order` of the first of them; the others follow it there.
        row_order: int64 [R], the forest's rows in lexicographic order.
        raw_offsets: int64 [R + 1], where each row begins among the raw tokens.
        raw_weight: float64 [raw], weight of predicting each raw token.
    """

    source: torch.Tensor
    target: torch.Tensor
    token: torch.Tensor
    weight: torch.Tensor
    depth: torch.Tensor
    multiplicity: torch.Tensor
    first_rank: torch.Tensor
    row_order: torch.Tensor
    raw_offsets: torch.Tensor
    raw_weight: torch.Tensor

    def __len__(self) -> int:
        return len(self.source)

    def __repr__(self) -> str:
        return f"Edges({len(self)} edges, {int(self.multiplicity.sum())} raw predictions)"

    @lasting_property
    def row_offsets(self) -> torch.Tensor:
        """int64 [E + 1]: where each edge's entries begin."""
        return torch.cat([self.multiplicity.new_zeros(1), self.multiplicity.cumsum(0)])

    @lasting_property
    def edge_of_entry(self) -> torch.Tensor:
        """int64 [entries]: the edge each entry belongs to."""
        return torch.repeat_interleave(self.multiplicity)

    @lasting_property
    def row_index(self) -> torch.Tensor:
        """int64 [entries]: the row of each entry."""
        shift = (self.first_rank - self.row_offsets[:-1])[self.edge_of_entry]
        return self.row_order[shift + torch.arange(len(shift), device=shift.device)]

    @lasting_property
    def raw_index(self) -> torch.Tensor:
        """Return int64 [entries]: the target as a raw token.

        Raw tokens count through the rows in the caller's order.
        """
        return self.raw_offsets[self.row_index] + self.depth[self.edge_of_entry]

    @lasting_property
    def row_weight(self) -> torch.Tensor:
        """Return float64 [entries]: the row's weight of the target; `weight` is its sum per edge."""
        return self.raw_weight[self.raw_index]

    @lasting_property
    def has_weight(self) -> torch.Tensor:
        """bool [E]: whether any of the edge's rows has a weight of predicting it that is not 0."""
        return self.sum_entries((self.row_weight != 0).to(self.row_weight.dtype)) > 0

    def sum_entries(self, values: torch.Tensor) -> torch.Tensor:
        """Sum [entries] values per edge into [E].

        Deterministic, because every edge's entries are contiguous.
        """
        return torch.segment_reduce(values, "sum", offsets=self.row_offsets, initial=0.0)
