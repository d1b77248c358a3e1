"""Tokens in numbers that ranks cannot divide, in sequence parallelism: rows and parts of plans are filled up.

Two processes draw the same forests, and have the gradients of one; rows that nothing is added to end both.
"""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import Phase, assume, given, settings
from hypothesis import strategies as st
from torch import nn

import treefx
from tests.oracle import FLOAT64, Outcome, assert_close, separate_rows
from tests.planning.cuts import random_cuts, uncut
from tests.scale.ranks import run_ranks
from tests.scale.shared_out import SECONDS, run_rank, sequence_parallel
from tests.scale.test_tensor_parallel import llama as rotary
from tests.scale.test_tensor_parallel_compiled import EAGER, ROWS, compiled, llama, of_plan, of_row, plain
from tests.strategies import Rows, row_batches
from tests.trainers.test_distributed import WORLD
from treefx.errors import InputError
from treefx.planning.execution import execute
from treefx.runtime.cut import PartTokens
from treefx.scale import even

DRAWN = 8
CASE = ("sequence", "eager")


def worker(rank: int, port: int, folder: str, task: str) -> None:
    run_rank(rank, port, folder, partial(TASKS[task]))


def drawn() -> list[Any]:
    """Forests that every rank draws alike, each as a row and in parts."""
    model, run = compiled(*CASE)
    found: list[Any] = []

    @settings(max_examples=DRAWN, derandomize=True, database=None, deadline=None, phases=[Phase.generate])
    @given(row_batches(), st.integers(0, 99))
    def draw(rows: Rows, seed: int) -> None:
        rows = [[token % 29 + 3 for token in row] for row in rows]
        forest = treefx.Forest.from_sequences(rows)
        assume(len(forest.edges))
        found.append((rows, plain([of_row(model, run, forest), of_plan(model, run, random_cuts(forest, seed))])))

    draw()
    return found


def uneven() -> list[str]:
    """Why a row and a plan do not run that nothing is added to."""
    even.split_over = execute.split_over = lambda *models: 1
    forest, reasons = treefx.Forest.from_sequences(ROWS), []
    for attempt in (of_row, lambda model, run, forest: of_plan(model, run, uncut(forest))):
        with pytest.raises(Exception) as caught:  # whatever Dynamo raises
            torch.compiler.reset()
            model = sequence_parallel(rotary(WORLD))
            attempt(model, torch.compile(model, backend="treefx", options=EAGER), forest)
        reasons.append(str(caught.value))
    return reasons


TASKS: dict[str, Any] = {"drawn": drawn, "uneven": uneven}


def test_drawn_forests(tmp_path: Path) -> None:
    first, second = run_ranks(__name__, tmp_path, "drawn", seconds=SECONDS)
    assert [rows for rows, _ in first] == [rows for rows, _ in second]
    assert {treefx.Forest.from_sequences(rows).num_tokens % 2 for rows, _ in first} == {0, 1}
    for rows, found in [*first, *second]:
        want = separate_rows(llama(), rows, [[1.0] * len(row) for row in rows])
        for loss, gradients in found:
            assert_close(Outcome(loss, gradients), want, FLOAT64)


def test_rows_that_nothing_is_added_to_do_not_run(tmp_path: Path) -> None:
    for reasons in run_ranks(__name__, tmp_path, "uneven", seconds=SECONDS):
        assert len(reasons) == 2 and all("size of tensor" in reason for reason in reasons)


def test_what_is_added_is_seen_by_nobody_and_predicts_nothing() -> None:
    forest, nothing = treefx.Forest.from_sequences([[5, 6, 7], [5, 8, 9]]), torch.zeros(0, dtype=torch.int64)
    row = PartTokens(forest, forest, torch.arange(5), nothing, nothing, 4).row(torch.arange(4), None)
    assert row.model_inputs()["input_ids"].tolist() == [[5, 6, 7, 8, 9, 5, 5, 5]]
    assert row.subtree_end.tolist() == [5, 3, 3, 5, 5, 6, 7, 8]
    assert row.edges.source.tolist() == forest.edges.source.tolist() and row.uncut is forest


def test_a_row_of_its_own_would_change_means() -> None:
    rows = [[5, 6, 7], [5, 8, 9]]
    forest, longer = treefx.Forest.from_sequences(rows), treefx.Forest.from_sequences([*rows, [5, 4]])
    nothing = torch.zeros(0, dtype=torch.int64)
    row = PartTokens(forest, forest, torch.arange(5), nothing, nothing, 2).row(torch.arange(4), None)
    sizes = [x.num_tokens for x in (row, longer)]
    losses = [float(treefx.losses.sft(-torch.arange(len(x.edges)) - 1.0, x, "row_mean")) for x in (forest, row, longer)]
    assert sizes == [6, 6] and losses[0] == losses[1] != losses[2]


def test_other_models_need_no_more_than_the_forest() -> None:
    forest = treefx.Forest.from_sequences([[5, 6, 7], [5, 8, 9]])
    assert treefx.scale.pad_row(forest, nn.Linear(2, 2)).num_tokens == 5
    with pytest.raises(InputError, match="expected a treefx.Forest, got list"):
        treefx.scale.pad_row([[5, 6]], nn.Linear(2, 2))  # type: ignore[arg-type]
