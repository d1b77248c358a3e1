"""Plan a call: from its tensors to the trie of its rows, or to a reason for rows.

Rows that a compiled graph gets and rows that a converted model gets are planned here. Nothing is counted, compiled or
remembered.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from treefx.forests.paths import Prefixes
from treefx.kernels.score import Expr
from treefx.passes.trace.token_count import PackedSize
from treefx.runtime.batch import Batch, build_batch, find_unshared, pad_batch
from treefx.runtime.blocks import number_blocks
from treefx.runtime.padding import Grid
from treefx.runtime.reason import Cause, Reason
from treefx.runtime.segments import find_starts, has_gaps
from treefx.runtime.shapes import Shape

__all__ = ["CallPlan", "Policy", "Unshared", "plan_call", "shares_enough"]

Keep = Callable[[Shape, Grid, Tensor | None], tuple[Tensor | None, Tensor | None]]
"""A shape, the grid of a call and bool [B, T] where its segments start -> bool [B, T] of the positions that others see,
and of those that have to run; None for all of them."""

_BLIND = Reason(Cause.VALUES, "a position that sees no key is read by the loss or the caller")
_NO_BLOCKS = Reason(Cause.VALUES, "queries see later keys, and those that see each other are no runs of a row's tokens")


@dataclass(frozen=True)
class Policy:
    """Decides about a call together with its inputs.

    Attributes:
        min_sharing: The least ratio of raw to distinct tokens at which a call runs packed.
        counted: Which are the raw ones: tokens under the mask, or all positions.
        keep: Which positions run.
        on_host: Whether all that is asked of a call is computed on the host.
        size: Gives the length that packed rows are filled up to; None leaves that to ``ranks``.
        ranks: How many share the tokens of a packed row out among them, equally many each.
    """

    min_sharing: float
    counted: Literal["tokens", "positions"]
    keep: Keep
    size: PackedSize | None = None
    ranks: int = 1
    on_host: bool = False


@dataclass(frozen=True)
class CallPlan:
    """The trie of a call.

    Attributes:
        grid: The tensors of the call, as padding is asked of them.
        tensors: The same, with the parts of masks.
        batch: The N distinct tokens, and the token of each position [B, T].
        redundant: The conditions of attentions that all tokens meet that run.
        seen: bool [B, T], the positions under the mask; None for all.
        raw_tokens: How many these are, of those that run.
        shares: Whether it has so few distinct tokens that running packed pays.
    """

    grid: Grid
    tensors: Sequence[Any]
    batch: Batch
    redundant: frozenset[Expr]
    seen: Tensor | None
    raw_tokens: int
    shares: bool


@dataclass(frozen=True)
class Unshared:
    """A call of tokens none of which is shared, as their first ones show: it has no trie."""

    raw_tokens: int
    prefixes: Prefixes


def shares_enough(raw: int, distinct: int, min_sharing: float) -> bool:
    """Whether ``raw`` tokens have so few ``distinct`` ones that running these alone pays."""
    return min_sharing <= 1.0 or raw >= min_sharing * distinct


def plan_call(shape: Shape, tensors: Sequence[Any], policy: Policy) -> CallPlan | Unshared | Reason:
    """The trie of a call's rows, or of its segments.

    Args:
        shape: The analysis of the call's graph, and its compiled code.
        tensors: The tensors of the call, rows [B, T], followed by the parts of its masks.
        policy: Which positions run, and how much sharing pays.

    Raises:
        IndexError: an id at a position that does not run is out of the range of its table.
    """
    grid = shape.grid(tensors, on_host=policy.on_host)
    starts = find_starts(shape.analysis, grid) if shape.analysis.segmented else None
    seen, keep = policy.keep(shape, grid, starts)
    if starts is not None and keep is not None and has_gaps(starts, keep):
        keep = None
    if not shape.padding.is_defined(grid, keep, starts):
        return _BLIND
    redundant = shape.padding.redundant(grid, keep)
    keys = shape.padding.identity(grid, redundant)
    places = None if keep is None and starts is None else shape.padding.own_positions(grid, redundant)
    for blocks in shape.analysis.blocks:
        numbers = number_blocks(blocks, grid, keep, [*keys, *(places or ())])
        if numbers is None:
            return _NO_BLOCKS
        keys.append(numbers)
    raw = grid.rows * grid.columns if seen is None or keep is None else int((seen & keep).sum())
    if policy.counted == "tokens" and policy.min_sharing > 1.0 and starts is None:
        prefixes = find_unshared(keys, keep, places)
        if prefixes is not None:
            return Unshared(raw, prefixes)
    batch = build_batch(keys, keep, places, starts, policy.size, grid.placed_on)
    batch = batch if policy.ranks == 1 else pad_batch(batch, policy.ranks)
    compared = raw if policy.counted == "tokens" else grid.rows * grid.columns
    shares = shares_enough(compared, batch.tokens, policy.min_sharing)
    if shares and keep is not None:
        shape.padding.check_lookups(grid)
    return CallPlan(grid, tensors, batch, redundant, seen, raw, shares)
