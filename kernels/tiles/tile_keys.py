"""Find the keys a group of queries sees: those all see, and those under a mask."""

from dataclasses import dataclass

import torch
from torch import Tensor

from treefx.kernels.common import Inputs, accumulation_dtype
from treefx.kernels.score import Expr, evaluate
from treefx.kernels.tiles.structure import Group, Ranges, indices_of, joined
from treefx.kernels.tiles.tile_bounds import Extrema, decide_tiles

__all__ = ["TileKeys", "evaluate_tile", "find_tile_keys", "to_tensor", "tree_condition"]

_KEY_BLOCK = 64
"""Keys along a path that a condition is decided for at once."""


@dataclass(frozen=True)
class TileKeys:
    """The keys that any query of a group sees.

    Attributes:
        full: keys that every query sees, int64 ``[F]``, in packed order.
        mixed: keys that some may not see, int64 ``[M]``, in packed order.
        seen: visibility of the mixed keys, bool, broadcasts to ``[B, H, Q, M]``.
    """

    full: Tensor
    mixed: Tensor
    seen: Tensor

    @property
    def all(self) -> Tensor:
        """Full keys, then mixed ones."""
        return torch.cat([self.full, self.mixed])

    def merged(self) -> "TileKeys":
        """Return the same keys, all of them as mixed."""
        ones = torch.ones(len(self.full), dtype=torch.bool).expand(*self.seen.shape[:-1], -1)
        return TileKeys(self.full[:0], self.all, torch.cat([ones, self.seen], dim=-1))


def find_tile_keys(inputs: Inputs, group: Group, visible: Expr | None) -> TileKeys:
    """Return the keys that a group sees under the tree condition and an extra one.

    The extra condition is decided for blocks of keys by the extrema of its inputs, and evaluated only for
    blocks that this leaves open.
    """
    shared = to_tensor(group.shared)
    rest = to_tensor(joined(group.partial, group.block))
    if visible is None:
        return TileKeys(shared, rest, tree_condition(inputs, group, rest))
    keys = torch.cat([shared, rest])
    nobody, everybody = _decided(inputs, group, visible, keys)
    everybody[len(shared) :] = False
    mixed = keys[~(nobody | everybody)]
    seen = tree_condition(inputs, group, mixed)
    if mixed.numel():
        seen = seen & evaluate_tile(visible, inputs, group, mixed).to(torch.bool)
    kept = seen.flatten(0, -2).any(dim=0)
    return TileKeys(keys[everybody], mixed[kept], seen[..., kept])


def evaluate_tile(
    expr: Expr, inputs: Inputs, group: Group, keys: Tensor, dot: Tensor | None = None, query: int | None = None
) -> Tensor:
    """Evaluate an expression for the queries of a group, or for one query, and the given keys."""
    first, last = (group.start, group.stop) if query is None else (query, query + 1)
    q, _, head, batch = inputs.indices(first, last)
    if dot is None:
        dot = torch.zeros((), dtype=accumulation_dtype(inputs.q))
    return evaluate(expr, dot=dot, q=q, k=keys[None, :], head=head, batch=batch, buffers=inputs.buffers)


def to_tensor(ranges: Ranges) -> Tensor:
    """Return the tokens of the ranges, int64."""
    return torch.from_numpy(indices_of(ranges))


def _decided(inputs: Inputs, group: Group, visible: Expr, keys: Tensor) -> tuple[Tensor, Tensor]:
    """Return the keys that a condition hides from all queries, or shows to all, bool ``[K]``."""
    rows = group.stop - group.start
    queries = Extrema("q", torch.arange(group.start, group.stop) + inputs.outside, rows, inputs.buffers)
    blocks = torch.arange(-(-len(keys) // _KEY_BLOCK))
    nobody, everybody = decide_tiles(
        visible, queries, Extrema("k", keys, _KEY_BLOCK, inputs.buffers), torch.zeros_like(blocks), blocks
    )
    block_of = torch.arange(len(keys)) // _KEY_BLOCK
    return nobody[block_of], everybody[block_of]


def tree_condition(inputs: Inputs, group: Group, keys: Tensor) -> Tensor:
    """Return whether each query of a group is a key's token or below it, bool ``[Q, K]``."""
    queries = torch.arange(group.start, group.stop)[:, None] + inputs.outside
    if inputs.boundary is None:
        return (keys[None, :] <= queries) & (queries < inputs.subtree_end[keys][None, :])
    first, end = inputs.intervals()
    return (first[keys][None, :] <= queries) & (queries < end[keys][None, :])
