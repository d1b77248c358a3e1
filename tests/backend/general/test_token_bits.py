"""Numbers of tokens that stand for all bits of an input: equal where these are, and nowhere else."""

import itertools

import pytest
import torch
from torch import Tensor

from treefx.passes.labels.facts import Dims, plain_dims
from treefx.runtime import token_bits
from treefx.runtime.token_bits import OF_TOKENS, number_tokens


def dims_of(x: Tensor) -> Dims:
    return (*OF_TOKENS, *plain_dims(x.shape[2:]))


def assert_by_bits(x: Tensor, octets: Tensor) -> None:
    """Two tokens have one number iff their bytes [B, T, bytes] agree."""
    numbers = number_tokens(x, dims_of(x)).flatten().tolist()
    given = [bytes(token) for token in octets.reshape(len(numbers), -1).tolist()]
    for i, j in itertools.combinations(range(len(numbers)), 2):
        assert (numbers[i] == numbers[j]) == (given[i] == given[j]), (i, j)


def test_bits_of_floats() -> None:
    """Zeros of both signs and NaNs of other payloads differ; a NaN equals itself."""
    patterns = torch.tensor([0, -(2**31), 0x7FC00000, 0x7FC00001, 0x7FC00000, 0x3F800000], dtype=torch.int32)
    for repeat in (1, 3):
        x = patterns.view(2, 3, 1).expand(2, 3, repeat).contiguous()
        assert_by_bits(x.view(torch.float32), x.view(torch.uint8))


@pytest.mark.parametrize("width", [1, 3, 8, 13])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int64, torch.float8_e5m2, torch.bool])
def test_any_width(width: int, dtype: torch.dtype) -> None:
    x = torch.randint(0, 2, (4, 5, width), generator=torch.Generator().manual_seed(0)).to(dtype)
    assert_by_bits(x, x.view(torch.uint8))
    flat = torch.cat([x.flatten()[:1], x.flatten()])[1:].view(4, 5, width)  # which starts at any byte
    assert torch.equal(number_tokens(flat, dims_of(x)), number_tokens(x, dims_of(x)))


def test_conjugates_and_negatives() -> None:
    x = torch.randn(2, 3, 2, dtype=torch.complex64)
    assert torch.equal(number_tokens(x.conj(), dims_of(x)), number_tokens(x.conj().resolve_conj(), dims_of(x)))
    assert torch.equal(number_tokens(x.conj().imag, dims_of(x)), number_tokens((-x.imag).clone(), dims_of(x)))
    one = torch.randn(2, 3, dtype=torch.complex128)
    assert_by_bits(one, torch.view_as_real(one).view(torch.uint8))


@pytest.mark.parametrize("shape", [(2, 3, 0), (0, 3, 4), (2, 0, 4), (2, 3, 0, 4)])
def test_empty(shape: tuple[int, ...]) -> None:
    numbers = number_tokens(torch.zeros(shape), dims_of(torch.zeros(shape)))
    assert numbers.shape == shape[:2] and not numbers.any()


def test_planes() -> None:
    x = torch.randint(0, 2, (3, 4, 5))
    dims = (*plain_dims((3,)), *OF_TOKENS)
    front = x.movedim(0, -1).contiguous()
    assert torch.equal(number_tokens(x, dims), number_tokens(front, dims_of(front)))


def test_equal_hashes_of_unequal_tokens_are_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    attempts, hashes = [], token_bits._hashes

    def weak(words: Tensor, attempt: int) -> Tensor:
        attempts.append(attempt)
        return hashes(words, attempt) % 2 if attempt < 2 else hashes(words, attempt)

    monkeypatch.setattr(token_bits, "_hashes", weak)
    x = torch.randint(0, 3, (4, 5, 2))
    assert_by_bits(x, x.view(torch.uint8))
    assert attempts == [0, 1, 2]


def test_differences_in_the_highest_bits_alone() -> None:
    """Of the first factors nothing but the lowest bits then matters, and these meet often."""
    x = torch.randint(0, 256, (8, 32, 16, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    x[..., :7] = 0
    assert len(number_tokens(x, dims_of(x)).unique()) == len(x.flatten(0, 1).unique(dim=0))


def test_sums_on_a_device_are_those_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    words, factors = torch.randint(-(2**63), 2**63 - 1, (20, 7)), torch.randint(-(2**62), 2**62, (7,)) * 2 + 1
    monkeypatch.setattr(token_bits, "_CHUNK", 21)
    whole = [sum(a * b for a, b in zip(row, factors.tolist(), strict=True)) % 2**64 for row in words.tolist()]
    assert [n % 2**64 for n in token_bits._sums(words, factors).tolist()] == whole
