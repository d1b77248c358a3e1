"""Shared tokens that are trained once, in the first row that trains them; losses on them are in tests/losses."""

import pytest
import torch
from hypothesis import given, settings

import treefx
from tests.losses.textbook import Batch, batches, misses, reduce_tokens, row_logprobs, value_and_grad
from treefx import InputError, edge_logprobs, losses
from treefx.forests.validate import validate_forest

TURNS = [[1, 2, 7, 3], [1, 2, 7, 3, 4, 8, 9], [1, 2, 7, 5]]
SAMPLED = [[0, 0, 1, 1], [0, 0, 1, 1, 0, 1, 1], [0, 0, 0.5, 2]]


@settings(max_examples=60)
@given(batches())
def test_later_rows_mask_what_a_row_trains(batch: Batch) -> None:
    forest = treefx.Forest.from_sequences(batch.rows, batch.weights, weighting="once")
    validate_forest(forest)
    masked = Batch(batch.rows, batch.weights, batch.seed, "once").masked
    expected = torch.tensor([w for weights in masked for w in [0.0, *weights[1:]]], dtype=torch.float64)
    assert torch.equal(forest.raw_weight, expected)
    trained = forest.edges.sum_entries((forest.edges.row_weight != 0).double())
    assert bool((trained <= 1).all())


def test_turns_of_one_conversation() -> None:
    """The second row emits the first one's turn again, the third goes on from half of it."""
    forest = treefx.Forest.from_sequences(TURNS, SAMPLED, weighting="once")
    assert forest.edges.weight.tolist() == [0, 1, 1, 0, 1, 1, 2]
    assert treefx.Forest.from_sequences(TURNS, SAMPLED).edges.weight.tolist() == [0, 2.5, 2, 0, 1, 1, 2]


def test_the_first_row_gives_its_advantage() -> None:
    """The mean of the rows' advantages, or a weight divided by the rows, is another loss."""
    batch = Batch(TURNS, SAMPLED, 0, "once")
    advantages = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    forest, logits = batch.forest, batch.logits

    def textbook(masks: list[torch.Tensor]) -> list[torch.Tensor]:
        def loss(x: torch.Tensor) -> torch.Tensor:
            terms = [-a * p for a, p in zip(advantages, row_logprobs(x, forest), strict=True)]
            return reduce_tokens(terms, masks, "sum")

        return value_and_grad(loss, logits)

    def ours(x: torch.Tensor) -> torch.Tensor:
        return losses.policy_gradient(edge_logprobs(x, forest), forest, advantages, "sum")

    got = value_and_grad(ours, logits)
    assert not misses(got, textbook(batch.masks))
    shared = [torch.tensor(weights[1:], dtype=torch.float64) / 2 for weights in SAMPLED]
    assert misses(got, textbook(shared))


def test_every_constructor_takes_it() -> None:
    padded = treefx.Forest.from_padded(torch.tensor([[1, 2, 3], [1, 2, 4]]), weighting="once")
    assert padded.edges.weight.tolist() == [1, 1, 1]
    nodes = treefx.Forest.from_nodes([[1, 2], [3], [4]], [-1, 0, 0], weighting="once")
    assert nodes.edges.weight.tolist() == [1, 1, 1]
    for weighting in ("twice", None):
        with pytest.raises(InputError, match=r"weighting must be 'rows' or 'once'"):
            treefx.Forest.from_sequences(TURNS, weighting=weighting)  # type: ignore[arg-type]
