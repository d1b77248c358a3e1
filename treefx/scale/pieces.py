"""Split one forest over ranks: the tokens of each rank and the ancestors it receives.

A token is computed once, on one rank, and attends to its ancestors wherever they are. Three ways to share the tokens
out, all in pieces of the packed order, so that subtrees stay together:

* *contiguous*: a range per rank, as even in cost as a bound on its tokens lets it be. Best where trees branch.
* *folded*: two ranges per rank, the i-th and the i-th from the end. Best for chains: their last tokens see most keys.
* *longest first*: the same pieces, the costliest first, each to the least loaded rank with room.

The one that receives least is taken among those that are even; how many tokens a rank holds counts too, since that is
its memory.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from treefx.errors import InputError
from treefx.forests.forest import Forest
from treefx.scale.outline import IntArray, Outline
from treefx.scale.price import Cost, FloatArray, price

__all__ = [
    "TokenSplit", "contiguous", "folded", "longest_piece_first", "needed", "preferred", "split_places", "split_tokens",
]  # fmt: skip

_MOST_TOKENS = 1.25
"""Of a rank, in units of the mean, where cost alone would give it more."""
_EVEN = 1.05
"""Splits this even are not balanced further at the price of more communication."""
_STEPS = 40
_NO_ROWS = Outline(*(np.zeros(0, dtype=np.int64),) * 3)


@dataclass(frozen=True, eq=False)
class TokenSplit:
    """Assign tokens to ranks, with the communication this takes.

    Attributes:
        tokens: per rank, int64 [n], its packed indices, ascending. A rank without tokens gets the first token, computed
            on its owner too: every rank takes part in all collectives.
        cost: float64 [ranks], predicted cost of each.
        received: int64 [ranks], number of tokens with keys and values sent to each rank, in every attention.
        way: "contiguous", "folded" or "longest first".
    """

    tokens: tuple[IntArray, ...]
    cost: FloatArray
    received: IntArray
    way: str

    @property
    def balance(self) -> float:
        """Return the busiest rank's cost over the mean, at least 1."""
        return float(self.cost.max() / self.cost.mean())

    @property
    def of_ring(self) -> float:
        """Tokens received over those that a ring passes to every rank, all others'."""
        ranks = len(self.tokens)
        ring = (ranks - 1) * sum(map(len, self.tokens))
        return float(self.received.sum()) / ring if ring else 0.0


def split_tokens(forest: Forest, ranks: int, cost: Cost = None) -> TokenSplit:
    """Split the tokens of one forest over ranks that run it together.

    Args:
        forest: all of it, the same on every rank.
        ranks: number of processes.
        cost: as for `treefx.scale.shard_rows`, and linear in tokens and pairs: the result of `treefx.profile`, a
            `CostModel` or `Seconds`; None: tokens.

    Returns:
        The chosen split: tokens, received tokens and cost per rank.

    Raises:
        InputError: `ranks` is no positive whole number, or the cost is a function of the whole.
    """
    depth, end = (x.cpu().numpy().astype(np.int64) for x in (forest.depth, forest.subtree_end))
    return preferred(split_places(depth, end, ranks, cost))


def split_places(depth: IntArray, end: IntArray, ranks: int, cost: Cost = None) -> list[TokenSplit]:
    """List every way to split tokens, given their depth and exclusive subtree end.

    Both are int64 [N].
    """
    if isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 1:
        raise InputError(f"ranks must be a whole number of at least 1, got {ranks!r}")
    linear = price(_NO_ROWS, cost).linear
    if linear is None:
        raise InputError(
            "sharing the tokens of one forest needs the cost of a token and of a pair: pass the result of "
            "treefx.profile, a CostModel or Seconds(part, token, pair), not a function of a rank's size"
        )
    costs: FloatArray = (linear[0] + linear[1] * (depth + 1.0)).astype(np.float64)
    busy = min(ranks, len(depth))
    idle = [np.zeros(1, dtype=np.int64)] * (ranks - busy)
    return [_measured([*tokens, *idle], costs, end, way) for way, tokens in _ways(costs, busy)]


def preferred(found: list[TokenSplit]) -> TokenSplit:
    """Of several ways the one that sends least, of those that are even in tokens and cost."""
    return min(found, key=_preference)


def _preference(found: TokenSplit) -> tuple[float, float, float]:
    sizes = [len(tokens) for tokens in found.tokens]
    crowded = max(max(sizes) * len(sizes) / sum(sizes), _MOST_TOKENS)
    return crowded, max(found.balance, _EVEN), found.of_ring


def _ways(costs: FloatArray, ranks: int) -> Iterator[tuple[str, list[IntArray]]]:
    yield "contiguous", contiguous(costs, ranks)
    if len(costs) >= 2 * ranks:
        yield "folded", folded(costs, ranks)
        yield "longest first", longest_piece_first(costs, ranks)


def _measured(tokens: list[IntArray], costs: FloatArray, end: IntArray, way: str) -> TokenSplit:
    sums = np.array([costs[own].sum() for own in tokens])
    received = np.array([len(needed(end, own)) for own in tokens], dtype=np.int64)
    return TokenSplit(tuple(tokens), sums, received, way)


def needed(end: IntArray, own: IntArray) -> IntArray:
    """Tokens that are not own and have own ones below them, ascending.

    Args:
        end: int64 [N], the exclusive end of every token's subtree.
        own: int64 [n], a rank's tokens.
    """
    inside = np.zeros(len(end), dtype=bool)
    inside[own] = True
    before = np.concatenate([[0], np.cumsum(inside)])
    return np.flatnonzero((before[end] > before[:-1]) & ~inside)


def contiguous(costs: FloatArray, ranks: int) -> list[IntArray]:
    """Give each rank a range, with the least possible largest cost.

    No rank holds more than `_MOST_TOKENS` times the mean number of tokens.
    """
    most = max(-(-len(costs) // ranks), int(_MOST_TOKENS * len(costs) / ranks))
    sums = np.concatenate([[0.0], np.cumsum(costs)])
    low, high = sums[-1] / ranks, float(sums[-1])
    ends = _fill(sums, high, most, ranks)
    for _ in range(_STEPS):
        middle = (low + high) / 2
        found = _fill(sums, middle, most, ranks)
        if found is None:
            low = middle
        else:
            high, ends = middle, found
    assert ends is not None, "ranges of equal length hold to the bound on tokens"
    return _ranges(ends)


def _fill(sums: FloatArray, bound: float, most: int, ranks: int) -> IntArray | None:
    """Return ends of ranges as long as both bounds allow; None if they do not reach the end.

    At least one token is left for each rank that follows.
    """
    count, ends = len(sums) - 1, [0]
    for rank in range(ranks):
        start, left = ends[-1], ranks - 1 - rank
        stop = int(np.searchsorted(sums, sums[start] + bound * (1 + 1e-9), side="right")) - 1
        ends.append(max(start + 1, min(stop, start + most, count - left)))
    return np.array(ends) if ends[-1] == count else None


def folded(costs: FloatArray, ranks: int) -> list[IntArray]:
    """Two ranges per rank of equally many tokens, the i-th and the i-th from the end."""
    pieces = _pieces(len(costs), 2 * ranks)
    return [np.concatenate([pieces[rank], pieces[-1 - rank]]) for rank in range(ranks)]


def longest_piece_first(costs: FloatArray, ranks: int) -> list[IntArray]:
    """The same ranges, two per rank, the costliest first to the rank that has least."""
    pieces = _pieces(len(costs), 2 * ranks)
    weights = np.array([costs[piece].sum() for piece in pieces])
    held: list[list[int]] = [[] for _ in range(ranks)]
    for number in np.argsort(-weights, kind="stable").tolist():
        free = (rank for rank in range(ranks) if len(held[rank]) < 2)
        held[min(free, key=lambda rank: weights[held[rank]].sum())].append(number)
    return [np.concatenate([pieces[number] for number in sorted(numbers)]) for numbers in held]


def _pieces(count: int, number: int) -> list[IntArray]:
    return _ranges(np.linspace(0, count, number + 1).round().astype(np.int64))


def _ranges(ends: npt.NDArray[np.int64]) -> list[IntArray]:
    return [np.arange(start, stop) for start, stop in zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True)]
