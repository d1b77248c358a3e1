"""How a part's row is made, and the keys, values and states that cross its cuts.

K/V of outgoing tokens are kept once, with the part that owns them. A part gathers its boundary from all its ancestors,
and adds its gradients directly to each owner's accumulators, which hold float32 (float64 for
float64): nothing is relayed hop by hop, and children that share a cut add up without rounding to 16 bits in between.
States of recurrences cross in the same way, one per path that a cut crosses: a part gathers those of the tokens that
its topmost tokens hang on.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from treefx.forests.forest import Forest
from treefx.forests.subset import EdgeSubset
from treefx.kernels.common import accumulation_dtype
from treefx.passes.cuts.boundary_kv import Run
from treefx.planning.search.part import Part, boundary, edge_ids, outgoing
from treefx.runtime.cut import Cut, PartRow, PartTokens, forest_as

__all__ = ["Crossing", "Store", "all_edges", "edges_of", "make_row"]


@dataclass(frozen=True, eq=False)
class Crossing:
    """Tokens of a part's boundary that run in one ancestor.

    Attributes:
        owner: the ancestor's index.
        rows: their places in the part's boundary, ascending: a slice where they are consecutive, or int64.
        slots: their places among the owner's outgoing tokens, likewise.
        state_rows: places of the owner's states among those that enter, likewise; None where none does.
        state_slots: their places among the states that leave the owner.
    """

    owner: int
    rows: slice | Tensor
    slots: slice | Tensor
    state_rows: slice | Tensor | None = None
    state_slots: slice | Tensor | None = None

    def places(self, value: Tensor) -> tuple[slice | Tensor, slice | Tensor] | None:
        """Return the rows and slots of K/V [1, n, heads, width], or of states [1, n, heads, D, E]."""
        if value.dim() < _STATE_DIMS:
            return self.rows, self.slots
        return None if self.state_rows is None or self.state_slots is None else (self.state_rows, self.state_slots)


_STATE_DIMS = 5


class Store:
    """Hold K/V and states of parts whose descendants still run, and the gradients sent back to them.

    Args:
        forest: the uncut forest, on the device of the model.
        parts: its parts.
        ranks: how many share the tokens of a part's row out.
    """

    def __init__(self, forest: Forest, parts: Sequence[Part], ranks: int) -> None:
        self.forest, self.parts, self.ranks = forest, parts, ranks
        self.host = forest if forest.device.type == "cpu" else forest.to("cpu")
        self._owner = torch.full((forest.num_tokens,), -1, dtype=torch.int32)
        self._slot = torch.zeros(forest.num_tokens, dtype=torch.int32)
        for part in parts:
            self._owner[part.tokens] = part.index
        self._values: dict[int, list[Tensor]] = {}
        self._gradients: dict[int, list[Tensor]] = {}

    def leaving(self, part: Part) -> Tensor:
        """Return the outgoing tokens of a part, int64 [Q], in the order of a later `put`."""
        tokens = outgoing(self.host, part) if part.children else part.tokens[:0]
        self._slot[tokens] = torch.arange(len(tokens), dtype=torch.int32)
        return tokens

    def exits(self, part: Part) -> Tensor:
        """Return the tokens of a part that parts below hang on, int64 [X], ascending: the order of a later `put`."""
        return self._exits.get(part.index, part.tokens[:0])

    @cached_property
    def _exits(self) -> dict[int, Tensor]:
        """The tokens with a child in another part, by their own part: few, so they are listed, not marked in [N]."""
        found = []
        for part in self.parts:
            above = self.host.parent[part.tokens]
            above = above[above >= 0].to(torch.int64)
            found.append(above[self._owner[above] != part.index])
        above = torch.tensor(sorted(set(torch.cat(found).tolist())), dtype=torch.int64)
        owners = self._owner[above]
        return {owner: above[owners == owner] for owner in set(owners.tolist())}

    def put(self, part: Part, handed: Sequence[Tensor]) -> None:
        """Keep the outgoing K/V and states of a part for its descendants."""
        if part.children:
            self._values[part.index] = [x.detach() for x in handed]

    def drop(self, part: Part) -> None:
        """Free a part whose descendants are done."""
        self._values.pop(part.index, None)
        self._gradients.pop(part.index, None)

    def move(self, part: Part, device: torch.device | str) -> None:
        """Take K/V, states and gradients of a part to host memory, or back."""
        for held in (self._values, self._gradients):
            if part.index in held:
                held[part.index] = [x.to(device) for x in held[part.index]]

    def gradients(self, part: Part) -> list[Tensor] | None:
        """The gradients of a part's outgoing K/V and states from all its descendants; None where none came."""
        return self._gradients.get(part.index)

    def crossings(self, above: Tensor, entries: Tensor) -> list[Crossing]:
        """Where the tokens of a boundary run, the nearest owner last.

        Args:
            above: the boundary.
            entries: tokens among them whose states enter.
        """
        owners, owners_of_states = self._owner[above], self._owner[entries]
        found = []
        for owner in torch.unique(owners).tolist():
            rows = (owners == owner).nonzero().squeeze(1)
            places = self._places(rows, self._slot[above[rows]].to(torch.int64))
            rows = (owners_of_states == owner).nonzero().squeeze(1)
            if len(rows):
                places += self._places(rows, torch.searchsorted(self._exits[owner], entries[rows]))
            found.append(Crossing(owner, *places))
        return found

    def _places(self, rows: Tensor, slots: Tensor) -> tuple[slice | Tensor, ...]:
        """Return rows of a boundary and where their owner holds them."""
        device = self.forest.device
        return _slice_or_index(rows, device), _slice_or_index(slots, device)

    def gather(self, crossings: Sequence[Crossing], sizes: tuple[int, int], like: Sequence[Tensor]) -> list[Tensor]:
        """Gather the boundary's K/V, [1, P, heads, width] each, and states; padding rows are 0.

        Args:
            crossings: of the part.
            sizes: P, and S, how many states enter.
            like: fake K/V, then fake states.
        """
        device, taken = self.forest.device, []
        for number, fake in enumerate(like):
            size = sizes[fake.dim() >= _STATE_DIMS]
            found = [(item.owner, *places) for item in crossings if (places := item.places(fake)) is not None]
            pieces = [_take(self._values[owner][number], slots).to(device) for owner, _, slots in found]
            if _in_a_row([rows for _, rows, _ in found]) == size:
                taken.append(torch.cat(pieces, 1))
                continue
            target = torch.zeros(1, size, *fake.shape[2:], dtype=fake.dtype, device=device)
            for (_, rows, _), piece in zip(found, pieces, strict=True):
                target[:, rows] = piece
            taken.append(target)
        return taken

    def add_gradients(self, crossings: Sequence[Crossing], gradients: Sequence[Tensor | None]) -> None:
        """Add the gradients of gathered K/V and states to their owners' accumulators."""
        for item in crossings:
            values = self._values[item.owner]
            if item.owner not in self._gradients:
                self._gradients[item.owner] = [torch.zeros_like(x, dtype=accumulation_dtype(x)) for x in values]
            for total, gradient in zip(self._gradients[item.owner], gradients, strict=True):
                places = None if gradient is None else item.places(gradient)
                if gradient is None or places is None:
                    continue
                rows, slots = places
                piece = _take(gradient, rows).to(total.device)
                if isinstance(slots, slice):
                    total[:, slots] += piece
                else:
                    total.index_add_(1, slots.to(total.device), piece.to(total.dtype))


def _slice_or_index(index: Tensor, device: torch.device) -> slice | Tensor:
    """Ascending distinct places, as a slice where they are consecutive."""
    first, last = int(index[0]), int(index[-1])
    return slice(first, last + 1) if last - first + 1 == len(index) else index.to(device)


def _in_a_row(places: Sequence[slice | Tensor]) -> int:
    """The length of a boundary that these fill one after the other; -1 if they do not."""
    reached = 0
    for rows in places:
        if not isinstance(rows, slice) or rows.start != reached:
            return -1
        reached = rows.stop
    return reached


def _take(values: Tensor, places: slice | Tensor) -> Tensor:
    return values[:, places] if isinstance(places, slice) else values.index_select(1, places.to(values.device))


def make_row(store: Store, part: Part, run: Run) -> tuple[PartRow, list[Crossing]]:
    """The packed row that a part runs on, and where its boundary comes from.

    Args:
        store: the forest, its parts and their K/V.
        part: the part.
        run: purpose of the run.
    """
    outside = boundary(store.host, store.parts, part)
    leaving, exits = store.leaving(part), store.exits(part)
    tokens = PartTokens(store.forest, store.host, part.tokens, outside, leaving, store.ranks, exits)
    crossings, doors = store.crossings(outside, tokens.entries), tokens.doors()

    def gather(caches: Sequence[Tensor], states: Sequence[Tensor]) -> list[Tensor]:
        return store.gather(crossings, (tokens.sizes[1], doors.given), [*caches, *states])

    cut = Cut(run, tokens.vectors(), doors, gather, tokens.parents)
    row = tokens.row(edge_ids(store.host, part), cut)
    assert isinstance(row, PartRow)
    return row, crossings


def edges_of(row: PartRow) -> EdgeSubset:
    """Return the forest for a loss over a part: the uncut forest with these edges alone."""
    subset: EdgeSubset = forest_as(EdgeSubset, row.uncut, uncut=row.uncut, edge_index=row.edge_index)
    # All but the sources are the row's, and are there once.
    subset.__dict__["edges"] = dataclasses.replace(row.edges, source=row.uncut.edges.source[row.edge_index])
    return subset


def all_edges(forest: Forest) -> EdgeSubset:
    """An uncut forest as a loss sees it that is called on all edges at once."""
    everything = torch.arange(len(forest.edges), device=forest.device)
    subset: EdgeSubset = forest_as(EdgeSubset, forest, uncut=forest, edge_index=everything)
    return subset
