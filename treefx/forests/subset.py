"""Some of a forest: the edges a loss over one part of a plan sees, or some of its rows."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from treefx.forests.edges import Edges
from treefx.forests.forest import Forest
from treefx.kernels.lasting import lasting_property

__all__ = ["EdgeSubset", "select_edges", "select_rows"]


@dataclass(frozen=True, eq=False, repr=False)
class EdgeSubset(Forest):
    """An uncut forest of which only some edges count, as a loss sees a part.

    Everything about rows is the uncut forest's, so that means over tokens or rows add up over the parts.

    Attributes:
        uncut: the forest itself.
        edge_index: int64 [E_p], the edges that count, as indices into those of the uncut forest.
        part_tokens: number of tokens of the running part, in rows and distinct; None where no part runs.
    """

    uncut: Forest
    edge_index: Tensor
    part_tokens: tuple[int, int] | None = dataclasses.field(default=None, kw_only=True)

    @lasting_property
    def edges(self) -> Edges:
        """The edges that count, ordered by target."""
        return select_edges(self.uncut.edges, self.edge_index)


def select_edges(edges: Edges, chosen: Tensor, **changes: Tensor) -> Edges:
    """Some edges, in order, with some of their columns changed."""
    along = ("source", "target", "token", "weight", "depth", "multiplicity", "first_rank")
    selected = {name: getattr(edges, name)[chosen] for name in along}
    return dataclasses.replace(edges, **{**selected, **changes})


def select_rows(forest: Forest, rows: Sequence[int]) -> Forest:
    """The forest of some rows, in the order given, with the weights they have."""
    offsets = forest.row_offsets.tolist()
    spans = [slice(offsets[row], offsets[row + 1]) for row in rows]
    return Forest.from_sequences(
        [forest.tokens[forest.flat_token_of[span]] for span in spans],
        weights=[forest.raw_weight[span] for span in spans],
    )
