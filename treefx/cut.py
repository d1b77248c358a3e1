"""The row of one part, and what crosses its cuts, as a call of a compiled graph takes and hands it out."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from treefx.edges import Edges
from treefx.forest import Forest
from treefx.kernels.lasting import lasting_property
from treefx.passes.boundary_kv import CutGraph, Run, StandIn

__all__ = ["Cut", "EdgeSubset", "PartRow", "select_edges"]


@dataclass(eq=False)
class Cut:
    """What one run of a part takes and hands out at its cuts.

    Attributes:
        run: what it runs for.
        vectors: lo, hi int32 [P], the boundary's columns int64 [P], the outgoing tokens int64 [Q]; on the device.
        gather: gives the boundary's K/V, [1, P, heads, width], for each fake one that the graph declares.
        parents: gives int64 [N], [P] and [1]: parents of the own tokens and of the boundary's, as places in the own
            tokens followed by the boundary, N + P at roots; and that number.
        taken: what was gathered; leaves that receive gradients where the run has any.
        handed: K/V of the outgoing tokens, [1, Q, heads, width] each.
    """

    run: Run
    vectors: tuple[Tensor, Tensor, Tensor, Tensor]
    gather: Callable[[Sequence[Tensor]], list[Tensor]]
    parents: Callable[[], list[Tensor]]
    taken: list[Tensor] = field(default_factory=list)
    handed: list[Tensor] = field(default_factory=list)

    @property
    def sizes(self) -> tuple[int, int]:
        """P and Q."""
        return len(self.vectors[0]), len(self.vectors[3])

    def call(self, run: Callable[..., Any], given: Sequence[Any], graph: CutGraph) -> Sequence[Any]:
        """Run a compiled graph with its boundary on what the uncut graph is given; return what that would return."""
        self.taken = self.gather(graph.caches)
        if self.run == "train":
            self.taken = [x.requires_grad_() for x in self.taken]
        parents = self.parents() if graph.reads_parents else ()
        results = list(run(*given, *self.vectors, *parents, *self.taken, *self.sizes))
        split = len(results) - len(graph.caches)
        self.handed = results[split:]
        if self.run != "kv":
            return results[:split]
        tokens = given[-1]
        return [item.make(tokens) if isinstance(item, StandIn) else item for item in graph.results]


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


@dataclass(frozen=True, eq=False, repr=False)
class PartRow(EdgeSubset):
    """The packed row of one part: tokens, depth and subtree_end are the part's own, N' = max(n, 2) long.

    `edges` are those whose source runs in the part, with the source counted in its row.

    Attributes:
        cut: what the run takes and hands out.
    """

    cut: Cut

    @property
    def deepest(self) -> int:
        """Depth of the uncut forest's deepest token: parts of one forest share their compiled code."""
        return self.uncut.deepest


def select_edges(edges: Edges, chosen: Tensor, **changes: Tensor) -> Edges:
    """Some edges, in order, with some of their columns changed."""
    along = ("source", "target", "token", "weight", "depth", "multiplicity", "first_rank")
    selected = {name: getattr(edges, name)[chosen] for name in along}
    return dataclasses.replace(edges, **{**selected, **changes})
