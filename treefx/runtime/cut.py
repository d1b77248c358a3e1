"""The row of one part, and what crosses its cuts, as a call of a compiled graph takes and hands it out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from treefx.forests.subset import EdgeSubset
from treefx.passes.cuts.boundary_kv import CutGraph, Run, StandIn

__all__ = ["Cut", "EdgeSubset", "PartRow"]


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
