"""Find the role of each packed input in a linear recurrence, by shapes and numbers.

Every guess that the shapes allow is run, by the very operator that would replace the region, on one row of the random
numbers on which the region was run; constant factors are fitted. The one that agrees is then run on fresh numbers, in
the ranges that its parts have in models. Decays are so mild that the first token still matters at the last, and keys so
short that a state neither grows nor dies: every term of the recurrence shows in the result.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, fx

from treefx.passes.causal.scan_region import Region
from treefx.passes.causal.tree_mixers import Operand, TreeScan, Vanishing, scan
from treefx.passes.labels.facts import Axis, Dims, Factor, fact_of
from treefx.passes.labels.rows import rows_first, rows_in_order

__all__ = ["match"]

_EXACT = 1e-9
"""Largest relative difference, in float64, of two formulas that are the same."""
_FORMS = (
    ("q", "k", "v"), ("q", "k", "v", "g"), ("q", "k", "v", "w"), ("q", "k", "v", "step"), ("q", "k", "v", "g", "w"),
    ("q", "k", "v", "g", "step"), ("q", "k", "v", "decays"), ("q", "k", "v", "decays", "w"),
    ("q", "k", "v", "decays", "step"),
)  # fmt: skip
_SCALARS = {"g", "step"}
_READERS = {"q", "k", "w"}
_OF_KEYS = {*_READERS, "decays"}
"""They have as many features as the state has rows."""


@dataclass(frozen=True)
class _Sample:
    """Random inputs of a region as it reads them, and of one row [T, factors ...] each."""

    full: Mapping[fx.Node, Tensor]
    row: Mapping[fx.Node, Tensor]
    given: int
    """Rows: all, or one where the region can be run on one."""


def match(region: Region, rows: int, columns: int) -> TreeScan | Vanishing | None:
    """The recurrence that a region computes; None where it is none of those known.

    Args:
        region: Of a value that is proved causal, and the same function of every row.
        rows: B.
        columns: T.
    """
    generator = torch.Generator().manual_seed(0)
    given = 1 if region.has_rows else rows
    sample = _draw(region, given, columns, {}, generator)
    wanted = _wanted(region, sample, rows)
    if wanted is None:
        return None
    if not bool(wanted.any()):
        return Vanishing()
    for guess in _guesses(region):
        found = _fitted(guess, sample, wanted)
        if found is None:
            continue
        sample = _draw(region, given, columns, _ranges(found), generator)
        if _agrees(found, sample, _wanted(region, sample, rows)):
            return found
        return None
    return None


# Guesses --------------------------------------------------------------------------------------------------------------


def _guesses(region: Region) -> Iterator[TreeScan]:
    heads, features = _per_token(region.result)
    shape = math.prod(f.size for f in heads), math.prod(f.size for f in features)
    dtype = torch.float32
    for node in region.nodes:
        dtype = torch.promote_types(dtype, node.meta["val"].dtype)
    weights = [node for node in region.learned if node.meta["val"].numel() in (1, *shape, math.prod(shape))]
    if len(weights) != len(region.learned) or len(weights) > 1:
        return
    weight = weights[0] if weights else None
    for form in _FORMS:
        for roles in _assignments(form, region.packed, shape, weight is not None):
            yield TreeScan(roles, *shape, dtype, weight=weight, region=region.nodes)


def _assignments(
    form: tuple[str, ...], packed: tuple[fx.Node, ...], shape: tuple[int, int], skips: bool
) -> Iterator[dict[str, Operand]]:
    """Yield all assignments of inputs to roles; a skip connection may be the v."""
    own = (*form, "skip") if skips and len(packed) == len(form) + 1 else form
    if len(packed) != len(own):
        return
    for order in itertools.permutations(packed):
        roles = {role: _operand(role, node, shape) for role, node in zip(own, order, strict=True)}
        found = {role: operand for role, operand in roles.items() if operand is not None}
        if len(found) < len(own) or len({found[role].features for role in found.keys() & _OF_KEYS}) > 1:
            continue
        yield found if "skip" in own or not skips else {**found, "skip": found["v"]}


def _operand(role: str, node: fx.Node, shape: tuple[int, int]) -> Operand | None:
    """A packed input in a part, where its shape fits."""
    heads, features = _per_token(node)
    count, width = math.prod(f.size for f in heads), math.prod(f.size for f in features)
    if role in _SCALARS:
        return Operand(node, shape[0], 1) if count * width == shape[0] else None
    if role == "decays":
        return Operand(node, count, width) if count == shape[0] else None
    if role not in _READERS:
        return Operand(node, *shape) if (count, width) == shape else None
    if shape[0] % count:
        return None
    own = [f for f in heads if not f.repeated]
    trailing = heads[: len(own)] == own and not any(f.repeated for f in features)
    groups = math.prod(f.size for f in own) if trailing else count
    return Operand(node, groups, width, count // groups)


def _per_token(node: fx.Node) -> tuple[list[Factor], list[Factor]]:
    """Return the factors of a value [.., heads .., features] besides rows and tokens."""
    dims = fact_of(node).dims
    assert dims is not None
    plain = [[f for f in dim if f.axis is Axis.PLAIN] for dim in dims]
    kept = [own for own, dim in zip(plain, dims, strict=True) if len(own) == len(dim)]
    last = max((i for i, dim in enumerate(dims) if all(f.axis is Axis.PLAIN for f in dim)), default=-1)
    heads = [f for i, own in enumerate(plain) if i != last for f in own]
    return heads, kept[-1] if kept else []


# Numbers --------------------------------------------------------------------------------------------------------------


def _draw(
    region: Region, rows: int, columns: int, ranges: Mapping[fx.Node, tuple[float, float]], generator: torch.Generator
) -> _Sample:
    """Inputs of different rows; those in ``ranges`` are uniform."""
    full: dict[fx.Node, Tensor] = {}
    row: dict[fx.Node, Tensor] = {}
    for node in region.packed:
        dims = fact_of(node).dims
        assert dims is not None
        factors = [f for dim in dims for f in dim if f.axis is Axis.PLAIN]
        size = [rows, columns, *(1 if f.repeated else f.size for f in factors)]
        value = _random(size, dims, ranges.get(node), columns, generator).to(node.meta["val"].device)
        value = value.expand(rows, columns, *(f.size for f in factors))
        full[node], row[node] = rows_in_order(value, dims), value[-1]
    for node in region.learned:
        example = node.meta["val"]
        full[node] = torch.randn(example.shape, generator=generator, dtype=torch.float64).to(example.device)
    return _Sample(full, row, rows)


def _random(
    size: list[int], dims: Dims, limits: tuple[float, float] | None, columns: int, generator: torch.Generator
) -> Tensor:
    """Without limits: short vectors, or where there is one number per head, mild decays."""
    if limits is None and len(size) > 3:
        width = max(1, size[-1])
        length = float(columns) ** -0.25 * float(width) ** -0.5
        return torch.randn(size, generator=generator, dtype=torch.float64).mul_(length)
    low, high = (-3 / columns, -1 / columns) if limits is None else limits
    return low + (high - low) * torch.rand(size, generator=generator, dtype=torch.float64)


def _ranges(law: TreeScan) -> dict[fx.Node, tuple[float, float]]:
    """Where the parts of a recurrence lie in models."""
    ranges = {"g": (-3.0, -1.0), "decays": (-3.0, -1.0), "step": (0.2, 0.9)}
    found = {law.roles[role].source: limits for role, limits in ranges.items() if role in law.roles}
    return found


def _wanted(region: Region, sample: _Sample, rows: int) -> Tensor | None:
    """The region's result for the row, [T, heads * features]."""
    result, dims = region.run(sample.full, rows, sample.given), fact_of(region.result).dims
    assert dims is not None
    return None if result is None else rows_first(result, dims, sample.given)[-1].flatten(1)


def _terms(law: TreeScan, sample: _Sample) -> list[Tensor]:
    """Compute the skip term, if any, and the recurrence of the row.

    [T, heads * features] each, without factors.
    """
    values = {}
    for role, operand in law.roles.items():
        flat = sample.row[operand.source].reshape(-1, operand.groups, operand.repeats, operand.features)
        values[role] = flat[:, :, 0]
    columns = values["q"].shape[0]
    ends = torch.full((columns,), columns, dtype=torch.int32, device=values["q"].device)
    weight = None if law.weight is None else sample.full[law.weight]
    plain = scan(replace(law, factor=1.0, weight=None), values, None, ends)
    if weight is None:
        return [plain.flatten(1)]
    both = scan(replace(law, factor=1.0, skip_factor=1.0), values, weight, ends)
    return [plain.flatten(1), (both - plain).flatten(1)]


def _fitted(law: TreeScan, sample: _Sample, wanted: Tensor) -> TreeScan | None:
    """The guess with the factors that fit best, if they fit."""
    terms = torch.stack([term.flatten() for term in _terms(law, sample)], 1)
    if not bool(terms.any(0).all()):
        return None
    factors = torch.linalg.lstsq(terms, wanted.reshape(-1, 1)).solution.squeeze(1)
    if not _same((terms @ factors).reshape(wanted.shape), wanted):
        return None
    rounded = [_rounded(x) for x in factors.tolist()]
    return replace(law, factor=rounded[0], skip_factor=rounded[-1] if law.weight is not None else 0.0)


def _rounded(x: float) -> float:
    """A factor of one is one."""
    return 1.0 if abs(x - 1.0) < _EXACT else x


def _agrees(law: TreeScan, sample: _Sample, wanted: Tensor | None) -> bool:
    terms = _terms(law, sample)
    total = law.factor * terms[0] + (law.skip_factor * terms[1] if law.weight is not None else 0.0)
    return wanted is not None and _same(total, wanted)


def _same(found: Tensor, wanted: Tensor) -> bool:
    return bool((found - wanted).abs().max() <= _EXACT * wanted.abs().max())  # NaN is not the same
