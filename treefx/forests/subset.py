"""A forest of which only some edges count: what a loss over one part of a plan sees."""

import dataclasses
from dataclasses import dataclass

from torch import Tensor

from treefx.forests.edges import Edges
from treefx.forests.forest import Forest
from treefx.kernels.lasting import lasting_property

__all__ = ["EdgeSubset", "select_edges"]


@dataclass(frozen=True, eq=False, repr=False)
class EdgeSubset(Forest):
    """An uncut forest of which only some edges count, as a loss sees a part.

    Everything about rows is the uncut forest's, so that means over tokens or rows add up over the parts.

    Attributes:
        uncut: the forest itself.
        edge_index: int64 [E_p], the edges that count, as indices into those of the uncut forest.
    """

    uncut: Forest
    edge_index: Tensor

    @lasting_property
    def edges(self) -> Edges:
        """The edges that count, ordered by target."""
        return select_edges(self.uncut.edges, self.edge_index)


def select_edges(edges: Edges, chosen: Tensor, **changes: Tensor) -> Edges:
    """Some edges, in order, with some of their columns changed."""
    along = ("source", "target", "token", "weight", "depth", "multiplicity", "first_rank")
    selected = {name: getattr(edges, name)[chosen] for name in along}
    return dataclasses.replace(edges, **{**selected, **changes})
