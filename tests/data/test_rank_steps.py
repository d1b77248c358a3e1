"""Rows of an epoch to the ranks of every step: once, evenly, together where they share, losses those of the step."""

import random as python_random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import treefx
from tests.backend.native import random_weights, rollouts
from tests.oracle import FLOAT64, Outcome, assert_close, separate_rows
from tests.scale.ranks import run_ranks
from tests.scale.shared_out import Small
from tests.strategies import Rows, row_batches
from tests.trainers.test_distributed import WORLD
from treefx.data import TreeBatchSampler, distinct_tokens
from treefx.data.rank_steps import deal_rows, shuffled_outline
from treefx.forests.forest import Forest

BUDGET = 40


def _distinct(rows: Rows) -> int:
    """By definition: distinct prefixes."""
    return len({tuple(row[:length]) for row in rows for length in range(1, len(row) + 1)})


def groups(count: int, answers: int, prompt: int, seed: int = 0) -> Rows:
    """Prompts with answers of uneven lengths, in the order in which they arrived."""
    draw = python_random.Random(seed)
    rows = []
    for number in range(count):
        asked = [number, *(draw.randrange(50) for _ in range(prompt - 1))]
        rows += [[*asked, 60 + i, *(draw.randrange(50) for _ in range(draw.randrange(5, 40)))] for i in range(answers)]
    draw.shuffle(rows)
    return rows


@settings(max_examples=60, deadline=None)
@given(rows=row_batches(), ranks=st.integers(2, 5), extra=st.integers(0, 30), seed=st.integers(0, 3))
def test_every_row_once_in_the_budget_and_no_rank_idle_before_the_last_step(
    rows: Rows, ranks: int, extra: int, seed: int
) -> None:
    budget = max(map(len, rows)) + extra
    forest = Forest.from_sequences(rows)
    steps = deal_rows(forest, ranks, budget, None, np.random.default_rng(seed))
    assert sorted(row for step in steps for own in step for row in own) == list(range(len(rows)))
    assert all(len(step) == ranks for step in steps)
    assert all(all(step) for step in steps[:-1])
    if sum(map(len, [own for step in steps[-2:] for own in step])) >= 2 * ranks:
        assert all(steps[-1])
    assert max(_distinct([rows[row] for row in own]) for step in steps for own in step) <= budget
    assert steps == deal_rows(forest, ranks, budget, None, np.random.default_rng(seed))


@settings(max_examples=40, deadline=None)
@given(rows=row_batches(), seed=st.integers(0, 3))
def test_a_shuffled_outline_says_what_rows_share(rows: Rows, seed: int) -> None:
    outline = shuffled_outline(Forest.from_sequences(rows), np.random.default_rng(seed))
    assert outline.tokens == _distinct(rows)
    ordered = [rows[row] for row in outline.row.tolist()]
    assert outline.length.tolist() == [len(row) for row in ordered]
    before: list[int] = []
    for row, shared in zip(ordered, outline.shared.tolist(), strict=True):
        assert row[:shared] == before[:shared] and (shared in (len(row), len(before)) or row[shared] != before[shared])
        before = row


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_groups_stay_together_and_ranks_are_even(ranks: int) -> None:
    """Against rows strided over the ranks, and against batches made without regard to ranks."""
    rows = groups(24, 16, 60)
    forest = Forest.from_sequences(rows)
    sampler = TreeBatchSampler(rows, 800, num_replicas=ranks)
    steps = sampler.steps()
    busiest = sum(max(sampler._seconds(own) for own in step) for step in steps)
    even = forest.num_tokens / ranks
    assert busiest <= 1.15 * even
    assert distinct_tokens(forest, [own for step in steps for own in step]) <= 1.1 * forest.num_tokens
    strided = [list(range(rank, len(rows), ranks)) for rank in range(ranks)]
    assert max(sampler._seconds(own) for own in strided) > 1.1 * busiest
    assert busiest <= sampler._price(sampler._deal_batches(np.random.default_rng(0)))[1]


def test_rows_that_share_nothing_are_dealt_no_worse_than_before() -> None:
    draw = np.random.default_rng(1)
    rows = [[1000 * row + i for i in range(int(draw.integers(5, 100)))] for row in range(60)]
    sampler = TreeBatchSampler(rows, 100, num_replicas=4)
    assert sampler._price(sampler.steps()) <= sampler._price(sampler._deal_batches(np.random.default_rng([0, 0])))


def test_epochs_differ_and_ranks_agree() -> None:
    rows = groups(6, 6, 10)
    samplers = [TreeBatchSampler(rows, 150, num_replicas=2, rank=rank) for rank in range(2)]
    seen = []
    for epoch in (0, 1, 0):
        for sampler in samplers:
            sampler.set_epoch(epoch)
        assert samplers[0].steps() == samplers[1].steps()
        assert [list(sampler) for sampler in samplers] == [[step[at] for step in samplers[0].steps()] for at in (0, 1)]
        seen.append(samplers[0].steps())
    assert seen[0] == seen[2] != seen[1]


def step_rows() -> tuple[Rows, list[list[float]]]:
    rows = rollouts(7)
    return rows, [[abs(weight) + 0.1 for weight in own] for own in random_weights(rows)]


def sampler_of(rank: int) -> TreeBatchSampler:
    rows, weights = step_rows()
    return TreeBatchSampler(rows, BUDGET // 2, num_replicas=WORLD, rank=rank, weights=weights)


def train(model: nn.Module, rank: int, whole: bool) -> list[tuple[Tensor, dict[str, Tensor]]]:
    """Loss and gradients of every step; not whole: the plausible mistake, every rank with its own denominators."""
    outcomes = []
    for own in sampler_of(rank).forests():
        own = own if whole else replace(own, share=None)
        model.zero_grad(set_to_none=True)
        with treefx.use(own):
            out = model(**own.model_inputs(), use_cache=False)
        loss = treefx.losses.sft(treefx.edge_logprobs(out.logits, own), own, reduction="row_mean")
        (WORLD * loss if whole else loss).backward()  # DDP divides by the number of ranks
        total = loss.detach() if whole else loss.detach() / WORLD
        dist.all_reduce(total)
        gradients = {name.removeprefix("module."): p.grad.clone() for name, p in model.named_parameters()}
        outcomes.append((total, gradients))
    return outcomes


def worker(rank: int, port: int, folder: str) -> None:
    """One of the processes; writes what came out."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=WORLD)
    model = Small()
    model.compile(backend="treefx", options={"inner": "eager", "min_sharing": 1.0})
    shared = DistributedDataParallel(model)
    torch.save([train(shared, rank, whole) for whole in (True, False)], Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()


def test_two_processes_have_the_losses_and_gradients_of_separate_rows(tmp_path: Path) -> None:
    check_ranks(run_ranks(__name__, tmp_path))


def check_ranks(found: list[Any]) -> None:
    """By rank, what `train` gave, whole and not: the first is exact, and the second is not."""
    rows, weights = step_rows()
    steps = sampler_of(0).steps()
    assert len(steps) > 1
    for right, wrong in found:
        differ = 0
        for step, outcome, other in zip(steps, right, wrong, strict=True):
            chosen = [row for own in step for row in own]
            means = row_means([weights[row] for row in chosen])
            expected = separate_rows(Small(), [rows[row] for row in chosen], means)
            assert_close(Outcome(*outcome), expected, FLOAT64)
            try:
                assert_close(Outcome(*other), expected, 1e-3)
            except AssertionError:
                differ += 1
        assert differ, "the means of every rank alone would do as well: the test shows nothing"


def row_means(weights: list[list[float]]) -> list[list[float]]:
    """By definition: every row's weighted mean, and the mean of those over all rows, of which some predict nothing."""
    return [[w / (sum(own[1:]) * len(weights)) for w in own] if len(own) > 1 else [0.0] for own in weights]
