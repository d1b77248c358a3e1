"""Prove facts by values of inputs: positions that count up, 0/1 masks, equal vectors."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from treefx.kernels.memory import is_on_device, is_small, on_host
from treefx.passes.inputs.given_masks import GivenMask, parts_of_mask, prove_mask

__all__ = ["InputValues", "input_values"]

_COMPARED = {
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
    torch.float16, torch.bfloat16, torch.float32, torch.float64,
}  # fmt: skip


@dataclass(frozen=True)
class InputValues:
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
    readable = [(i, x) for i, x in enumerate(args) if roles[i] == "input" and _is_readable(x)]
    given = [(i, _at_hand(x) if is_on_device(x) else x) for i, x in readable]
    tables = [(i, x) for i, x in given if x.dim() == 2]
    widths = {x.shape[1] for _, x in tables}
    square = [(i, x) for i, x in given if masks and x.dim() >= 2 and x.shape[-1] in widths]
    found = [prove_mask(i, x) for i, x in square]
    bounds = {i: _bounds(x) for i, x in tables if x.dtype is not torch.bool}
    binary = frozenset([i for i, found in bounds.items() if found is not None])
    asked = [(i, x) for i, x in tables if flash and (i in binary or x.dtype is torch.bool)]
    repeated = []
    for i, x in given:  # no call more in a steady step
        if x.dtype is torch.bool and x.dim() == 3 and x.shape[2] > 1 and x.stride(2) == 0:
            repeated.append(i)  # noqa: PERF401
    return InputValues(
        frozenset([i for i, x in tables if _counts_up(x)]),
        binary,
        frozenset([i for i, x in tables if bounds.get(i) == 0 and not x.is_floating_point()]),
        frozenset([i for i, x in asked if _is_one_run(x)]),
        frozenset([i for i, x in asked if x.shape[0] == 1 and bool(x.all())]),
        tuple(_equal([(i, x) for i, x in given if flash and x.dim() == 1 and not x.is_floating_point()])),
        (*[mask for mask in found if mask is not None],),
        repeated=frozenset(repeated),
    )


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
