"""Prove facts by values of inputs: positions that count up, 0/1 masks, equal vectors, masks [.., T, T].

A mask that is an input may differ from call to call, so its values prove nothing in advance. They are looked at in
every call: where each query sees the kept keys of its past, or those of them in a window or in its own document, the
mask is a function of two values [B, T], which tell tokens apart as other inputs do. Any other mask is read on rows.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from treefx.kernels.memory import is_on_device, is_small, on_host

__all__ = ["GivenMask", "InputValues", "input_values", "parts_of_mask", "prove_mask"]

_COMPARED = {
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
    torch.float16, torch.bfloat16, torch.float32, torch.float64,
}  # fmt: skip


class InputValues(NamedTuple):
    """Hold proofs from the values of inputs, for all calls that share an analysis.

    Fields hold positions of inputs.
    """

    consecutive: frozenset[int] = frozenset()
    """[B, T] or [1, T], counting up by one along each row, such as position ids."""
    binary: frozenset[int] = frozenset()
    """[B, T] or [1, T], zeros and ones alone, such as an attention mask."""
    zero: frozenset[int] = frozenset()
    """Those of them that are zero throughout, such as the types of tokens in a batch of text."""
    runs: frozenset[int] = frozenset()
    """[B, T] or [1, T], zeros and ones (or truths) of which each row has at most one run of ones; if asked for."""
    full: frozenset[int] = frozenset()
    """[1, T], ones alone; if asked for."""
    equal: tuple[tuple[int, int], ...] = ()
    """Vectors of integers, and an earlier one that holds the same; if asked for."""
    masks: tuple[GivenMask, ...] = ()
    """[.., T, T], causal and at most with hidden keys, a window or documents; their parts become inputs too."""
    tokens: frozenset[int] = frozenset()
    """[B, T, ...], vectors that another graph of the model made of tokens, by which these are told apart."""
    vectors: frozenset[int] = frozenset()
    """[n, ...], vectors of images that a tower made, with one number each by which they are told apart."""

    repeated: frozenset[int] = frozenset()
    """[B, T, D], truths of which each token has one, repeated over D: its stride is 0 there."""

    def with_parts(self, args: Sequence[Any]) -> list[Any]:
        """The inputs of a call, and behind them the parts of its masks."""
        return [*args, *[part for mask in self.masks for part in parts_of_mask(mask, args[mask.position])]]


def input_values(args: Sequence[Any], roles: Sequence[str], *, masks: bool = True, flash: bool = False) -> InputValues:
    """Read masks [.., T, T] of a call, and values that decide over ``flash`` attention."""
    widths = set()
    for x, role in zip(args, roles, strict=True):
        if role in ("input", "variable") and isinstance(x, Tensor) and x.dim() >= 2:
            widths.add(x.shape[1])  # behind a cut, of hidden states alone
    found, vectors, repeated = list[GivenMask](), list[tuple[int, Tensor]](), list[int]()
    tables = _Tables([], [], [], [], [])
    for i, given in enumerate(args):
        if roles[i] != "input" or not _is_readable(given):
            continue
        x, dims = _at_hand(given) if is_on_device(given) else given, given.dim()
        mask = prove_mask(i, x) if masks and dims >= 2 and x.shape[-1] in widths else None
        if mask is not None:
            found.append(mask)
        if dims == 2:
            _read_table(i, x, tables, flash=flash)
        elif dims == 1 and flash and not x.is_floating_point():
            vectors.append((i, x))
        elif dims == 3 and x.dtype is torch.bool and x.shape[2] > 1 and x.stride(2) == 0:
            repeated.append(i)
    equal = tuple(_equal(vectors)) if len(vectors) > 1 else ()
    consecutive, binary, zero, runs, full = map(frozenset, tables)
    return InputValues(consecutive, binary, zero, runs, full, equal, tuple(found), repeated=frozenset(repeated))


class _Tables(NamedTuple):
    """Positions of inputs [B, T], by what was proved of them: the first fields of ``InputValues``."""

    consecutive: list[int]
    binary: list[int]
    zero: list[int]
    runs: list[int]
    full: list[int]


def _read_table(position: int, x: Tensor, proved: _Tables, *, flash: bool) -> None:
    """Note what the values of an input [B, T] prove."""
    is_bool = x.dtype is torch.bool
    highest = None if is_bool else _bounds(x)
    if _counts_up(x):
        proved.consecutive.append(position)
    if highest is not None:
        proved.binary.append(position)
        if highest == 0 and not x.is_floating_point():
            proved.zero.append(position)
    if flash and (is_bool or highest is not None):
        if _is_one_run(x):
            proved.runs.append(position)
        if x.shape[0] == 1 and bool(x.all()):
            proved.full.append(position)


def _at_hand(x: Tensor) -> Tensor:
    """An input, or the host's copy of one whose numbers are few: small whole numbers and booleans."""
    return on_host(x) if x.dim() <= 2 and not x.is_floating_point() and is_small(x) else x


def _is_readable(x: Any) -> bool:
    """Return whether an input has values here, of a comparable dtype.

    Complex, packed and fake ones have not.
    """
    return isinstance(x, Tensor) and x.dtype in _COMPARED and x.device.type != "meta" and not isinstance(x, FakeTensor)


def _equal(vectors: Sequence[tuple[int, Tensor]]) -> Iterator[tuple[int, int]]:
    for n, (i, x) in enumerate(vectors):
        same = (j for j, y in vectors[:n] if x.dtype == y.dtype and x.device == y.device and torch.equal(x, y))
        yield from ((i, j) for j in itertools.islice(same, 1))


def _is_one_run(x: Tensor) -> bool:
    starts = torch.nn.functional.pad(x.to(torch.int8), (1, 0)).diff(dim=1) == 1
    return bool((starts.sum(1) <= 1).all())


def _bounds(x: Tensor) -> int | None:
    """Return the largest number of a table of zeros and ones, 0 if empty; else None.

    The host waits for a device once.
    """
    if not x.numel():
        return 0
    if x.dtype in (torch.int64, torch.int32):
        low, high = torch.stack(x.aminmax()).tolist()
        return int(high) if low >= 0 and high <= 1 else None
    proved = torch.stack([((x == 0) | (x == 1)).all(), (x != 0).any()]).tolist()
    return int(proved[1]) if proved[0] else None


def _counts_up(x: Tensor) -> bool:
    if x.is_floating_point() or x.dtype is torch.bool or x.shape[1] < 2:
        return False
    if x.device.type == "cpu" and len(x) and int(x[0, 1]) != int(x[0, 0]) + 1:  # most do not, which two numbers tell
        return False
    return bool((x == x[:, :1] + torch.arange(x.shape[1], device=x.device)).all())


@dataclass(frozen=True)
class GivenMask:
    """Describe a mask in values per key and per query.

    mask[b, .., q, k] is ``shown`` where k <= q, k is kept and not before q's start, else ``hidden``.

    ``position`` is that of the input. Starts are a ``window`` (number of keys, the query's own included), given by
    row and query (``has_starts``), or zero.
    """

    position: int
    hidden: bool | int | float
    shown: bool | int | float
    window: int | None = None
    has_starts: bool = False

    @property
    def count(self) -> int:
        """The number of ``parts_of_mask``."""
        return 2 if self.has_starts else 1


def parts_of_mask(known: GivenMask, mask: Tensor) -> list[Tensor]:
    """Return kept keys, bool [L, T], and starts, if any, int64 [L, T]; L is 1 or B."""
    visible = _first_of_heads(mask) != known.hidden
    return [visible.any(1), *([_starts(visible)] if known.has_starts else [])]


def prove_mask(position: int, mask: Tensor) -> GivenMask | None:
    """Return the proof from the values of one call, or None."""
    if mask.dim() < 2 or mask.shape[-1] != mask.shape[-2] or mask.shape[-1] < 2 or 0 in mask.shape:
        return None
    if mask.requires_grad or mask.is_complex() or not _is_same_for_heads(mask):
        return None
    first = _first_of_heads(mask)
    hidden, visible = first[0, 0, -1], first != first[0, 0, -1]
    shown = first[0, 0, 0] if bool(visible[0, 0, 0]) else first[visible][:1].sum()
    if not bool(visible.any()) or not bool((torch.where(visible, first, shown) == shown).all()):
        return None
    window, has_starts, found = _reach(visible)
    return GivenMask(position, hidden.item(), shown.item(), window, has_starts) if found else None


def _reach(visible: Tensor) -> tuple[int | None, bool, bool]:
    """(window, has starts, whether these and the kept keys make all of the mask)."""
    column = torch.arange(visible.shape[-1], device=visible.device)
    distance = column[:, None] - column
    seen = visible.any(1, keepdim=True) & (distance >= 0)
    if torch.equal(visible, seen):
        return None, False, True
    window = int(torch.where(visible, distance, 0).max()) + 1
    if torch.equal(visible, seen & (distance < window)):
        return window, False, True
    return None, True, torch.equal(visible, seen & (column >= _starts(visible)[..., None]))


def _starts(visible: Tensor) -> Tensor:
    """The first key that each query sees; behind all keys where it sees none."""
    return torch.where(visible.any(-1), visible.to(torch.int8).argmax(-1), visible.shape[-1])


def _first_of_heads(mask: Tensor) -> Tensor:
    """The mask as [L, T, T], L being its rows."""
    rows = mask.shape[0] if mask.dim() > 2 else 1
    return mask.detach().reshape(rows, -1, *mask.shape[-2:])[:, 0]


def _is_same_for_heads(mask: Tensor) -> bool:
    if mask.dim() < 4 or all(mask.shape[d] == 1 or mask.stride(d) == 0 for d in range(1, mask.dim() - 2)):
        return True
    heads = mask.detach().reshape(mask.shape[0], -1, *mask.shape[-2:])
    return bool((heads == heads[:, :1]).all())
