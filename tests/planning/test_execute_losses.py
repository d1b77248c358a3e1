"""Every loss of `treefx.losses` through a forest in parts: value and gradients of the whole forest, eagerly on rows."""

import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import treefx
from tests.backend.native import Rows, branches
from tests.losses.every_loss import ADVANTAGES, FOREST, OLD, OLD_ROWS, PAIRS, REF, SUMS, WHOLE_ROWS
from tests.losses.textbook import Batch
from tests.oracle import FLOAT64, assert_close
from tests.planning.cuts import every_node, random_cuts
from tests.planning.parts import Loss, run, tiny, whole_forest
from tests.planning.parts import reproducible as reproducible
from treefx import losses
from treefx.planning.execution.backward import backward


@pytest.mark.parametrize("name", [*SUMS, *WHOLE_ROWS])
def test_a_cut_forest_has_the_losses_of_the_whole_one(name: str) -> None:
    """The caller does not say which losses are sums over edges: the others report it themselves."""
    model, compiled = tiny(layers=1)
    loss = {**SUMS, **WHOLE_ROWS}[name]
    expected = whole_forest(model, FOREST, loss)
    assert any(gradient is not None and gradient.any() for gradient in expected.gradients.values())
    for plan in (every_node(FOREST), random_cuts(FOREST, 5)):
        assert_close(run(compiled, model, plan, loss), expected, FLOAT64)


def loss_of(batch: Batch, kind: str) -> Loss:
    """A loss of numbers that are drawn for the batch."""
    (old, _), (ref, _) = batch.policy(2, kind == "sequence"), batch.policy(3, True)
    pairs = [(number, number + 1) for number in range(len(batch.rows) - 1)]

    def loss(logp: Tensor, part: treefx.Forest) -> Tensor:
        if kind == "dpo":
            return losses.dpo(logp, part, ref, pairs) + losses.sft(logp, part, "token_mean")
        level: Any = kind
        clipped = losses.clipped(logp, part, old, batch.per_row(4), 0.1, "row_mean", level=level)
        return clipped + 0.1 * losses.kl(logp, part, ref)

    return loss


def test_random_forests_and_cuts() -> None:
    model, compiled = tiny(layers=1)

    @settings(max_examples=4)
    @given(
        trees=st.lists(branches, min_size=1, max_size=2),
        seed=st.integers(0, 99),
        kind=st.sampled_from(["token", "sequence", "sequence_token", "dpo"]),
    )
    def check(trees: list[Rows], seed: int, kind: str) -> None:
        rows = [row for tree in trees for row in tree]
        rows = [*rows, [*rows[0], 4]]
        draw = random.Random(seed)
        batch = Batch(rows, [[draw.choice([0.0, 1.0, 2.0]) for _ in row] for row in rows], seed)
        loss = loss_of(batch, kind)
        expected = whole_forest(model, batch.forest, loss)
        if any(gradient is not None and gradient.any() for gradient in expected.gradients.values()):
            assert_close(run(compiled, model, random_cuts(batch.forest, seed, 0.4), loss), expected, FLOAT64)

    check()


@pytest.mark.parametrize("name", list(WHOLE_ROWS))
def test_losses_over_whole_rows_are_never_summed_over_parts(name: str) -> None:
    model, compiled = tiny(layers=1)
    model.zero_grad(set_to_none=True)
    with pytest.raises(treefx.CoupledLossError, match="additive=False"):
        backward(compiled, every_node(FOREST), WHOLE_ROWS[name], additive=True)
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("additive", [None, False])
def test_an_entropy_bonus_reads_more_than_log_probabilities(additive: bool | None) -> None:
    model, compiled = tiny(layers=1)

    def both(output: Any, row: treefx.Forest) -> Tensor:
        return torch.stack([treefx.edge_logprobs(output.logits, row), treefx.edge_entropy(output.logits, row)], 1)

    def loss(values: Tensor, part: treefx.Forest) -> Tensor:
        return losses.clipped(values[:, 0], part, OLD, ADVANTAGES) - 0.5 * losses.entropy(values[:, 1], part)

    def without(values: Tensor, part: treefx.Forest) -> Tensor:
        return losses.clipped(values[:, 0], part, OLD, ADVANTAGES)

    expected, plan = whole_forest(model, FOREST, loss, entropies=True), random_cuts(FOREST, 2)
    assert_close(run(compiled, model, plan, loss, logprobs=both, additive=additive), expected, FLOAT64)
    with pytest.raises(AssertionError, match="differ by more than"):
        assert_close(run(compiled, model, plan, without, logprobs=both), expected, 1e-3)


def test_what_a_first_try_recorded_is_forgotten() -> None:
    """A sum over edges is recorded on the first part, before the next loss reads whole rows."""
    model, compiled = tiny(layers=1)
    metrics = losses.Metrics()

    def loss(logp: Tensor, part: treefx.Forest) -> Tensor:
        return losses.kl(logp, part, REF, metrics=metrics) + losses.dpo(logp, part, REF, PAIRS, metrics=metrics)

    whole_forest(model, FOREST, loss)
    expected = {name: total.clone() for name, total in metrics.totals.items()}
    metrics.clear()
    run(compiled, model, every_node(FOREST), loss)
    for name, total in metrics.totals.items():
        torch.testing.assert_close(total, expected[name])


def test_metrics_of_parts_are_those_of_the_whole() -> None:
    model, compiled = tiny(layers=1)
    found = []
    for plan in (None, every_node(FOREST), random_cuts(FOREST, 3)):
        metrics = losses.Metrics()

        def loss(logp: Tensor, part: treefx.Forest, metrics: losses.Metrics = metrics) -> Tensor:
            divergence = losses.kl(logp, part, REF, metrics=metrics)
            return divergence + losses.clipped(logp, part, OLD_ROWS, ADVANTAGES, 0.1, metrics=metrics)

        if plan is None:
            whole_forest(model, FOREST, loss)
        else:
            run(compiled, model, plan, loss)
        found.append(metrics.means())
    assert found[0]["clip_ratio/region_mean"] > 0
    assert found[1] == pytest.approx(found[0]) and found[2] == pytest.approx(found[0])
