"""``treefx.scale.shard_rows``: losses and gradients of all ranks sum to those of the whole forest."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import treefx
from tests.backend.native import native_loss, random_weights, rollouts
from tests.models import double
from tests.oracle import FLOAT64, Outcome, assert_close, compile_with, outcome, separate_rows
from tests.planning.costs import linear_cost
from tests.planning.cuts import every_node
from tests.reference_model import ReferenceModel, tree_visibility
from tests.strategies import Rows, weighted_row_batches
from treefx.errors import ForestError, InputError, MemoryLimitError
from treefx.losses import Constant, PromptMean
from treefx.planning.cost.model import Seconds
from treefx.scale.step import predict_step

Loss = Callable[[Tensor, treefx.Forest], Tensor]
REDUCTIONS: list[Any] = ["sum", "token_mean", "row_mean", Constant(9.0)]


def run_reference(model: ReferenceModel, forest: treefx.Forest, loss: Loss) -> Tensor:
    """The loss of a forest on a small model in float64."""
    logits = model(forest.tokens, forest.depth, tree_visibility(forest.subtree_end))
    return loss(treefx.edge_logprobs(logits[None], forest), forest)


def summed(model: ReferenceModel, forests: Any, loss: Loss) -> Outcome:
    return outcome(model, lambda: torch.stack([run_reference(model, forest, loss) for forest in forests]).sum())


def assert_adds_up(whole: treefx.Forest, ranks: int, loss: Loss) -> None:
    torch.manual_seed(0)
    model = ReferenceModel(vocabulary=70, width=8, heads=2, kv_heads=1)
    shares = treefx.scale.shard_rows(whole, ranks, lambda size: size.tokens + 0.1 * size.pairs)
    assert_close(summed(model, shares, loss), summed(model, [whole], loss), FLOAT64)


@settings(max_examples=15, deadline=None)
@given(given_rows=weighted_row_batches(), ranks=st.integers(1, 4), reduction=st.sampled_from(REDUCTIONS))
def test_ranks_sum_to_the_whole(given_rows: tuple[Rows, list[list[float]]], ranks: int, reduction: Any) -> None:
    whole = treefx.Forest.from_sequences(*given_rows)
    if not len(whole.edges):
        return
    assert_adds_up(whole, ranks, lambda logp, forest: treefx.losses.sft(logp, forest, reduction=reduction))


def test_means_over_prompts_and_values_per_row_are_those_of_all_rows() -> None:
    rows = rollouts(3)
    whole = treefx.Forest.from_sequences(rows)
    advantages = torch.linspace(-1.0, 2.0, len(rows))
    old = [torch.full((len(row),), -2.0) for row in rows]
    prompts = [row % 3 for row in range(len(rows))]

    def loss(logp: Tensor, forest: treefx.Forest) -> Tensor:
        return treefx.losses.clipped(logp, forest, old, advantages, reduction=PromptMean(prompts))

    assert_adds_up(whole, 3, loss)


def test_a_llama_compiled_by_treefx_has_the_gradients_of_separate_rows() -> None:
    """Two ranks of a forest with duplicates, rows that are prefixes of others and weights, summed."""
    rows = rollouts()
    weights = random_weights(rows)
    whole = treefx.Forest.from_sequences(rows, weights)
    model = double("llama", num_hidden_layers=1, hidden_size=16, intermediate_size=16, head_dim=8)
    compiled = compile_with(model, inner="eager")
    shares = treefx.scale.shard_rows(whole, 2, Seconds(0.0, 1.0, 0.01))
    assert shares.split.duplicated > 0, "nothing is on both ranks: the test shows nothing"
    got = outcome(model, lambda: torch.stack([native_loss(own)(compiled) for own in shares]).sum())
    assert_close(got, separate_rows(model, rows, weights), FLOAT64)


@pytest.mark.parametrize("reduction", ["token_mean", "row_mean"])
def test_denominators_of_a_rank_alone_would_be_wrong(reduction: Any) -> None:
    """The plausible mistake: every rank's own mean, and the mean of those."""
    rows = rollouts(1)
    whole = treefx.Forest.from_sequences(rows)
    shares = treefx.scale.shard_rows(whole, 3)
    model = ReferenceModel(vocabulary=70, width=8, heads=2, kv_heads=1)
    loss: Loss = lambda logp, forest: treefx.losses.sft(logp, forest, reduction=reduction)  # noqa: E731
    own_means: Loss = lambda logp, forest: loss(logp, forest) / 3  # noqa: E731
    wrong = summed(model, [replace(own, share=None) for own in shares], own_means)
    with pytest.raises(AssertionError):
        assert_close(wrong, summed(model, [whole], loss), 1e-3)


def test_an_edge_on_two_ranks_has_the_weight_of_each_ranks_rows() -> None:
    whole = treefx.Forest.from_sequences([[1, 2, 3 + row] for row in range(4)], [1.0, 2.0, 4.0, 8.0])
    shares = treefx.scale.shard_rows(whole, 2)
    weight = [float(own.edges.weight[own.edges.token == 2].sum()) for own in shares]
    assert sum(weight) == 15.0 and min(weight) > 0


def test_a_plan_of_a_rank_keeps_the_denominators_of_all() -> None:
    """Parts see the forest's edges through subsets of it: the share has to come along."""
    rows = rollouts(2)
    whole = treefx.Forest.from_sequences(rows)
    model = double("llama", num_hidden_layers=1, hidden_size=16, intermediate_size=16, head_dim=8)
    compiled = compile_with(model, inner="eager")
    loss: Loss = lambda logp, forest: treefx.losses.sft(logp, forest, reduction="row_mean")  # noqa: E731
    expected = outcome(model, lambda: native_loss(whole, "row_mean")(compiled))
    model.zero_grad(set_to_none=True)
    values = [treefx.backward(compiled, every_node(own), loss) for own in treefx.scale.shard_rows(whole, 2)]
    gradients = {name: p.grad for name, p in model.named_parameters()}
    assert_close(Outcome(torch.stack(values).sum(), gradients), expected, FLOAT64)


def test_more_ranks_than_rows_leave_some_with_a_row_that_weighs_nothing() -> None:
    whole = treefx.Forest.from_sequences([[1, 2, 3], [7, 8]])
    shares = treefx.scale.shard_rows(whole, 5)
    assert len(shares) == len(list(shares)) == 5
    idle = [own for own in shares if own.share is not None and own.share.is_idle]
    assert len(idle) == 3 and all(own.sequences()[0].tolist() == [7, 8] for own in idle)
    assert_adds_up(whole, 5, lambda logp, forest: treefx.losses.sft(logp, forest, reduction="token_mean"))
    desirable = torch.tensor([True])
    values = [
        treefx.losses.kto(torch.tensor([-1.0]), own, torch.tensor([-1.0]), desirable, kl=0.0, reduction="sum")
        for own in idle
    ]
    assert [float(value) for value in values] == [0.0] * 3


def test_a_share_of_a_share_divides_by_the_whole() -> None:
    whole = treefx.Forest.from_sequences(rollouts(4))
    inner = [own for node in treefx.scale.shard_rows(whole, 2) for own in treefx.scale.shard_rows(node, 2)]
    model = ReferenceModel(vocabulary=70, width=8, heads=2, kv_heads=1)
    loss: Loss = lambda logp, forest: treefx.losses.sft(logp, forest, reduction="row_mean")  # noqa: E731
    assert_close(summed(model, inner, loss), summed(model, [whole], loss), FLOAT64)
    assert sorted(row for own in inner if own.share for row in own.share.rows.tolist()) == list(range(len(whole)))


def test_shares_move_between_devices_with_what_they_know() -> None:
    own = treefx.scale.shard_rows(treefx.Forest.from_sequences([[1, 2], [3, 4]]), 2)[0].to("cpu")
    assert own.share is not None and len(own.share) == 2
    assert own.sequences()[0].tolist() in ([1, 2], [3, 4])


def test_the_answer_is_the_same_in_every_process() -> None:
    rows = rollouts(5)
    first, second = (treefx.scale.shard_rows(treefx.Forest.from_sequences(rows), 3) for _ in range(2))
    assert [own.tokens.tolist() for own in first] == [own.tokens.tolist() for own in second]
    assert [len(own) for own in first[1:]] == [len(first[1]), len(first[2])]
    assert "3 ranks" in repr(first)


def test_means_over_pairs_of_one_rank_are_refused() -> None:
    own = treefx.scale.shard_rows(treefx.Forest.from_sequences([[1, 2, 3], [1, 2, 4]]), 1)[0]
    logp = torch.zeros(len(own.edges))
    with pytest.raises(InputError, match="use reduction='sum' and divide by the number on all ranks"):
        treefx.losses.simpo(logp, own, [(0, 1)], beta=1.0, gamma=0.0)


def test_what_is_no_forest_and_prompts_of_one_rank_are_refused() -> None:
    with pytest.raises(InputError, match="shard_rows expected a treefx.Forest"):
        treefx.scale.shard_rows([[1, 2]], 2)  # type: ignore[arg-type]
    own = treefx.scale.shard_rows(treefx.Forest.from_sequences([[1, 2, 3], [4, 5], [6, 7]]), 2)[0]
    prompts = PromptMean([0] * len(own))
    with pytest.raises(ForestError, match=r"one integer per row, \[3\]"):
        treefx.losses.sft(torch.zeros(len(own.edges)), own, reduction=prompts)


def test_a_step_on_paper_adds_up_its_ranks_plans() -> None:
    rows = [[0, *range(10 * row, 10 * row + 9)] for row in range(1, 7)]
    whole, cost = treefx.Forest.from_sequences(rows), linear_cost(part_seconds=1.0)
    step = predict_step(whole, 3, cost, 14)
    figures = step.to_dict()
    tokens = [own.num_tokens for own in step.assignment]
    assert figures["duplicated_tokens"] == sum(tokens) - whole.num_tokens == 2
    assert figures["seconds"] == max(plan.seconds for plan in step.plans.values())
    assert figures["peak_bytes"] <= 14 and figures["most_parts"] > 1
    spare = predict_step(whole, 9, cost, 14).to_dict()
    assert figures["wire_seconds"] == 0.0 and figures["wire_bytes"] == pytest.approx(cost.resident_bytes * 2 / 3)
    large = replace(cost, resident_bytes=1200.0)
    linked = predict_step(whole, 3, large, 1214, link_bytes_per_second=100.0).to_dict()
    assert linked["wire_bytes"] == pytest.approx(800) and linked["wire_seconds"] == pytest.approx(8)
    assert linked["seconds"] == pytest.approx(linked["slowest_seconds"] + 8)
    assert spare["idle_ranks"] == 3 and spare["distinct_tokens"] == whole.num_tokens
    with pytest.raises(MemoryLimitError):
        predict_step(whole, 4, cost, 2)


def test_old_names_are_the_same_functions() -> None:
    scale = treefx.scale
    assert (scale.assign, scale.context, scale.even_row) == (scale.shard_rows, scale.context_parallel, scale.pad_row)
