"""Recurrences and convolutions of packed sequences, as operators on rows, against each sequence by itself."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from treefx.kernels.recurrence.row_scan import row_convolution, row_scan

LENGTHS = st.lists(st.integers(1, 9), min_size=1, max_size=5)


def leaves(*shapes: tuple[int, ...]) -> list[Tensor]:
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


def numbers_of(lengths: list[int]) -> Tensor:
    return torch.repeat_interleave(torch.tensor(lengths))[None]


def check(found: Tensor, expected: Tensor, given: list[Tensor]) -> None:
    weight = torch.randn_like(found)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    ours, theirs = (torch.autograd.grad((x * weight).sum(), given) for x in (found, expected))
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


@settings(max_examples=25, deadline=None)
@given(lengths=LENGTHS, delta=st.booleans())
def test_a_state_starts_over(lengths: list[int], delta: bool) -> None:
    columns = sum(lengths)
    q, k, v, g, step = leaves(*[(1, columns, 1, 3)] * 2, (1, columns, 2, 4), *[(1, columns, 2)] * 2)

    def along(*values: Any) -> Tensor:
        q, k, v, g, step, segments = values
        return row_scan(q, F.normalize(k, dim=-1), v, -g.square(), step.sigmoid() if delta else None, segments)

    given = [q, k, v, g, *([step] if delta else [])]
    parts = zip(*(x.split(lengths, 1) for x in (q, k, v, g, step)), strict=True)
    check(along(q, k, v, g, step, numbers_of(lengths)), torch.cat([along(*part, None) for part in parts], 1), given)


@settings(max_examples=25, deadline=None)
@given(lengths=LENGTHS, biased=st.booleans(), taps=st.integers(1, 4))
def test_a_window_starts_over(lengths: list[int], biased: bool, taps: int) -> None:
    x, weight, bias = leaves((1, 3, sum(lengths)), (3, 1, taps), (3,))
    found = row_convolution(x, weight, bias if biased else None, numbers_of(lengths))
    parts = [F.pad(part, (taps - 1, 0)) for part in x.split(lengths, 2)]
    expected = torch.cat([F.conv1d(part, weight, bias if biased else None, groups=3) for part in parts], 2)
    check(found, expected, [x, weight, *([bias] if biased else [])])


def test_rows_end_where_numbers_go_on() -> None:
    """Two rows of one sequence each that have the same number."""
    x, weight = leaves((2, 3, 4), (3, 1, 2))
    numbers = torch.zeros(2, 4, dtype=torch.int64)
    expected = torch.cat([row_convolution(row, weight, None, numbers[:1]) for row in x.split(1)])
    check(row_convolution(x, weight, None, numbers), expected, [x, weight])


def test_without_numbers_a_row_is_one_sequence() -> None:
    q, k, v, g = leaves(*[(1, 6, 1, 2)] * 3, (1, 6, 1))
    whole = row_scan(q, k, v, -g.square(), None)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(row_scan(q, k, v, -g.square(), None, numbers_of([3, 3])), whole)
    torch.testing.assert_close(row_scan(q, k, v, -g.square(), None, numbers_of([6])), whole)
