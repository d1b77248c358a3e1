"""Batches of rows: every row once, in the budget, together where they share, the same for all ranks."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader
from typer.testing import CliRunner

from tests.planning.costs import linear_cost
from tests.strategies import Rows, row_batches
from treefx.cli import app
from treefx.data import (
    ByteTokenizer,
    TreeBatchSampler,
    distinct_tokens,
    first_fit_batches,
    load,
    make_samples,
    scripted_conversations,
)
from treefx.errors import InputError
from treefx.forests.forest import Forest


def _distinct(rows: Rows) -> int:
    """By definition: distinct prefixes."""
    return len({tuple(row[:length]) for row in rows for length in range(1, len(row) + 1)})


@settings(max_examples=80, deadline=None)
@given(rows=row_batches(), extra=st.integers(0, 30), epoch=st.integers(0, 3))
def test_every_row_once_and_every_batch_in_the_budget(rows: Rows, extra: int, epoch: int) -> None:
    budget = max(map(len, rows)) + extra
    sampler = TreeBatchSampler(rows, budget)
    sampler.set_epoch(epoch)
    batches = list(sampler)
    assert len(sampler) == len(batches)
    assert sorted(row for batch in batches for row in batch) == list(range(len(rows)))
    sizes = [_distinct([rows[i] for i in batch]) for batch in batches]
    assert max(sizes) <= budget
    assert distinct_tokens(sampler.forest, batches) == sum(sizes)
    arrival = first_fit_batches(sampler.forest, budget)
    assert sorted(row for batch in arrival for row in batch) == list(range(len(rows)))
    assert max(_distinct([rows[i] for i in batch]) for batch in arrival) <= budget


@settings(max_examples=40, deadline=None)
@given(rows=row_batches(), ranks=st.integers(1, 5))
def test_ranks_share_the_rows_and_have_equally_many_batches(rows: Rows, ranks: int) -> None:
    budget = max(map(len, rows)) + 5
    if len(rows) < ranks:
        with pytest.raises(InputError, match="one row per rank"):
            TreeBatchSampler(rows, budget, num_replicas=ranks)
        return
    samplers = [TreeBatchSampler(rows, budget, num_replicas=ranks, rank=rank) for rank in range(ranks)]
    shares = [list(sampler) for sampler in samplers]
    assert len({len(share) for share in shares}) == 1
    assert sorted(row for share in shares for batch in share for row in batch) == list(range(len(rows)))


def test_turns_of_agents_stay_within_a_tenth_of_the_minimum() -> None:
    conversations = scripted_conversations()
    rows = [sample.tokens for sample in make_samples(conversations, ByteTokenizer())]
    rows = [rows[i] for i in np.random.default_rng(0).permutation(len(rows))]
    budget = 4 * max(map(len, rows))
    sampler = TreeBatchSampler(rows, budget)
    forest = sampler.forest
    assert forest.num_tokens > 2 * budget
    # All rows begin with the first node, so every batch has to compute it.
    shared = int(forest.nodes.stop[0])
    batches = -(-(forest.num_tokens - shared) // (budget - shared))
    minimum = forest.num_tokens + (batches - 1) * shared
    assert distinct_tokens(forest, list(sampler)) <= 1.10 * minimum
    assert distinct_tokens(forest, first_fit_batches(forest, budget)) > 1.5 * minimum


def test_batches_of_one_step_take_equally_long() -> None:
    random = np.random.default_rng(1)
    rows = [[1000 * row + i for i in range(int(random.integers(5, 100)))] for row in range(200)]
    sampler = TreeBatchSampler(rows, 100, num_replicas=4, cost=linear_cost())
    sizes = np.array([[sum(len(rows[i]) for i in batch) for batch in step] for step in sampler.steps()])
    unbalanced = np.sort(random.permutation(sizes.ravel()).reshape(sizes.shape), axis=1)
    assert sizes.max(axis=1).sum() <= 1.05 * sizes.mean(axis=1).sum()
    assert unbalanced.max(axis=1).sum() > sizes.max(axis=1).sum()


def test_epochs_differ_and_repeat() -> None:
    rows = [[row, row + 1] for row in range(40)]
    sampler = TreeBatchSampler(rows, 10)
    orders = []
    for epoch in (0, 1, 0):
        sampler.set_epoch(epoch)
        orders.append(list(sampler))
    assert orders[0] == orders[2] != orders[1]
    assert {frozenset(batch) for batch in orders[0]} != {frozenset(batch) for batch in orders[1]}
    still = TreeBatchSampler(rows, 10, shuffle=False)
    first = list(still)
    still.set_epoch(1)
    assert list(still) == first


def test_memory_limit_bounds_the_bytes() -> None:
    rows = [[100 * row + i for i in range(10)] for row in range(9)]
    cost = linear_cost(run=2.0, resident=100.0)
    sampler = TreeBatchSampler(rows, memory_limit_bytes=160, cost=cost)
    assert sampler.max_tokens == 30
    assert sorted(map(len, sampler)) == [3, 3, 3]


def test_data_loader_takes_it() -> None:
    rows = [[1, 2, 3], [7, 8], [1, 2, 4]]
    loader = DataLoader(rows, batch_sampler=TreeBatchSampler(rows, 4), collate_fn=sorted)  # type: ignore[arg-type]
    assert sorted(loader) == [[[1, 2, 3], [1, 2, 4]], [[7, 8]]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "expected max_tokens or memory_limit_bytes"),
        ({"max_tokens": 5, "memory_limit_bytes": 5}, "expected max_tokens or memory_limit_bytes"),
        ({"max_tokens": 0}, "at least 1"),
        ({"memory_limit_bytes": 5}, "needs cost="),
        ({"max_tokens": 2}, "row 1 has 3"),
        ({"max_tokens": 9, "rank": 1}, "rank must be"),
        ({"max_tokens": 9, "num_replicas": 3}, "one row per rank"),
    ],
)
def test_bad_arguments_are_refused(options: dict[str, int], message: str) -> None:
    with pytest.raises(InputError, match=message):
        TreeBatchSampler([[1, 2], [1, 2, 3]], **options)  # type: ignore[arg-type]


def test_command_counts_what_batches_compute(tmp_path: Path) -> None:
    """Against the definitions, on chats small enough for them; the scripted sample stays near the minimum."""
    questions, answers = ("first", "second", "third"), ("yes", "yes indeed", "no")
    chats = [_chat(question, answer) for question in questions for answer in answers]
    path = tmp_path / "chats.jsonl"
    path.write_text("\n".join(map(json.dumps, chats)))
    rows = [sample.tokens.tolist() for sample in make_samples(load(path), ByteTokenizer())]
    longest = max(map(len, rows))
    arguments = ["bench", "sampler", str(path), "--max-tokens", str(longest), "--tokenizer", "bytes", "--json"]
    (record,) = _run_command(arguments)
    assert (record["rows"], record["raw_tokens"]) == (len(rows), sum(map(len, rows)))
    assert record["minimum"] == _distinct(rows)
    assert record["minimum"] < record["sampler"] <= record["first_fit"] <= record["raw_tokens"]
    assert record["batches"] >= len(questions)
    (scripted,) = _run_command(["bench", "sampler", "--tokenizer", "bytes", "--json"])
    assert scripted["sampler_ratio"] == scripted["sampler"] / scripted["minimum"] <= 1.1
    assert scripted["first_fit_ratio"] > 1.5


def _chat(question: str, answer: str) -> dict[str, list[dict[str, str]]]:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def _run_command(arguments: list[str]) -> Any:
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_command_refuses_a_budget_below_the_longest_row() -> None:
    result = CliRunner().invoke(app, ["bench", "sampler", "--tokenizer", "bytes", "--max-tokens", "100"])
    assert isinstance(result.exception, InputError) and "hold every row" in str(result.exception)


def test_first_fit_takes_rows_as_they_come() -> None:
    forest = Forest.from_sequences([[1, 2, 3], [7, 8, 9], [1, 2, 4], [7, 8, 6]])
    assert first_fit_batches(forest, 6) == [[0, 1], [2, 3]]
    assert first_fit_batches(forest, 5) == [[0, 2], [1, 3]]
