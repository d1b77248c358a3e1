"""Batches of a fixed number of rows: every row once, and rows that share prefixes together."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, TensorDataset

from tests.strategies import Rows, row_batches
from treefx.data import PrefixSampler, cut_into_batches, distinct_tokens
from treefx.errors import InputError
from treefx.forests.forest import Forest


def groups(count: int, size: int, prompt: int = 40, tail: int = 4) -> Rows:
    """Rows of several prompts, shuffled."""
    random = np.random.default_rng(0)
    prompts = [[100 + number, *random.integers(0, 9, prompt - 1).tolist()] for number in range(count)]
    rows = [[*start, *random.integers(0, 9, tail).tolist()] for start in prompts for _ in range(size)]
    return [rows[i] for i in random.permutation(len(rows))]


@given(rows=row_batches(), size=st.integers(1, 6), epoch=st.integers(0, 2))
def test_every_row_once_in_full_batches(rows: Rows, size: int, epoch: int) -> None:
    sampler = PrefixSampler(rows, size)
    sampler.set_epoch(epoch)
    assert sorted(sampler) == list(range(len(rows))) and len(sampler) == len(rows)
    batches = cut_into_batches(sampler.forest, size, np.random.default_rng(epoch))
    assert all(len(batch) == size for batch in batches[:-1])
    assert 0 < len(batches[-1]) <= size


@pytest.mark.parametrize(("group", "size"), [(8, 8), (8, 4), (4, 8), (2, 8)])
def test_groups_that_fit_into_batches_are_never_split(group: int, size: int) -> None:
    rows = groups(8 if group < size else 3, group)
    forest = Forest.from_sequences(rows)
    order = list(PrefixSampler(rows, size))
    batches = [order[start : start + size] for start in range(0, len(order), size)]
    once_a_batch = forest.num_tokens + 40 * (max(1, group // size) - 1) * (len(rows) // group)
    assert distinct_tokens(forest, batches) <= once_a_batch + 4 * len(rows)
    at_random = np.random.default_rng(1).permutation(len(rows)).reshape(-1, size).tolist()
    assert distinct_tokens(forest, at_random) > 1.2 * distinct_tokens(forest, batches)


def test_rows_meet_where_they_have_most_in_common() -> None:
    """Two turns of one conversation go together before two conversations of one system prompt do."""
    system = [1, 2, 3]
    rows = [system + [c] + [turn] * 5 for turn in (7, 8) for c in (4, 5, 6)]
    batches = cut_into_batches(Forest.from_sequences(rows), 2, np.random.default_rng(0))
    assert sorted(sorted(batch) for batch in batches) == [[0, 3], [1, 4], [2, 5]]


def test_epochs_differ_and_ranks_agree() -> None:
    rows = groups(5, 4)
    first, second = PrefixSampler(rows, 4, seed=3), PrefixSampler(rows, 4, seed=3)
    assert list(first) == list(second)
    second.set_epoch(1)
    assert list(first) != list(second)


def test_a_loader_cuts_the_order_into_these_batches() -> None:
    rows = groups(4, 4)
    loader = DataLoader(TensorDataset(torch.tensor(rows)), batch_size=4, sampler=PrefixSampler(rows, 4))
    assert all(len(set(batch[:, 0].tolist())) == 1 for (batch,) in loader)


def test_nothing_to_sample_is_refused() -> None:
    with pytest.raises(InputError, match="at least 1 row per batch"):
        PrefixSampler([], 2)
    with pytest.raises(InputError, match="at least 1 row per batch"):
        PrefixSampler([[1]], 0)
