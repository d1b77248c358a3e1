"""Plan a call: from its tensors to the trie of its rows, or to a reason for rows.

Rows that a compiled graph gets and rows that a converted model gets are planned here. Nothing is counted, compiled or
remembered.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from treefx.forests.forest import Forest
from treefx.forests.trie import Codes, Prefixes, build_trie, combine_keys, number_prefixes
from treefx.inputs.token_count import PackedSize
from treefx.kernels.memory import lasting, on_host, send
from treefx.kernels.score import Expr
from treefx.runtime.blocks import number_blocks
from treefx.runtime.origins import are_own
from treefx.runtime.padding import Grid
from treefx.runtime.reason import Cause, Reason
from treefx.runtime.segments import find_starts, has_gaps
from treefx.runtime.shapes import Shape

__all__ = [
    "Batch",
    "CallPlan",
    "Policy",
    "Unshared",
    "build_batch",
    "find_unshared",
    "forest_batch",
    "keys_of",
    "pad_batch",
    "plan_call",
    "shares_enough",
]

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
    by_column = keep is None and starts is None or not are_own([tensors[i] for i in shape.analysis.made_inputs])
    places = None if by_column else shape.padding.own_positions(grid, redundant)
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


_SMALLEST = 2
"""Compiled graphs are made for at least two tokens."""


@dataclass(frozen=True)
class Batch:
    """The distinct tokens of a call.

    ``metadata`` are the extra inputs of the rewritten graph: row [N] and column [N] int64, subtree_end [N] int32,
    token_of [B, T] int64 (-1 where a position was dropped). ``tokens`` is N without the filler behind them: copies of
    the first token, each a separate tree of one token. A copy has the values of the first token, which is a root. No
    position of a row names a copy, so its outputs are never read and its gradient is zero.
    """

    tokens: int
    metadata: tuple[Tensor, Tensor, Tensor, Tensor]
    own_positions: bool = False
    """Whether rows or segments start in different columns, and tokens are one all the same if their places agree."""
    prefixes: Prefixes | None = None
    """Of the N tokens, equal where those of different batches are; None for a forest given by the caller."""

    @property
    def size(self) -> int:
        """Length of the packed row that runs."""
        return len(self.metadata[0])


_Content = tuple[list[Tensor] | None, ...]
_MadeFor = tuple[PackedSize | None, torch.device]
"""Padded length of the packed row, and the device of its metadata."""
_recent: deque[tuple[_Content, _MadeFor, Batch]] = deque(maxlen=4)
_remembering = threading.Lock()


def build_batch(
    keys: Sequence[Tensor],
    keep: Tensor | None,
    places: Sequence[Tensor] | None = None,
    starts: Tensor | None = None,
    size: PackedSize | None = None,
    device: torch.device | None = None,
) -> Batch:
    """Build the trie over columns of the inputs that tell tokens apart.

    Calls of one step (policy and reference model, several graphs of one model) share the trie: it is looked up by
    content. Both are done on the host, which waits once for a tensor, and for none that a data loader has moved.

    Args:
        keys: [B, T] inputs; two positions are one token iff these agree on all kept columns up to theirs.
        keep: bool [B, T], False at padding to be dropped; None keeps all.
        places: [B, T] values that tell tokens apart in place of their columns, where rows without gaps start in
            different ones; None if only the same columns may share.
        starts: bool [B, T], where segments begin: these are then the rows, of which each keeps one run of columns.
        size: Padded length of the packed row; None for as few tokens as graphs are made for.
        device: Where the batch is wanted; None for that of the keys.
    """
    made_for = size, keys[0].device if device is None else device
    keys, places = list(map(on_host, keys)), None if places is None else list(map(on_host, places))
    keep, starts = None if keep is None else on_host(keep), None if starts is None else on_host(starts)
    content: _Content = keys, places, None if keep is None else [keep], None if starts is None else [starts]
    with _remembering:
        recent = list(_recent)
    for known, other, batch in reversed(recent):
        if other == made_for and all(map(_same, content, known)):
            return batch
    with lasting():
        batch = (
            _build(keys, keep, places, made_for)
            if starts is None
            else _build_segments([*keys, *(places or ())], keep, starts, made_for)
        )
        entry = (*[None if values is None else [*map(torch.clone, values)] for values in content],)
    with _remembering:
        _recent.append((entry, made_for, batch))
    return batch


def find_unshared(
    keys: Sequence[Tensor], keep: Tensor | None, places: Sequence[Tensor] | None = None
) -> Prefixes | None:
    """Return the prefixes if all rows begin with different tokens; no trie is needed then.

    The arguments are those of `build_batch`. None where two rows begin alike: they may share a prefix.
    """
    rows, width = keys[0].shape
    if not width:
        return None
    kept = None if keep is None else on_host(keep).numpy()
    if rows > 1 and _begin_alike(keys, kept):  # one row is not looked at: that would wait for a device
        return None
    tokens = rows * width if kept is None else int(kept.sum())
    copies = [x.clone() for x in keys], None if keep is None else keep.clone()
    own = None if places is None else [x.clone() for x in places]
    return Prefixes(tokens, lambda: _numbers(_build(*copies, own, (None, torch.device("cpu")))))


def _begin_alike(keys: Sequence[Tensor], kept: np.ndarray | None) -> bool:
    rows, width = keys[0].shape
    first = np.zeros(rows, dtype=np.int64) if kept is None else kept.argmax(1)
    at = np.arange(rows) if kept is None else np.flatnonzero(kept.any(1))
    heads = combine_keys([np.broadcast_to(x, (rows, width))[at, first[at]] for x in _arrays(keys)])
    return len(np.unique(heads)) < len(heads)


def _numbers(batch: Batch) -> Codes:
    assert batch.prefixes is not None
    return batch.prefixes.numbers


def _same(left: Sequence[Tensor] | None, right: Sequence[Tensor] | None) -> bool:
    if left is None or right is None:
        return left is right
    for a, b in zip(left, right, strict=False):
        if a.shape != b.shape or a.dtype != b.dtype or not torch.equal(a, b):
            return False
    return len(left) == len(right)


def _arrays(values: Sequence[Tensor]) -> list[np.ndarray]:
    return [(x.view(torch.int16) if x.dtype is torch.bfloat16 else x).numpy() for x in map(on_host, values)]


def _build(keys: Sequence[Tensor], keep: Tensor | None, places: Sequence[Tensor] | None, made_for: _MadeFor) -> Batch:
    columns, own = _arrays(keys), False
    rows, width = columns[0].shape
    kept = None if keep is None else on_host(keep).numpy()
    counts = None if kept is None else kept.sum(1)
    if kept is None or (kept[:, :-1] >= kept[:, 1:]).all():  # dropped positions stand at the ends of rows
        trie = build_trie(combine_keys(columns), counts)
        row, column, token_of = trie.row, trie.index, trie.token_of
        prefixes = number_prefixes(columns)
    else:
        order = np.argsort(~kept, axis=1, kind="stable")  # kept columns of each row, in order, then the dropped ones
        own = places is not None and _has_no_gaps(kept)
        columns += _arrays(places or ()) if own else []
        in_order = [np.take_along_axis(np.broadcast_to(x, (rows, width)), order, 1) for x in columns]
        trie = build_trie(combine_keys(in_order if own else [*in_order, order]), counts)
        row, column = trie.row, order[trie.row, trie.index]
        prefixes = number_prefixes(in_order, None if own else order)
        token_of = np.full((rows, width), -1, dtype=np.int64)
        token_of[kept] = trie.flat_token_of
    batch = _tensors(row, column, trie.subtree_end, token_of, made_for)
    return replace(batch, own_positions=own, prefixes=_known(prefixes[trie.row, trie.index]))


def _known(numbers: Codes) -> Prefixes:
    return Prefixes(len(numbers), lambda: numbers)


def _build_segments(keys: Sequence[Tensor], keep: Tensor | None, starts: Tensor, made_for: _MadeFor) -> Batch:
    """Build the trie with segments as rows; a token keeps one of its rows and columns."""
    columns, width = _arrays(keys), starts.shape[1]
    codes = combine_keys(columns).reshape(-1)
    places = np.arange(codes.size) if keep is None else np.flatnonzero(on_host(keep).numpy())
    segment = np.cumsum(on_host(starts).numpy().reshape(-1))[places]
    first = np.flatnonzero(np.diff(segment, prepend=0))
    trie = build_trie(np.split(codes[places], first[1:]))
    place = places[first[trie.row] + trie.index]
    token_of = np.full(codes.size, -1, dtype=np.int64)
    token_of[places] = trie.flat_token_of
    row, column = np.divmod(place, width)
    batch = _tensors(row, column, trie.subtree_end, token_of.reshape(starts.shape), made_for)
    prefixes = _prefixes_of_segments([np.broadcast_to(x, starts.shape).reshape(-1)[places] for x in columns], first)
    return replace(batch, own_positions=True, prefixes=_known(prefixes[first[trie.row] + trie.index]))


def _prefixes_of_segments(columns: Sequence[np.ndarray], first: np.ndarray) -> Codes:
    """Numbers of prefixes [places], as rows of their own would have them."""
    count = len(columns[0])
    segment = np.searchsorted(first, np.arange(count), side="right") - 1
    numbers = number_prefixes([x[None] for x in columns], (np.arange(count) - first[segment])[None])[0]
    before = np.concatenate([np.zeros(1, dtype=np.uint64), numbers])[first]
    own: Codes = numbers - before[segment]
    return own


def _has_no_gaps(kept: np.ndarray) -> bool:
    """Return whether every row keeps one run of columns."""
    starts = np.diff(kept.astype(np.int8), axis=1, prepend=0) == 1
    return bool((starts.sum(1) <= 1).all())


def _tensors(
    row: np.ndarray,
    column: np.ndarray,
    end: np.ndarray,
    token_of: np.ndarray,
    made_for: _MadeFor,
) -> Batch:
    (size, device), tokens = made_for, len(row)
    wanted = max(_SMALLEST, tokens)
    missing = (wanted if size is None else size(wanted, device)) - tokens
    if missing:
        row, column = (np.pad(x, (0, missing), constant_values=x[0] if tokens else 0) for x in (row, column))
        end = np.concatenate([end, np.arange(tokens + 1, tokens + missing + 1)])
    arrays = [row.astype(np.int64), column.astype(np.int64), end.astype(np.int32), token_of]
    first, second, third, fourth = [torch.from_numpy(np.ascontiguousarray(a)) for a in arrays]
    sent = send(first, device), send(second, device), send(third, device, keep=True), send(fourth, device, keep=True)
    return Batch(tokens, sent)


def pad_batch(batch: Batch, multiple: int) -> Batch:
    """Append padding tokens, which no query sees, so that ranks get equally many."""
    row, column, end, token_of = batch.metadata
    missing = -len(row) % multiple
    if not missing:
        return batch
    ends = torch.arange(len(row) + 1, len(row) + missing + 1, dtype=end.dtype, device=end.device)
    row, column = (torch.nn.functional.pad(x, (0, missing)) for x in (row, column))
    return replace(batch, metadata=(row, column, torch.cat([end, ends]), token_of))


def forest_batch(
    forest: Forest, device: torch.device, rows: int, columns: int, size: PackedSize | None = None
) -> Batch:
    """The metadata of the native level: the packed row of a forest is the only row.

    Nothing is expanded there, so ``token_of`` is unused. It has the ``rows`` and ``columns`` that the graph was
    compiled for: inductor checks the sizes of all inputs, in PyTorch 2.11 also of those without a use. ``size`` is that
    of ``build_batch``.
    """
    depth, end = forest.depth.cpu().numpy(), forest.subtree_end.cpu().numpy()
    unread = np.full((rows, columns), -1, dtype=np.int64)
    return _tensors(np.zeros(forest.num_tokens, dtype=np.int64), depth, end, unread, (size, device))


def keys_of(batch: Batch) -> Sequence[Tensor] | None:
    """Return the inputs of a trie, for the inspector; None for older tries."""
    with _remembering:
        return next((content[0] for content, _, known in _recent if known is batch), None)
