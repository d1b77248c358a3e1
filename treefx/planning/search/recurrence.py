"""Cut a large forest by dynamic programming over blocks, with the least recomputation.

See `treefx.planning.search.planner` for the mathematics.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from treefx.planning.cost.model import CostModel
from treefx.planning.search.blocks import Blocks, above_sums
from treefx.planning.search.draft import Draft
from treefx.planning.search.part import Keep

__all__ = ["Needs", "choose_modes", "recompute_everything"]

FloatArray = npt.NDArray[np.float64]

_TABLE_ENTRIES = 1 << 19
_FEWEST_STEPS, _MOST_STEPS = 64, 2048


@dataclass(frozen=True, eq=False)
class Needs:
    """Hold bytes and seconds of every block as a separate part, float64 [B] each.

    Attributes:
        whole: w(v), peak of the block and its whole subtree as one part.
        own: r(v, mode), peak of the block alone; its store counts where it has children.
        hold: h(v, mode), bytes that the block holds while its children run.
        price: c(v, mode), extra seconds of the modes that keep less.
    """

    whole: FloatArray
    own: dict[Keep, FloatArray]
    hold: dict[Keep, FloatArray]
    price: dict[Keep, FloatArray]

    @classmethod
    def of(cls, blocks: Blocks, cost: CostModel) -> "Needs":
        """Evaluate the cost model for all blocks at once."""
        counts, depth = blocks.counts, blocks.depth
        own_tokens, all_tokens = blocks.stop - blocks.start, blocks.subtree_stop - blocks.start
        own_edges = counts.edges[blocks.stop] - counts.edges[blocks.start]
        all_edges = counts.edges[blocks.subtree_stop] - counts.edges[blocks.start]
        pairs = counts.pairs[blocks.stop] - counts.pairs[blocks.start]
        outgoing = np.where(blocks.subtree_stop > blocks.stop, own_tokens, 0).astype(np.float64)
        store = cost.store_bytes_per_token * outgoing
        again: FloatArray = cost.kv_seconds.part + cost.kv_seconds.token * own_tokens + cost.kv_seconds.pair * pairs
        saved = cost.saved.of(own_tokens, depth, own_edges)
        alone = cost.run_bytes_of(own_tokens, depth, own_edges) + store
        twice = np.maximum(alone, cost.kv.of(own_tokens, depth, own_edges) + store)
        extra = {twice_made: cost.extra_run_bytes_per_token(twice_made) * outgoing for twice_made in (False, True)}
        own: dict[Keep, FloatArray] = {"keep": alone + extra[False], "recompute": twice + extra[True]}
        hold: dict[Keep, FloatArray] = {"keep": saved + store, "recompute": store}
        price: dict[Keep, FloatArray] = {"keep": np.zeros(len(blocks)), "recompute": again}
        if cost.host_bytes_per_second is not None:
            own["offload"], hold["offload"] = own["recompute"], np.zeros(len(blocks))
            # Copies to and from the host, and into every part below: at most one part per block.
            below = np.searchsorted(blocks.start, blocks.subtree_stop) - np.arange(len(blocks))
            price["offload"] = again + store * below / cost.host_bytes_per_second
        return cls(whole=cost.run_bytes_of(all_tokens, depth, all_edges), own=own, hold=hold, price=price)

    @property
    def least(self) -> Keep:
        """Return the mode that holds the least."""
        return "offload" if "offload" in self.hold else "recompute"

    def fit(self, blocks: Blocks, budget: float) -> bool:
        """Return True if these blocks have a plan: the plan that holds least is the test."""
        held = above_sums(blocks.end, self.hold[self.least])
        is_open = _open_blocks(blocks, self, budget, self.least)
        return not (held + self.own[self.least] > budget)[is_open].any()


def choose_modes(blocks: Blocks, needs: Needs, budget: float) -> list[Draft] | None:
    """Solve f(v, H) for all open blocks, and read the parts off the solution.

    Args:
        blocks: of the forest.
        needs: of the blocks.
        budget: bytes that parts may use.

    Returns:
        The topmost parts: whole subtrees where they fit, single blocks above them. None if no plan fits with
        held bytes rounded up to the table's steps.
    """
    if budget <= 0:
        return None
    is_open = _open_blocks(blocks, needs, budget, "keep")
    steps = int(np.clip(_TABLE_ENTRIES // max(int(is_open.sum()), 1), _FEWEST_STEPS, _MOST_STEPS))
    unit = budget / steps
    rises = {mode: np.ceil(hold / unit - 1e-9).astype(np.int64) for mode, hold in needs.hold.items()}
    names: list[Keep] = list(rises)
    chosen = _solve(blocks, needs, budget, is_open, steps, rises)
    if chosen is None:
        return None
    opened, number, whole = is_open.tolist(), (np.cumsum(is_open) - 1).tolist(), needs.whole.tolist()
    rise_of = {mode: rise.tolist() for mode, rise in rises.items()}

    def decide(block: int, held: float) -> tuple[Keep | None, float]:
        if not opened[block] or held * unit + whole[block] <= budget:
            return None, held
        mode = names[chosen[number[block], int(held)]]
        return mode, held + rise_of[mode][block]

    return _build(blocks, decide)


def recompute_everything(blocks: Blocks, needs: Needs, budget: float) -> list[Draft] | None:
    """Build the plan that holds least.

    Every block above the subtrees that fit whole has the mode that holds least.

    Returns:
        The topmost parts, or None if even that plan does not fit: then no plan of these blocks does.
    """
    if not needs.fit(blocks, budget):
        return None
    opened = _open_blocks(blocks, needs, budget, needs.least).tolist()
    return _build(blocks, lambda block, held: (needs.least if opened[block] else None, held))


def _open_blocks(blocks: Blocks, needs: Needs, budget: float, mode: Keep) -> npt.NDArray[np.bool_]:
    """Mark blocks that need a decision: whole subtrees that do not fit below such ancestors."""
    fits = above_sums(blocks.end, needs.hold[mode]) + needs.whole <= budget
    is_inside: npt.NDArray[np.bool_] = above_sums(blocks.end, fits.astype(np.int64)) > 0
    return ~fits & ~is_inside


# Long: one table after another.
def _solve(
    blocks: Blocks,
    needs: Needs,
    budget: float,
    is_open: npt.NDArray[np.bool_],
    steps: int,
    rises: dict[Keep, npt.NDArray[np.int64]],
) -> npt.NDArray[np.int8] | None:
    """Find the best mode of every open block per number of held steps, or None.

    Modes are places in `rises`. Blocks of equal depth are solved at once, the deepest first. Rows are the open blocks,
    in order.
    """
    held = np.arange(steps + 1) * (budget / steps)
    places = np.arange(steps + 1)
    number = np.cumsum(is_open) - 1
    opened = np.flatnonzero(is_open)
    below = np.zeros((len(opened), steps + 1))
    chosen = np.zeros((len(opened), steps + 1), dtype=np.int8)
    level = above_sums(blocks.end, np.ones(len(blocks), dtype=np.int64))[opened]
    order = np.argsort(-level, kind="stable")
    for rows in np.split(order, np.flatnonzero(np.diff(level[order])) + 1) if len(order) else []:
        block = opened[rows]
        value = np.full((len(rows), steps + 1), np.inf)
        for place, (mode, rise) in enumerate(rises.items()):
            after = places + rise[block, None]
            choice = np.take_along_axis(below[rows], np.minimum(after, steps), 1) + needs.price[mode][block, None]
            choice[(after > steps) | (held + needs.own[mode][block, None] > budget)] = np.inf
            better = choice < value
            chosen[rows] = np.where(better, place, chosen[rows])
            value = np.where(better, choice, value)
        value[held + needs.whole[block, None] <= budget] = 0.0
        parent = blocks.parent[block]
        if parent[0] < 0:
            return chosen if np.isfinite(value[:, 0]).all() else None
        first = np.flatnonzero(np.append(True, parent[1:] != parent[:-1]))
        below[number[parent[first]]] = np.add.reduceat(value, first)
    return chosen


def _build(blocks: Blocks, decide: Callable[[int, float], tuple[Keep | None, float]]) -> list[Draft]:
    """Build the parts from the roots down.

    `decide` maps a block and the steps held above it to a mode, or to None for the whole subtree as one part.
    """
    roots: list[Draft] = []
    waiting = [(block, 0.0, roots) for block in reversed(blocks.roots)]
    sizes, closed = blocks.sizes
    starts, stops, ends = blocks.start.tolist(), blocks.stop.tolist(), blocks.subtree_stop.tolist()
    above = blocks.counts.parent[blocks.start].tolist()
    below = blocks.all_children
    while waiting:
        block, held, siblings = waiting.pop()
        mode, held_below = decide(block, held)
        if mode is None:
            siblings.append(Draft([(starts[block], ends[block])], closed[block], above=above[block]))
            continue
        draft = Draft([(starts[block], stops[block])], sizes[block], mode, above[block])
        siblings.append(draft)
        if below[block]:
            waiting += [(child, held_below, draft.children) for child in reversed(below[block])]
    return roots
