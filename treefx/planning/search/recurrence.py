"""Cut a large forest with the fewest seconds of recomputation that fit.

Dynamic programming over blocks.

See `treefx.planning.search.planner` for the mathematics.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from treefx.planning.cost.model import CostModel
from treefx.planning.search.blocks import Blocks
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
        hold: h(v, mode), bytes of the block while its children run.
        price: c(v, mode), seconds that keeping less costs.
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
            # Out and back, and into every part below, of which there is at most one per block.
            below = np.searchsorted(blocks.start, blocks.subtree_stop) - np.arange(len(blocks))
            price["offload"] = again + store * below / cost.host_bytes_per_second
        return cls(whole=cost.run_bytes_of(all_tokens, depth, all_edges), own=own, hold=hold, price=price)


def choose_modes(blocks: Blocks, needs: Needs, budget: float) -> list[Draft] | None:
    """Solve f(v, H) for all blocks that matter, and read the parts off the solution.

    Args:
        blocks: of the forest.
        needs: of the blocks.
        budget: bytes that parts may use.

    Returns:
        The topmost parts: whole subtrees where they fit, single blocks above them. None where, with held bytes rounded
        up to the table's steps, nothing fits.
    """
    if budget <= 0:
        return None
    is_open = _open_blocks(blocks, needs, budget)
    steps = int(np.clip(_TABLE_ENTRIES // max(int(is_open.sum()), 1), _FEWEST_STEPS, _MOST_STEPS))
    unit = budget / steps
    rises = {mode: np.ceil(hold / unit - 1e-9).astype(np.int64) for mode, hold in needs.hold.items()}
    names: list[Keep] = list(rises)
    chosen = _solve(blocks, needs, budget, is_open, steps, rises)
    if chosen is None:
        return None

    def decide(block: int, held: float) -> tuple[Keep | None, float]:
        if not is_open[block] or held * unit + needs.whole[block] <= budget:
            return None, held
        mode = names[chosen[block][int(held)]]
        return mode, held + int(rises[mode][block])

    return _build(blocks, decide)


def recompute_everything(blocks: Blocks, needs: Needs, budget: float) -> list[Draft] | None:
    """Return the plan that holds least: every block above fitting subtrees keeps the minimum.

    Returns:
        The topmost parts, or None where even that does not fit: then nothing does with these blocks.
    """
    least: Keep = "offload" if "offload" in needs.hold else "recompute"
    fits = True

    def decide(block: int, held: float) -> tuple[Keep | None, float]:
        nonlocal fits
        if held + needs.whole[block] <= budget:
            return None, held
        fits = fits and bool(held + needs.own[least][block] <= budget)
        return least, held + float(needs.hold[least][block])

    drafts = _build(blocks, decide)
    return drafts if fits else None


def _open_blocks(blocks: Blocks, needs: Needs, budget: float) -> npt.NDArray[np.bool_]:
    """Return blocks with a decision: their subtree does not fit if all ancestors keep all."""
    is_open = np.zeros(len(blocks), dtype=np.bool_)
    waiting = [(block, 0.0) for block in blocks.roots]
    while waiting:
        block, above = waiting.pop()
        if above + needs.whole[block] > budget:
            is_open[block] = True
            below = above + float(needs.hold["keep"][block])
            waiting += [(child, below) for child in blocks.children(block)]
    return is_open


def _solve(
    blocks: Blocks,
    needs: Needs,
    budget: float,
    is_open: npt.NDArray[np.bool_],
    steps: int,
    rises: dict[Keep, npt.NDArray[np.int64]],
) -> dict[int, npt.NDArray[np.int8]] | None:
    """Find the best mode of every open block per number of held steps; None if none fits.

    A mode is its place in `rises`.
    """
    held = np.arange(steps + 1) * (budget / steps)
    below: dict[int, FloatArray] = {}
    chosen: dict[int, npt.NDArray[np.int8]] = {}
    nothing = np.zeros(steps + 1)
    for block in np.nonzero(is_open)[0].tolist()[::-1]:
        children = below.pop(block, nothing)
        choices = np.full((len(rises), steps + 1), np.inf)
        for row, mode in zip(choices, rises, strict=True):
            rise = int(rises[mode][block])
            if rise <= steps:
                row[: steps + 1 - rise] = children[rise:] + needs.price[mode][block]
            row[held + needs.own[mode][block] > budget] = np.inf
        chosen[block] = choices.argmin(axis=0).astype(np.int8)
        value = choices.min(axis=0)
        value[held + needs.whole[block] <= budget] = 0.0
        parent = int(blocks.parent[block])
        if parent >= 0:
            below[parent] = below[parent] + value if parent in below else value
        elif not np.isfinite(value[0]):
            return None
    return chosen


def _build(blocks: Blocks, decide: Callable[[int, float], tuple[Keep | None, float]]) -> list[Draft]:
    """Walk down from the roots; `decide` returns how to cut below a block, given held bytes."""
    roots: list[Draft] = []
    waiting = [(block, 0.0, roots) for block in reversed(blocks.roots)]
    counts = blocks.counts
    while waiting:
        block, held, siblings = waiting.pop()
        mode, held_below = decide(block, held)
        start, stop = int(blocks.start[block]), int(blocks.stop[block])
        above = int(counts.parent[start])
        if mode is None:
            stop = int(blocks.subtree_stop[block])
            siblings.append(Draft([(start, stop)], counts.size(start, stop), above=above))
            continue
        draft = Draft([(start, stop)], counts.size(start, stop, outgoing=stop - start), mode, above)
        siblings.append(draft)
        waiting += [(child, held_below, draft.children) for child in reversed(blocks.children(block))]
    return roots
