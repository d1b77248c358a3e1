"""Pass a part's row, with the keys, values and states at its cuts, to a compiled graph."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from treefx.forests.forest import Forest
from treefx.forests.subset import EdgeSubset, select_edges
from treefx.kernels.memory import send
from treefx.passes.cuts.boundary_kv import CutGraph, GivenBack, Ranks, Run, StandIn

__all__ = [
    "ContextRow", "Cut", "CutRow", "EdgeSubset", "Exchange", "PartRow", "PartTokens", "StateDoors", "WholeForest",
    "forest_as",
]  # fmt: skip

_SMALLEST = 2
"""Compiled graphs take sizes of at least two; smaller ones are padded with unseen tokens."""

Vectors: TypeAlias = tuple[Tensor, Tensor, Tensor, Tensor]
"""lo, hi int32 [P], the boundary's columns int64 [P], the outgoing tokens int64 [Q]; on the device."""


def forest_as(kind: type[Any], forest: Forest, **more: Any) -> Any:
    """`forest` as a subclass, with some fields changed and others added."""
    return kind(**{**{item.name: getattr(forest, item.name) for item in dataclasses.fields(Forest)}, **more})


class StateDoors(NamedTuple):
    """Say where states of recurrences enter a part and leave it; see ``kernels.recurrence.tree_chunks.Doors``.

    Attributes:
        given: S, how many states enter, filled up to a size of compiled graphs.
        entry: number of the state that each topmost token of the row starts from, S for zero, int64 [N'] on the CPU.
        exits: tokens of the row with states that leave, -1 for filler, int64 [X] on the CPU.
    """

    given: int
    entry: Tensor
    exits: Tensor


@dataclass(eq=False)
class Cut:
    """Hold the inputs and outputs at the cuts of one run of a part.

    Attributes:
        run: purpose of the run.
        vectors: tensors that describe the boundary and the outgoing tokens to the graph.
        doors: where states of recurrences enter and leave.
        gather: gives the boundary's K/V, [1, P, heads, width], for each fake one that the graph declares, then the
            states that enter, [1, S, heads, D, E], likewise.
        parents: gives int64 [N], [P] and [1]: parents of the own tokens and of the boundary's, as places in the own
            tokens followed by the boundary, N + P at roots; and that number.
        taken: gathered K/V and states; leaves that receive gradients if the run has any.
        handed: K/V of the outgoing tokens, [1, Q, heads, width] each, then states that leave, [1, X, heads, D, E].
        changes: inputs that the model changes in place (counters of steps), and their new values. All parts of a step
            read the old values, so the run keeps these.
    """

    run: Run
    vectors: Vectors
    doors: StateDoors
    gather: Callable[[Sequence[Tensor], Sequence[Tensor]], list[Tensor]]
    parents: Callable[[], list[Tensor]]
    taken: list[Tensor] = field(default_factory=list)
    handed: list[Tensor] = field(default_factory=list)
    changes: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """P and Q, then S and X, which graphs without recurrences do not have."""
        return len(self.vectors[0]), len(self.vectors[3]), self.doors.given, len(self.doors.exits)

    def call(self, run: Callable[..., Any], given: Sequence[Any], graph: CutGraph) -> Sequence[Any]:
        """Run a compiled graph with its boundary; return the results of the uncut graph."""
        self.taken = self.gather(graph.caches, graph.states)
        if self.run == "train":
            self.taken = [x.requires_grad_() for x in self.taken]
        parents = self.parents() if graph.reads_parents else ()
        device, sizes = self.vectors[0].device, self.sizes if graph.states else self.sizes[:2]
        doors = [send(x, device, keep=True) for x in (self.doors.entry, self.doors.exits)] if graph.states else ()
        with self._put_back([given[i] for i in graph.changed]):
            results = list(run(*given, *self.vectors, *parents, *doors, *self.taken, *sizes))
        split = len(results) - len(self.taken)
        self.handed = results[split:]
        if self.run != "kv":
            return results[:split]
        tokens = given[-1]
        inputs = {i: given[item.position] for i, item in enumerate(graph.results) if isinstance(item, GivenBack)}
        made = [item.make(tokens) if isinstance(item, StandIn) else item for item in graph.results]
        return [inputs.get(i, item) for i, item in enumerate(made)]

    @contextmanager
    def _put_back(self, changed: Sequence[Tensor]) -> Iterator[None]:
        before = [x.clone() for x in changed]
        try:
            yield
        finally:
            self.changes = [(x, x.clone()) for x in changed]
            with torch.no_grad():
                for x, value in zip(changed, before, strict=True):
                    x.copy_(value)


class WholeForest(NamedTuple):
    """Describe the whole forest to recurrences, which run on all its tokens; filled up to a size of compiled graphs.

    Attributes:
        end: subtree_end, int32 [M], on the device.
        place: int64 [M], on the device: see `treefx::tokens_to_heads`.
        counts: int64 [ranks], on the CPU: how many tokens each rank holds.
    """

    end: Tensor
    place: Tensor
    counts: Tensor


@dataclass(frozen=True, eq=False)
class Exchange:
    """Exchange K/V of one rank's part with the others in every attention.

    All ranks run at the same time.

    Attributes:
        run: the ranks.
        vectors: see `Cut`; the outgoing tokens are those sent, for rank 0 first.
        order: int64 [P], on the device: see `treefx::exchange`.
        counts: int64 [2, ranks], on the CPU: how many tokens each rank is sent and sends.
        parents: see `Cut`.
        whole: of the forest.
    """

    run: Ranks
    vectors: Vectors
    order: Tensor
    counts: Tensor
    parents: Callable[[], list[Tensor]]
    whole: WholeForest

    @property
    def sizes(self) -> tuple[int, int, int]:
        """P and Q, then M, which graphs without recurrences do not have."""
        return len(self.vectors[0]), len(self.vectors[3]), len(self.whole.end)

    def call(self, run: Callable[..., Any], given: Sequence[Any], graph: CutGraph) -> Sequence[Any]:
        """Run a compiled graph together with other ranks; return the uncut graph's results."""
        parents = self.parents() if graph.reads_parents else ()
        whole, sizes = (self.whole, self.sizes) if graph.reads_whole else ((), self.sizes[:2])
        results: Sequence[Any] = run(*given, *self.vectors, self.order, self.counts, *whole, *parents, *sizes)
        return results


@dataclass(frozen=True, eq=False, repr=False)
class CutRow(EdgeSubset):
    """Hold the packed row of some tokens, with their `tokens`, `depth` and `subtree_end`.

    Padding tokens behind them are seen by none of them (`PartTokens.sizes`).

    `edges` are those with a source among them, and the source is an index into the row.

    Attributes:
        cut: inputs and outputs at the cuts.
    """

    cut: Cut | Exchange

    @property
    def deepest(self) -> int:
        """Return the depth of the uncut forest's deepest token.

        Parts of one forest share their compiled code.
        """
        return self.uncut.deepest


@dataclass(frozen=True, eq=False, repr=False)
class PartRow(CutRow):
    """The packed row of one part of a plan."""

    cut: Cut


@dataclass(frozen=True, eq=False, repr=False)
class ContextRow(CutRow):
    """The packed row of the tokens that one rank runs of a forest that lies on several.

    Models run on it under ``treefx.use`` as on any forest, on all ranks at once; ``treefx.edge_logprobs`` and
    ``treefx.losses`` take it as one, and sum over the ranks to their values for the whole.
    """

    cut: Exchange


@dataclass(frozen=True, eq=False)
class PartTokens:
    """Hold the tokens of a part, its boundary, and its outgoing tokens.

    int64 on the CPU, packed indices.

    Attributes:
        forest: the uncut forest, on the model's device.
        host: the same on the CPU.
        own: [n], strictly ascending, at least one.
        outside: the boundary, ascending: ancestors of own tokens that are not own.
        leaving: own tokens with keys and values that other parts read, in the order of the outputs.
        ranks: how many share the tokens of the row out among them, equally many each.
        exits: own tokens that parts below hang on, ascending: their states leave.
    """

    forest: Forest
    host: Forest
    own: Tensor
    outside: Tensor
    leaving: Tensor
    ranks: int = 1
    exits: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))

    @cached_property
    def entries(self) -> Tensor:
        """Return the tokens of the boundary that own tokens hang on, int64, ascending: their states enter."""
        found: Tensor = torch.unique(self.host.parent[self._tops].to(torch.int64))
        return found

    @cached_property
    def _tops(self) -> Tensor:
        """Return the own tokens with a parent in the boundary."""
        above = self.host.parent[self.own].to(torch.int64)
        place = torch.searchsorted(self.own, above).clamp(max=len(self.own) - 1)
        tops: Tensor = self.own[(above >= 0) & (self.own[place] != above)]
        return tops

    def doors(self) -> StateDoors:
        """Return where states of recurrences enter and leave."""
        given = max(_SMALLEST, len(self.entries))
        entry = torch.full(self.sizes[:1], given)
        number = torch.searchsorted(self.entries, self.host.parent[self._tops].to(torch.int64))
        entry[torch.searchsorted(self.own, self._tops)] = number
        return StateDoors(given, entry, _padded(torch.searchsorted(self.own, self.exits), torch.full((1,), -1)))

    @property
    def sizes(self) -> tuple[int, int]:
        """Return the padded lengths N' and P of the row and of its boundary."""
        row = max(_SMALLEST * self.ranks, len(self.own))  # a rank's own tokens are a size of the graph too
        return row + -row % self.ranks, max(_SMALLEST, len(self.outside))

    def vectors(self) -> Vectors:
        """Return the tensors that describe the boundary and the outgoing tokens."""
        host, own, outside, nothing = self.host, self.own, self.outside, torch.zeros(1, dtype=torch.int64)
        lo = _padded(torch.searchsorted(own, outside), nothing).to(torch.int32)
        hi = _padded(torch.searchsorted(own, host.subtree_end[outside].to(torch.int64)), nothing).to(torch.int32)
        columns = _padded(host.depth[outside].to(torch.int64), nothing)
        leaves = _padded(torch.searchsorted(own, self.leaving), nothing)
        # Lists of tiles are made from the first two.
        lo, hi = (send(x, self.forest.device, keep=True) for x in (lo, hi))
        return lo, hi, send(columns, self.forest.device), send(leaves, self.forest.device)

    def parents(self) -> list[Tensor]:
        """`Cut.parents`, of N' and P tokens."""
        host, own, outside, total = self.host, self.own, self.outside, sum(self.sizes)
        nothing = torch.tensor([total])
        places = torch.full((host.num_tokens + 1,), total)  # the last is for the parent -1 of roots
        places[own] = torch.arange(len(own))
        places[outside] = self.sizes[0] + torch.arange(len(outside))
        found = [places[host.parent[tokens]] for tokens in (own, outside)]
        missing = [size - len(up) for up, size in zip(found, self.sizes, strict=True)]
        filled = [torch.cat([up, nothing.expand(more)]) for up, more in zip(found, missing, strict=True)]
        return [send(x, self.forest.device) for x in (*filled, nothing)]

    def row(self, chosen: Tensor, cut: Cut | Exchange | None) -> EdgeSubset:
        """Return the packed row, a `CutRow` where there is a cut.

        ``chosen`` are the edges with an own source, int64 on the CPU.
        """
        forest, host, own = self.forest, self.host, self.own
        device, more = forest.device, self.sizes[0] - len(own)
        depth = torch.cat([host.depth[own], host.depth.new_zeros(more)])
        end = torch.searchsorted(own, host.subtree_end[own].to(torch.int64))
        ends = torch.cat([end, torch.arange(len(own) + 1, len(own) + more + 1)])
        source = torch.searchsorted(own, host.edges.source[chosen])
        kind = EdgeSubset if cut is None else PartRow if isinstance(cut, Cut) else ContextRow
        tokens = forest.tokens[send(torch.cat([own, own[:1].expand(more)]), device)]
        ends = send(ends.to(torch.int32), device, keep=True)  # the forest of the row's lists of tiles
        own_fields = {"tokens": tokens, "depth": send(depth, device), "subtree_end": ends}
        given = {} if cut is None else {"cut": cut}
        counts = int(host.multiplicity[own].sum()), len(own)
        edges = {"edge_index": send(chosen, device), "part_tokens": counts}
        row: EdgeSubset = forest_as(kind, forest, uncut=forest, **edges, **own_fields, **given)
        row.__dict__["edges"] = select_edges(forest.edges, row.edge_index, source=send(source, device))
        return row


def _padded(values: Tensor, filler: Tensor) -> Tensor:
    missing = max(0, _SMALLEST - len(values))
    return torch.cat([values, filler.expand(missing)])
