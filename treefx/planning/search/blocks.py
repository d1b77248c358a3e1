"""Cut the forest into blocks: runs of tokens without a fork, of bounded length."""

from dataclasses import dataclass
from functools import cached_property
from itertools import starmap
from typing import Any

import numpy as np
import numpy.typing as npt

from treefx.forests.forest import Forest
from treefx.planning.cost.model import Size

__all__ = ["SHORTEST_BLOCK", "Blocks", "Counts", "IntArray", "above_sums"]

IntArray = npt.NDArray[np.int64]

SHORTEST_BLOCK = 4
"""Length in tokens of the shortest blocks, in forests of few tokens."""
_MOST_PIECES = 8_000
"""Most pieces of all runs: pieces and forks bound the work of planning, for any limit."""


def above_sums(end: IntArray, amount: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Sum an amount over the ancestors of each item of a tree in depth-first order.

    Args:
        end: int64 [K], exclusive end of the descendants of every item.
        amount: [K].
    """
    change = np.zeros(len(end) + 1, dtype=amount.dtype)
    change[1:] = amount
    np.subtract.at(change, end, amount)
    return np.cumsum(change)[:-1]


class Counts:
    """Sum over intervals of packed tokens, in constant time each.

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
        self._least = [self.depth[self.heads]]

    @property
    def shortest_block(self) -> int:
        """Return the length in tokens of the shortest blocks."""
        return max(SHORTEST_BLOCK, len(self.depth) // _MOST_PIECES)

    def size(self, start: int, stop: int, *, outgoing: int = 0) -> Size:
        """Measure a part of the tokens [start, stop), all below the first one's ancestors."""
        return Size(
            tokens=stop - start,
            boundary=int(self.depth[start]),
            edges=int(self.edges[stop] - self.edges[start]),
            outgoing=outgoing,
            pairs=int(self.pairs[stop] - self.pairs[start]),
        )

    def common_depth(self, first: IntArray, second: IntArray) -> IntArray:
        """Find the depth of the lowest common ancestor of tokens and later ones, [K].

        It is -1 without a common ancestor.

        Between them in packed order the tree goes up at heads only, and never above that ancestor's children.
        """
        low, high = (np.searchsorted(self.heads, side, side="right") for side in (first, second))
        level = np.log2(np.maximum(high - low, 1)).astype(np.int64)
        found = self.depth[first].copy()
        for power in np.unique(level[high > low]).tolist():
            chosen = np.flatnonzero((high > low) & (level == power))
            least = self._least_depths(power)
            both = np.minimum(least[low[chosen]], least[high[chosen] - (1 << power)])
            found[chosen] = np.minimum(found[chosen], both - 1)
        return found

    def _least_depths(self, power: int) -> IntArray:
        """Return the least depth of every 2 ** power consecutive heads."""
        while len(self._least) <= power:
            half, reach = self._least[-1], 1 << (len(self._least) - 1)
            self._least.append(np.minimum(half[:-reach], half[reach:]))
        return self._least[power]


@dataclass(frozen=True, eq=False)
class Blocks:
    """Hold runs of tokens without a fork, in packed order.

    In a run, each token but the first is the only child of the token before it. Children of a block hang on its last
    token, so a block is wholly inside or outside of any part.

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
        """Return the end of each block's subtree among the tokens, int64 [B]."""
        return self.counts.end[self.start]

    @cached_property
    def depth(self) -> IntArray:
        """Return the number of tokens above each block, int64 [B]."""
        return self.counts.depth[self.start]

    @cached_property
    def end(self) -> IntArray:
        """Return the exclusive end of each block's subtree among the blocks, int64 [B]."""
        result: IntArray = np.searchsorted(self.start, self.subtree_stop)
        return result

    def children(self, block: int) -> list[int]:
        """Return the blocks directly below a block, ascending."""
        return self.all_children[block]

    @cached_property
    def all_children(self) -> list[list[int]]:
        """Return the blocks directly below every block, ascending."""
        found: list[list[int]] = [[] for _ in range(len(self))]
        for block, parent in enumerate(self.parent.tolist()):
            if parent >= 0:
                found[parent].append(block)
        return found

    @cached_property
    def sizes(self) -> tuple[list[Size], list[Size]]:
        """Measure every block as a part with all tokens outgoing, and every subtree as a part."""
        own = self._sizes(self.stop, self.stop - self.start)
        return own, self._sizes(self.subtree_stop, np.zeros_like(self.start))

    def _sizes(self, stop: IntArray, outgoing: IntArray) -> list[Size]:
        sums = self.counts.edges, self.counts.pairs
        edges, pairs = (column[stop] - column[self.start] for column in sums)
        columns = (stop - self.start, self.depth, edges, outgoing, pairs)
        return list(starmap(Size, zip(*(column.tolist() for column in columns), strict=True)))

    @property
    def roots(self) -> list[int]:
        """Return the blocks without a parent."""
        found: list[int] = np.nonzero(self.parent < 0)[0].tolist()
        return found
