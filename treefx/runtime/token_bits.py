"""Number tokens by all bits of an input: equal numbers iff equal bits.

An input ``[B, T, ...]`` or ``[k, B, T]`` (recorded expert routes, vectors, planes of positions) distinguishes tokens as
ids do. Each token's bits are hashed in one pass over memory, then tokens of equal hashes are compared bit by bit; after
a collision the hashes are recomputed with other factors.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from treefx.passes.labels.facts import Axis, Dims, Factor
from treefx.passes.labels.rows import tokens_in_front

__all__ = ["OF_TOKENS", "OWN_NUMBERS", "number_tokens"]

OWN_NUMBERS = {
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
    torch.float16, torch.bfloat16, torch.float32, torch.float64,
}  # fmt: skip
"""Types of values [B, T] that tries are built from."""
OF_TOKENS: Dims = ((Factor(Axis.ROW, -1),), (Factor(Axis.TOKEN, -1),))
"""The dimensions of values [B, T]."""
_FEW, _BITS_OF_FEW, _BITS = 1 << 18, 40, 63
"""Of so many tokens at most, numbers have so few bits: with ids they then make one code without another sort."""
_CHUNK = 1 << 22
"""Words that are compared or multiplied at a time."""


def number_tokens(x: Tensor, dims: Dims) -> Tensor:
    """Return values [B, T] that are equal iff the bits of an input's tokens are.

    For an input of one number per token, that number.

    0.0 and -0.0 differ, as do NaNs of other bits; an input without any number is equal at all tokens.

    Args:
        x: An input of any dtype.
        dims: Which of its dimensions are rows and columns.
    """
    front = tokens_in_front(x.detach(), dims)
    if front.dim() == 2 and front.dtype in OWN_NUMBERS:
        return front
    rows, columns = front.shape[:2]
    words = _words(front)
    if not words.numel():
        return torch.zeros(rows, columns, dtype=torch.int64, device=x.device)
    for attempt in itertools.count():
        numbers = _hashes(words, attempt)
        if _tell_all_apart(numbers, words):
            return numbers.reshape(rows, columns)
    raise AssertionError("unreachable")


def _words(front: Tensor) -> Tensor:
    """The bits of each token, int64 [B * T, W], filled up with zeros."""
    plain = front.resolve_conj().resolve_neg()
    plain = torch.view_as_real(plain) if plain.is_complex() else plain
    count = plain.shape[0] * plain.shape[1]
    values = plain.reshape(count, plain.numel() // max(count, 1)).contiguous()
    if not values.numel():
        return values.new_zeros(count, 0, dtype=torch.int64)
    octets = values.view(torch.uint8)
    missing = -octets.shape[1] % 8
    if missing:
        octets = torch.nn.functional.pad(octets, (0, missing))
    elif octets.storage_offset() % 8:
        octets = octets.clone()
    return octets.view(torch.int64)


def _hashes(words: Tensor, attempt: int) -> Tensor:
    """The upper bits of sums of words times odd random factors modulo 2^64, int64 [B * T].

    The first attempt multiplies the words themselves: tokens that differ in the uppermost bits of several words meet
    there once in some hundred. Later ones add the upper half of each word to its lower half before.
    """
    generator = torch.Generator().manual_seed(attempt)
    factors = torch.randint(-(2**62), 2**62, (words.shape[1],), generator=generator) * 2 + 1
    mixed = words if attempt == 0 else words ^ ((words >> 32) & 0xFFFFFFFF)
    if words.device.type == "cpu":
        sums = torch.from_numpy(np.einsum("ij,j->i", mixed.numpy(), factors.numpy()))
    else:
        sums = _sums(mixed, factors.to(words.device))
    bits = _BITS_OF_FEW if len(words) <= _FEW else _BITS
    return (sums >> (64 - bits)) & ((1 << bits) - 1)


def _sums(words: Tensor, factors: Tensor) -> Tensor:
    """Their products, on a device that has none of integer matrices."""
    return torch.cat([(part * factors).sum(1) for part in _parts(words, words)])


def _tell_all_apart(numbers: Tensor, words: Tensor) -> bool:
    """Whether tokens of equal numbers have equal bits."""
    _, group = torch.unique(numbers, return_inverse=True)
    places = torch.arange(len(numbers), device=numbers.device)
    first = torch.empty_like(places).scatter_(0, group, places)[group]  # one place of each group, the same for all
    others = (first != places).nonzero()[:, 0]
    pairs = zip(_parts(others, words), _parts(first[others], words), strict=True)
    return all(torch.equal(words[left], words[right]) for left, right in pairs)


def _parts(x: Tensor, words: Tensor) -> Sequence[Tensor]:
    """A value of all tokens in parts of as many as may be worked on at a time."""
    return torch.split(x, max(1, _CHUNK // max(1, words.shape[1])))
