"""Tokens in numbers that ranks cannot divide, in sequence parallelism: what fills rows and parts of plans up."""

import pytest
import torch
from torch import nn

import treefx
from treefx.errors import InputError
from treefx.runtime.cut import PartTokens


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
    assert treefx.scale.even_row(forest, nn.Linear(2, 2)).num_tokens == 5
    with pytest.raises(InputError, match="expected a treefx.Forest, got list"):
        treefx.scale.even_row([[5, 6]], nn.Linear(2, 2))  # type: ignore[arg-type]
