"""Tile a tree mask with an extra condition or a bias, for scores linear in q.k.

A bias ``r(q) + c(k)`` (ALiBi, functions of the difference of two positions) needs no mask of
scores: the softmax of a row does not see ``r(q)``, which moves its log-sum-exp only, and ``c(k)`` is one row of
the mask for all queries of a tile. Both are taken relative to the group's middle query, because a sum loses the
digits that ``|r|`` is larger than the logit: groups are made so small that it stays below a bound.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from treefx.kernels.common import Inputs, accumulation_dtype
from treefx.kernels.cpu import rectangles as tiles
from treefx.kernels.cpu.rectangles import Tile, rows_per_tile
from treefx.kernels.score import Expr, evaluate
from treefx.kernels.tiles.structure import Group, Structure, ranges_of
from treefx.kernels.tiles.tile_keys import TileKeys, evaluate_tile, find_tile_keys

__all__ = ["ScoredTiles", "is_separable", "plan_scored_tiles"]

_ROW_CHOICES = (256, 128, 64, 32)
_MAX_ROW_TERM = {torch.float32: 64.0, torch.float64: 64.0}
_MAX_ROW_TERM_16_BIT = 256.0
"""Largest ``|r(q)|``: it costs its share of the accumulation type's digits, which 16-bit inputs never had."""
_MAX_ORIGIN = 1e6
_MIN_FITTING = 0.5
"""Share of the groups that must stay below the bound; the rest take masks."""
_MASK_ELEMENTS = 1 << 23
"""Elements of one tile's mask, where heads or batches differ."""


@dataclass(frozen=True)
class ScoredTiles:
    """How one attention with a condition or a bias is cut into tiles.

    Attributes:
        inputs: its tensors.
        groups: the groups of queries.
        split: the first queries of the groups whose masks hold ``c(k)`` alone.
        bias: term added to the scaled product, free of ``dot``.
        visible: the condition besides the tree's.
        row_terms: ``r(q)`` where the masks hold ``c(k)`` alone and 0 elsewhere, broadcasts to ``[B, H, N]``.
    """

    inputs: Inputs
    groups: tuple[Group, ...]
    split: frozenset[int]
    bias: Expr | None
    visible: Expr | None
    row_terms: Tensor | None = None

    def __iter__(self) -> Iterator[Tile]:
        for group in self.groups:
            keys = find_tile_keys(self.inputs, group, self.visible)
            if len(keys.full) <= tiles.UNSPLIT_KEYS and not self._is_causal(group, keys):
                keys = keys.merged()
            yield from self._group_tiles(group, keys)

    def _group_tiles(self, group: Group, keys: TileKeys) -> Iterator[Tile]:
        bias = self._bias(group, keys.all)
        parts = (None, None) if bias is None else torch.split(bias, [len(keys.full), len(keys.mixed)], dim=-1)
        if len(keys.full):
            yield _tile(group, keys.full, parts[0])
        if not len(keys.mixed):
            return
        row = parts[1]
        if self._is_causal(group, keys) and (row is None or (row.shape[-2] == 1 and not (row == -torch.inf).any())):
            yield Tile(group.start, group.stop, ranges_of(keys.mixed.numpy()), causal=True, mask=row)
            return
        added = torch.zeros((), dtype=accumulation_dtype(self.inputs.q)) if row is None else row
        yield _tile(group, keys.mixed, torch.where(keys.seen, added, -torch.inf))

    def _is_causal(self, group: Group, keys: TileKeys) -> bool:
        """Whether the mixed keys are the group's own, each seen by the queries from it on."""
        rows, first = group.stop - group.start, group.start + self.inputs.outside
        if not group.causal or keys.seen.ndim != 2 or len(keys.mixed) != rows or int(keys.mixed[0]) != first:
            return False
        return bool(keys.seen.sum() == rows * (rows + 1) // 2)  # never more than that: the tree condition

    def _bias(self, group: Group, keys: Tensor) -> Tensor | None:
        """The mask's bias, ``[..., 1, K]`` where rows share it, else ``[..., Q, K]``."""
        if self.bias is None:
            return None
        query = _middle(group) if group.start in self.split else None
        value = evaluate_tile(self.bias, self.inputs, group, keys, query=query).to(accumulation_dtype(self.inputs.q))
        rows = 1 if query is not None else group.stop - group.start
        return value.expand(*value.shape[:-2], rows, len(keys))


def plan_scored_tiles(inputs: Inputs, structure: Structure, bias: Expr | None, visible: Expr | None) -> ScoredTiles:
    """Choose the groups of queries, and whether the bias is split into row and key terms."""
    if bias is not None and is_separable(bias):
        bound = _MAX_ROW_TERM.get(inputs.q.dtype, _MAX_ROW_TERM_16_BIT)
        for rows in _ROW_CHOICES:
            groups = structure.groups(min(tiles.MIN_ROWS, rows), rows)
            terms = _row_terms(inputs, groups, bias)
            fitting = _fitting(groups, terms.abs() <= bound)  # NaN (of two infinities) fits no bound
            if fitting.mean() >= _MIN_FITTING:
                return _split(inputs, structure, groups, fitting, terms, bias, visible)
    wide = _needs_every_head(bias) or _needs_every_head(visible)
    rows = rows_per_tile(inputs, structure, _MASK_ELEMENTS) if wide else _ROW_CHOICES[0]
    groups = structure.groups(min(tiles.MIN_ROWS, rows), rows)
    return ScoredTiles(inputs, groups, frozenset(), bias, visible)


def _split(
    inputs: Inputs,
    structure: Structure,
    groups: tuple[Group, ...],
    fitting: npt.NDArray[np.bool_],
    terms: Tensor,
    bias: Expr,
    visible: Expr | None,
) -> ScoredTiles:
    """Take the bias of fitting groups from a row of the mask; cut the others for masks."""
    rows = rows_per_tile(inputs, structure, _MASK_ELEMENTS)
    pieces: list[Group] = []
    split: set[int] = set()
    terms = terms.clone()
    for group, fits in zip(groups, fitting.tolist(), strict=True):
        if fits:
            split.add(group.start)
            pieces.append(group)
            continue
        terms[..., group.start : group.stop] = 0.0
        stops = [*range(group.start + rows, group.stop, rows), group.stop]
        pieces += [structure.group(a, b) for a, b in zip([group.start, *stops], stops, strict=False)]
    return ScoredTiles(inputs, tuple(pieces), frozenset(split), bias, visible, terms)


def _fitting(groups: tuple[Group, ...], fits: Tensor) -> npt.NDArray[np.bool_]:
    """Return the groups all of whose rows fit, bool ``[groups]``."""
    rows = fits.reshape(-1, fits.shape[-1]).all(dim=0).numpy()
    return np.logical_and.reduceat(rows, [group.start for group in groups])


def _needs_every_head(expr: Expr | None) -> bool:
    """Whether a mask of the expression has a number per batch or head."""
    if expr is None:
        return False
    inner = (item for item in expr[1:] if isinstance(item, tuple))
    return expr[0] in ("head", "batch") or any(_needs_every_head(item) for item in inner)


def is_separable(expr: Expr) -> bool:
    """Return whether a ``dot``-free expression is provably ``r(q) + c(k)`` per head."""
    if len(_sides(expr)) <= 1:
        return True
    op, *arguments = expr
    if op in ("add", "sub"):
        return is_separable(arguments[0]) and is_separable(arguments[1])
    if op in ("neg", "float"):
        return is_separable(arguments[0])
    if op in ("mul", "div"):
        factors = [(arguments[0], arguments[1]), *([(arguments[1], arguments[0])] if op == "mul" else [])]
        return any(not _sides(factor) and is_separable(rest) for rest, factor in factors)
    return False


def _sides(expr: Expr) -> set[str]:
    if expr[0] in ("q", "k"):
        return {expr[0]}
    return {side for item in expr[1:] if isinstance(item, tuple) for side in _sides(item)}


def _row_terms(inputs: Inputs, groups: tuple[Group, ...], bias: Expr) -> Tensor:
    """Return ``bias(q, m) - bias(m, m)``, m the middle query of q's group.

    It broadcasts to ``[B, H, N]``.
    """
    counts = torch.tensor([group.stop - group.start for group in groups])
    middle = torch.tensor([_middle(group) for group in groups]).repeat_interleave(counts)[:, None] + inputs.outside
    q, _, head, batch = inputs.indices(0, inputs.q.shape[2])
    dtype = accumulation_dtype(inputs.q)
    dot = torch.zeros((), dtype=dtype)

    def at(query: Tensor) -> Tensor:
        value = evaluate(bias, dot=dot, q=query, k=middle, head=head, batch=batch, buffers=inputs.buffers)
        return value.to(dtype)

    origin = at(middle)
    # A masking constant absorbs summands, so no difference can be read from it.
    difference = (at(q) - origin).where(origin.abs() <= _MAX_ORIGIN, torch.nan)
    return difference.expand(*difference.shape[:-2], len(middle), 1).squeeze(-1)


def _middle(group: Group) -> int:
    return (group.start + group.stop) // 2


def _tile(group: Group, keys: Tensor, mask: Tensor | None) -> Tile:
    dead = None if mask is None else mask.amax(dim=-1) == -torch.inf
    return Tile(group.start, group.stop, ranges_of(keys.numpy()), mask=mask, dead=dead)
