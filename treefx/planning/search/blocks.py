"""Cut the forest into blocks: runs of tokens without a fork, of bounded length."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from treefx.forests.forest import Forest
from treefx.planning.cost.model import Size

__all__ = ["SHORTEST_BLOCK", "Blocks", "Counts", "IntArray"]

IntArray = npt.NDArray[np.int64]

SHORTEST_BLOCK = 4
"""Tokens to which the planner cuts runs at the finest."""


class Counts:
    """Sums over intervals of packed tokens, in constant time each.

    Attributes:
        forest: the forest.
        depth, parent, end: its `depth`, `parent` and `subtree_end`, int64 [N].
        children: int64 [N], number of children of every token.
        heads: int64 [K], ascending, the tokens whose parent is not the token before them.
        runs: int64 [R], ascending, the tokens that are roots or have siblings: a run without a fork begins there.
        edges: int64 [N + 1], edges whose source is one of the first k tokens.
        pairs: int64 [N + 1], visible (query, key) pairs whose query is one of the first k tokens.
    """

    def __init__(self, forest: Forest) -> None:
        self.forest = forest
        self.depth = forest.depth.cpu().numpy().astype(np.int64)
        self.parent: IntArray = forest.parent.cpu().numpy()
        self.end = forest.subtree_end.cpu().numpy().astype(np.int64)
        self.children = np.bincount(self.parent[self.parent >= 0], minlength=len(self.parent))
        self.heads = np.flatnonzero(self.parent != np.arange(-1, len(self.parent) - 1))
        self.runs = np.flatnonzero((self.children[self.parent] != 1) | (self.parent < 0))
        self.edges = np.concatenate(([0], np.cumsum(self.children)))
        self.pairs = np.concatenate(([0], np.cumsum(self.depth + 1)))

    def size(self, start: int, stop: int, *, outgoing: int = 0) -> Size:
        """Size of a part of the tokens [start, stop), all below the first one's ancestors."""
        return Size(
            tokens=stop - start,
            boundary=int(self.depth[start]),
            edges=int(self.edges[stop] - self.edges[start]),
            outgoing=outgoing,
            pairs=int(self.pairs[stop] - self.pairs[start]),
        )


@dataclass(frozen=True, eq=False)
class Blocks:
    """Hold runs of tokens, each of which but the first follows its only-child parent.

    Runs are in packed order.

    Children of a block hang on its last token, so a block is wholly inside or outside of any part.

    Attributes:
        counts: of the forest.
        start, stop: int64 [B], the tokens [start, stop) of every block.
        parent: int64 [B], the block above; -1 at roots.
    """

    counts: Counts
    start: IntArray
    stop: IntArray
    parent: IntArray

    @classmethod
    def of(cls, counts: Counts, longest: int) -> "Blocks":
        """Cut the forest at every fork, and runs evenly into pieces of at most `longest` tokens."""
        length = np.diff(np.append(counts.runs, len(counts.parent)))
        pieces = -(-length // longest)
        run = np.repeat(np.arange(len(length)), pieces)
        place = np.arange(len(run)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
        start = counts.runs[run] + place * length[run] // pieces[run]
        above = counts.parent[start]
        block_above = np.searchsorted(start, above, side="right") - 1  # -1 above roots
        return cls(counts, start, np.append(start[1:], len(counts.parent)), block_above)

    def __len__(self) -> int:
        return len(self.start)

    @cached_property
    def subtree_stop(self) -> IntArray:
        """int64 [B]: end of the block's subtree among the tokens."""
        return self.counts.end[self.start]

    @cached_property
    def depth(self) -> IntArray:
        """int64 [B]: tokens above the block."""
        return self.counts.depth[self.start]

    def children(self, block: int) -> list[int]:
        """Blocks directly below a block, ascending."""
        order, first = self._by_parent
        below: list[int] = order[first[block] : first[block + 1]].tolist()
        return below

    @cached_property
    def _by_parent(self) -> tuple[IntArray, IntArray]:
        """Blocks ordered by the block above, and where the children of each begin in that order."""
        order = np.argsort(self.parent, kind="stable")
        return order, np.searchsorted(self.parent[order], np.arange(len(self) + 1))

    @property
    def roots(self) -> list[int]:
        """Blocks without a parent."""
        found: list[int] = np.nonzero(self.parent < 0)[0].tolist()
        return found
