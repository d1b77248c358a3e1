"""Exchange tokens for heads between ranks of one forest: two operators, each the other's gradient.

A recurrence reads all tokens of a path, but each head on its own. So every rank gets all tokens of the forest for its
share of the heads, runs the recurrence on them, and returns the results to the ranks that hold the tokens:

============================  ========================  ========================
operator                      from                      to
============================  ========================  ========================
``treefx::tokens_to_heads``   own tokens, all heads     all tokens, own heads
``treefx::heads_to_tokens``   all tokens, own heads     own tokens, all heads
============================  ========================  ========================

Heads that the ranks cannot share equally are filled up with zeros. A head that several ranks read, because their heads
share its keys, goes to each; its gradients are summed in float32 (float64 for float64), rank by rank, so that two runs
agree to the bit. One message carries all values of an exchange, whatever their dtypes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from treefx.kernels.common import accumulation_dtype
from treefx.kernels.cuda_graphs import NOT_CAPTURED
from treefx.passes.cuts.exchange import all_to_all, processes_of

__all__ = ["Share", "heads_to_tokens", "share_of", "tokens_to_heads"]


class Share(NamedTuple):
    """How ranks share the groups of heads of one operand.

    Attributes:
        repeats: how often each group is repeated first, so that every rank's heads have whole groups.
        width: number of groups per rank, those of zeros included.
        starts: the first of each rank.
        size: number of all groups, repeated.
    """

    repeats: int
    width: int
    starts: list[int]
    size: int

    def range_of(self, rank: int) -> slice:
        """Return the groups of a rank; fewer than ``width`` where the others are zeros."""
        return slice(self.starts[rank], min(self.starts[rank] + self.width, self.size))


def share_of(groups: int, heads: int, ranks: int) -> Share:
    """Share groups of neighbouring heads: each rank has ``ceil(heads / ranks)`` heads."""
    share, per = -(-heads // ranks), heads // groups
    repeats = 1 if share % per == 0 or per % share == 0 else per
    per, size = per // repeats, groups * repeats
    return Share(repeats, max(1, share // per), [min(rank * share // per, size) for rank in range(ranks)], size)


@torch.library.custom_op("treefx::tokens_to_heads", mutates_args=(), tags=NOT_CAPTURED)
def tokens_to_heads(values: list[Tensor], place: Tensor, counts: Tensor, heads: int, group: str) -> list[Tensor]:
    """Give each rank all tokens of its heads.

    Args:
        values: of the own tokens, ``[N, G, ...]`` each; G divides the heads, and neighbouring heads share a group.
        place: int64 ``[M]``, the row of each token of the forest among those of all ranks, rank 0's first; past the
            end: zeros.
        counts: int64 ``[ranks]`` on the CPU, how many tokens each rank holds: the first of its N.
        heads: H.
        group: name of the process group.

    Returns:
        ``[M, G', ...]`` each, with the G' groups of ``ceil(H / ranks)`` heads.
    """
    held, ranks = counts.tolist(), len(counts)
    own = held[dist.get_rank(processes_of(group))]
    shares = [share_of(x.shape[1], heads, ranks) for x in values]
    pairs = [(_repeated(x[:own], share.repeats), share) for x, share in zip(values, shares, strict=True)]
    to_each = [[_filled(x[:, share.range_of(rank)], share.width) for x, share in pairs] for rank in range(ranks)]
    came = all_to_all(torch.cat(list(map(_as_bytes, to_each))), [own] * ranks, held, group)
    rows = torch.cat([came, came.new_zeros(len(place) - len(came), came.shape[1])])[place]
    return _from_bytes(rows, to_each[0])


@tokens_to_heads.register_fake
def _(values: list[Tensor], place: Tensor, counts: Tensor, heads: int, group: str) -> list[Tensor]:
    widths = [share_of(x.shape[1], heads, counts.shape[0]).width for x in values]
    return [x.new_empty(place.shape[0], width, *x.shape[2:]) for x, width in zip(values, widths, strict=True)]


@torch.library.custom_op("treefx::heads_to_tokens", mutates_args=(), tags=NOT_CAPTURED)
def heads_to_tokens(
    values: list[Tensor], groups: list[int], tokens: int, place: Tensor, counts: Tensor, heads: int, group: str,
    copies: bool,
) -> list[Tensor]:  # fmt: skip
    """Give each rank all heads of its tokens.

    Args:
        values: of the own heads, ``[M, G', ...]`` each.
        groups: G of each.
        tokens: N.
        place: see ``tokens_to_heads``, as counts, heads and group.
        copies: whether the tokens that a rank runs without holding them get the results of the first token; else zeros.

    Returns:
        ``[N, G, ...]`` each. Values of a group that several ranks have are summed.
    """
    held, ranks = counts.tolist(), len(counts)
    data = _as_bytes(values)
    ordered = torch.empty_like(data[: sum(held)])
    ordered[place[: len(ordered)]] = data[: len(ordered)]
    wanted = [max(1, count) if copies else count for count in held]
    pieces = [data[:1] if len(x) < count else x for x, count in zip(torch.split(ordered, held), wanted, strict=True)]
    own = wanted[dist.get_rank(processes_of(group))]
    came = all_to_all(torch.cat(pieces), wanted, [own] * ranks, group)
    parts = [_from_bytes(rows, values) for rows in came.view(ranks, own, came.shape[1])]
    shares = [share_of(number, heads, ranks) for number in groups]
    totals = [_summed(each, share) for each, share in zip(zip(*parts, strict=True), shares, strict=True)]
    return [_lengthened(x, tokens, copies) for x in totals]


@heads_to_tokens.register_fake
def _(
    values: list[Tensor], groups: list[int], tokens: int, place: Tensor, counts: Tensor, heads: int, group: str,
    copies: bool,
) -> list[Tensor]:  # fmt: skip
    return [x.new_empty(tokens, number, *x.shape[2:]) for x, number in zip(values, groups, strict=True)]


def _keep_heads(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    values, place, counts, ctx.heads, ctx.group = inputs
    ctx.save_for_backward(place, counts)
    ctx.groups, ctx.tokens = [x.shape[1] for x in values], values[0].shape[0]


def _of_heads(ctx: Any, grads: Sequence[Tensor]) -> tuple[Any, ...]:
    place, counts = ctx.saved_tensors
    given = (ctx.groups, ctx.tokens, place, counts, ctx.heads, ctx.group, False)
    return torch.ops.treefx.heads_to_tokens(list(grads), *given), None, None, None, None


def _keep_tokens(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    _, _, _, place, counts, ctx.heads, ctx.group, _ = inputs
    ctx.save_for_backward(place, counts)


def _of_tokens(ctx: Any, grads: Sequence[Tensor]) -> tuple[Any, ...]:
    place, counts = ctx.saved_tensors
    found = torch.ops.treefx.tokens_to_heads(list(grads), place, counts, ctx.heads, ctx.group)
    return found, None, None, None, None, None, None, None


tokens_to_heads.register_autograd(_of_heads, setup_context=_keep_heads)
heads_to_tokens.register_autograd(_of_tokens, setup_context=_keep_tokens)


def _repeated(x: Tensor, repeats: int) -> Tensor:
    return x if repeats == 1 else x.repeat_interleave(repeats, 1)


def _filled(x: Tensor, width: int) -> Tensor:
    """Add groups of zeros."""
    missing = width - x.shape[1]
    return x if not missing else torch.cat([x, x.new_zeros(x.shape[0], missing, *x.shape[2:])], 1)


def _summed(parts: Sequence[Tensor], share: Share) -> Tensor:
    """All groups ``[n, G, ...]``, of those that each rank has."""
    first = parts[0]
    total = first.new_zeros(first.shape[0], share.size, *first.shape[2:], dtype=accumulation_dtype(first))
    for rank, part in enumerate(parts):
        there = total[:, share.range_of(rank)]
        there += part[:, : there.shape[1]]
    whole: Tensor = (
        total.view(len(total), share.size // share.repeats, share.repeats, *first.shape[2:]).sum(2).to(first.dtype)
    )
    return whole


def _lengthened(x: Tensor, tokens: int, copies: bool) -> Tensor:
    """Add rows that no rank holds."""
    missing = tokens - len(x)
    more = x[:1].expand(missing, *x.shape[1:]) if copies else x.new_zeros(missing, *x.shape[1:])
    return torch.cat([x, more])


def _as_bytes(values: Sequence[Tensor]) -> Tensor:
    """Values ``[n, ...]`` each as one row of bytes per token."""
    return torch.cat([x.flatten(1).contiguous().view(torch.uint8) for x in values], 1)


def _from_bytes(rows: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Undo ``_as_bytes``; ``like`` has the dtypes and the shapes after the first dimension."""
    pieces = torch.split(rows, [math.prod(x.shape[1:]) * x.element_size() for x in like], 1)
    return [
        piece.clone(memory_format=torch.contiguous_format).view(x.dtype).view(len(rows), *x.shape[1:])
        for piece, x in zip(pieces, like, strict=True)
    ]
