"""Losses of policy gradients in float64 against the textbook's on separate rows."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.losses.textbook import (
    Batch,
    Values,
    assert_equal,
    batches,
    check,
    misses,
    reduce_tokens,
    row_logprobs,
    some_edges,
    value_and_grad,
)
from treefx import CoupledLossError, Forest, ForestError, InputError, edge_logprobs, losses
from treefx.losses.ratios import Level
from treefx.losses.terms import align
from treefx.planning.execution.boundary import all_edges

some = settings(max_examples=25)


@st.composite
def reductions(draw: st.DrawFn, batch: Batch) -> losses.Reduction:
    prompts = draw(st.lists(st.integers(0, 2), min_size=len(batch.rows), max_size=len(batch.rows)))
    return draw(st.sampled_from(["sum", "token_mean", "row_mean", losses.Constant(7.0), losses.PromptMean(prompts)]))


def advantages(batch: Batch, per_token: bool) -> tuple[Any, Values]:
    """What a loss is given, and per row [T - 1]."""
    if per_token:
        rows = batch.per_token(1)
        return rows, [row[1:] for row in rows]
    numbers = batch.per_row(1)
    return numbers, [torch.full((len(row) - 1,), a, dtype=torch.float64) for row, a in zip(batch.rows, numbers)]


def importance(batch: Batch, data: st.DataObject) -> tuple[Any, Values]:
    if data.draw(st.booleans(), "importance"):
        rows = [row.exp() for row in batch.per_token(3)]
        return rows, [row[1:] for row in rows]
    return None, [torch.ones(len(row) - 1, dtype=torch.float64) for row in batch.rows]


def ppo(ratio: Tensor, advantage: Tensor, low: float, high: float, dual: float | None) -> Tensor:
    """Equation 7 of PPO, and equation 5 of Ye et al. around it."""
    value = torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)
    if dual is None:
        return -value
    return -torch.where(advantage < 0, torch.maximum(value, dual * advantage), value)


@some
@given(batches(), st.booleans(), st.data())
def test_policy_gradient(batch: Batch, per_token: bool, data: st.DataObject) -> None:
    reduction = data.draw(reductions(batch))
    given, by_row = advantages(batch, per_token)
    factors, factor_rows = importance(batch, data)
    check(
        batch,
        lambda logp, forest: losses.policy_gradient(logp, forest, given, reduction, importance=factors),
        lambda logp: reduce_tokens([-a * c * p for a, c, p in zip(by_row, factor_rows, logp)], batch.masks, reduction),
    )


@some
@given(batches(), st.booleans(), st.booleans(), st.sampled_from([(0.2, 0.2), (0.1, 0.28)]), st.data())
def test_clipped_ratios_of_tokens(
    batch: Batch, per_token: bool, per_edge: bool, clip: tuple[float, float], data: st.DataObject
) -> None:
    reduction, dual = data.draw(reductions(batch)), data.draw(st.sampled_from([None, 1.1, 3.0]))
    given, by_row = advantages(batch, per_token)
    factors, factor_rows = importance(batch, data)
    old, old_rows = batch.policy(2, per_edge)

    def textbook(logp: Values) -> Tensor:
        terms = zip(logp, old_rows, by_row, factor_rows)
        values = [c * ppo((p - o).exp(), a, *clip, dual) for p, o, a, c in terms]
        return reduce_tokens(values, batch.masks, reduction)

    check(
        batch,
        lambda logp, forest: losses.clipped(
            logp, forest, old, given, clip, reduction, dual_clip=dual, importance=factors
        ),
        textbook,
    )


def sequence_ratio(logp: Tensor, old: Tensor, mask: Tensor) -> Tensor:
    """Equation 7 of GSPO."""
    length = mask.sum()
    return ((mask * (logp - old)).sum() / length).exp() if length > 0 else torch.ones((), dtype=logp.dtype)


@some
@given(batches(), st.booleans(), st.booleans(), st.sampled_from(["sequence", "sequence_token"]), st.data())
def test_clipped_ratios_of_sequences(
    batch: Batch, per_token: bool, per_edge: bool, level: Level, data: st.DataObject
) -> None:
    reduction = data.draw(reductions(batch))
    given, by_row = advantages(batch, per_token)
    old, old_rows = batch.policy(2, per_edge)

    def textbook(logp: Values) -> Tensor:
        values = []
        for p, o, a, m in zip(logp, old_rows, by_row, batch.masks):
            ratio = sequence_ratio(p, o, m)
            ratio = ratio.expand(len(p)) if level == "sequence" else ratio.detach() * p.exp() / p.exp().detach()
            values.append(ppo(ratio, a, 0.05, 0.1, None))
        return reduce_tokens(values, batch.masks, reduction)

    check(
        batch,
        lambda logp, forest: losses.clipped(logp, forest, old, given, (0.05, 0.1), reduction, level=level),
        textbook,
    )


@some
@given(batches(), st.booleans(), st.data())
def test_one_ratio_for_the_rows_of_a_group(batch: Batch, per_edge: bool, data: st.DataObject) -> None:
    groups = data.draw(st.lists(st.integers(0, 2), min_size=len(batch.rows), max_size=len(batch.rows)))
    given, by_row = advantages(batch, False)
    old, old_rows = batch.policy(2, per_edge)

    def textbook(logp: Values) -> Tensor:
        ratios = {}
        for group in set(groups):
            mine = [b for b, other in enumerate(groups) if other == group]
            joined = [torch.cat([values[b] for b in mine]) for values in (logp, old_rows, batch.masks)]
            ratios[group] = sequence_ratio(*joined)
        values = [ppo(ratios[g].expand(len(p)), a, 0.1, 0.1, None) for g, p, a in zip(groups, logp, by_row)]
        return reduce_tokens(values, batch.masks, "row_mean")

    check(
        batch,
        lambda logp, forest: losses.clipped(logp, forest, old, given, 0.1, "row_mean", level="sequence", groups=groups),
        textbook,
    )


@some
@given(batches(), st.booleans(), st.data())
def test_one_ratio_for_every_step_of_a_row(batch: Batch, per_token: bool, data: st.DataObject) -> None:
    steps = [torch.arange(len(row)) // data.draw(st.integers(1, 4)) for row in batch.rows]
    given, by_row = advantages(batch, per_token)
    old, old_rows = batch.policy(2, False)

    def textbook(logp: Values) -> Tensor:
        values = []
        for p, o, a, m, step in zip(logp, old_rows, by_row, batch.masks, steps):
            ratio = torch.stack(
                [sequence_ratio(*(x[step[1:] == s] for x in (p, o, m))) for s in range(int(step[-1]) + 1)]
            )
            values.append(ppo(ratio[step[1:]], a, 0.1, 0.1, None))
        return reduce_tokens(values, batch.masks, "token_mean")

    check(
        batch,
        lambda logp, forest: losses.clipped(logp, forest, old, given, 0.1, level="sequence", groups=steps),
        textbook,
    )


@some
@given(batches(), st.booleans(), st.booleans(), st.sampled_from(["token", "sequence"]), st.data())
def test_clipped_weights(batch: Batch, per_token: bool, per_edge: bool, level: Level, data: st.DataObject) -> None:
    reduction = data.draw(reductions(batch))
    given, by_row = advantages(batch, per_token)
    old, old_rows = batch.policy(2, per_edge)

    def textbook(logp: Values) -> Tensor:
        values = []
        for p, o, a, m in zip(logp, old_rows, by_row, batch.masks):
            ratio = (p - o).exp() if level == "token" else sequence_ratio(p, o, m)
            values.append(-ratio.clamp(0.8, 1.3).detach() * a * p)
        return reduce_tokens(values, batch.masks, reduction)

    check(
        batch,
        lambda logp, forest: losses.cispo(logp, forest, old, given, (0.2, 0.3), reduction, level=level),
        textbook,
    )


@some
@given(batches(), st.sampled_from([0.6, 1.5]))
def test_temperature(batch: Batch, temperature: float) -> None:
    forest, logits = batch.forest, batch.logits
    given, by_row = advantages(batch, False)
    old, old_rows = batch.policy(2, True)

    def textbook(x: Tensor) -> Tensor:
        logp = row_logprobs(x, forest, temperature)
        return reduce_tokens(
            [ppo((p - o).exp(), a, 0.2, 0.2, None) for p, o, a in zip(logp, old_rows, by_row)],
            batch.masks,
            "token_mean",
        )

    def packed(x: Tensor) -> Tensor:
        return losses.clipped(edge_logprobs(x, forest, temperature), forest, old, given)

    assert_equal(value_and_grad(packed, logits), value_and_grad(textbook, logits))


SHARED = Batch([[1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 6, 7]], [[1.0] * 4] * 3, 1)


def test_without_old_log_probabilities_ratios_are_one_and_gradients_are_there() -> None:
    forest, logits, given = SHARED.forest, SHARED.logits, SHARED.per_row(1)
    for level in ("token", "sequence", "sequence_token"):
        got = value_and_grad(
            lambda x: losses.clipped(edge_logprobs(x, forest), forest, None, given, reduction="row_mean", level=level),
            logits,
        )
        plain = value_and_grad(
            lambda x: losses.policy_gradient(edge_logprobs(x, forest), forest, given, "row_mean"), logits
        )
        assert_equal(got[1:], plain[1:])
        assert_equal(got[:1], [-torch.tensor(given, dtype=torch.float64).mean()])


def test_equal_values_of_rows_collapse_to_edges_and_unequal_ones_do_not() -> None:
    """The function decides: what it gives to autograd has a number per edge, or one per edge and row."""
    forest, given = SHARED.forest, SHARED.per_row(1)
    per_edge, equal = SHARED.policy(2, True)
    unequal, _ = SHARED.policy(2, False)
    padded = [torch.cat([row.new_tensor([torch.nan]), row]) for row in equal]
    logp = edge_logprobs(SHARED.logits, forest)
    needed = torch.ones(len(forest.edges.row_index), dtype=torch.bool)
    sizes = [len(align(logp, forest, old, "old_logp", needed).logp) for old in (per_edge, padded, unequal)]
    assert sizes == [len(forest.edges), len(forest.edges), len(needed)] and len(needed) > len(forest.edges)
    assert losses.clipped(logp, forest, padded, given) == losses.clipped(logp, forest, per_edge, given)


def test_what_rows_gave_for_tokens_of_weight_zero_does_not_keep_edges_apart() -> None:
    forest = Forest.from_sequences([[1, 2, 3], [1, 2, 4]], [[0, 1, 1], [0, 0, 1]])
    logp = torch.tensor([-1.0, -2.0, -3.0])
    old = [torch.tensor([0.0, -1.5, -2.5]), torch.tensor([0.0, 7.0, -3.5])]
    terms = align(logp, forest, old, "old_logp", forest.edges.row_weight != 0)
    assert terms.per_edge and terms.other.tolist() == [-1.5, -2.5, -3.5]


def test_tensors_of_a_padded_batch_fit_wherever_rows_do() -> None:
    rows, old = [[1, 2, 3, 4], [1, 2, 5]], [torch.tensor([0.0, -1, -2, -3]), torch.tensor([0.0, -1.5, -2.5])]
    steps = [torch.tensor([0, 0, 1, 1]), torch.tensor([0, 1, 1])]
    padded = Forest.from_padded(torch.tensor([[1, 2, 3, 4], [0, 1, 2, 5]]), torch.tensor([[1, 1, 1, 1], [0, 1, 1, 1]]))
    plain = Forest.from_sequences(rows)
    logp = edge_logprobs(SHARED.logits[:, :5], plain)

    def both(x: list[Tensor]) -> Tensor:
        return torch.stack([x[0], torch.cat([x[1].new_zeros(1), x[1]])])

    def found(forest: Forest, given: list[Any]) -> list[Tensor]:
        factors = losses.importance_weights(given[0], given[1], forest, (0.0, 1.5))
        ratios: dict[str, Any] = {"level": "sequence", "groups": given[2]}
        return [
            losses.clipped(logp, forest, given[0], given[1], importance=factors, **ratios),
            losses.kl(logp, forest, given[0]),
            losses.dpo(logp, forest, given[0], [(0, 1)]),
        ]

    other = [row + torch.linspace(0, 1, len(row)) for row in old]
    assert found(padded, [both(old), both(other), both(steps)]) == found(plain, [old, other, steps])


def test_plausible_mistakes_are_told_apart() -> None:
    """Advantages averaged before the clip, and one row's old log-probabilities for all rows of an edge."""
    forest, logits, given = SHARED.forest, SHARED.logits, [1.5, -1.0, -0.7]
    (old, old_rows), edges = SHARED.policy(2, False), forest.edges

    def textbook(x: Tensor) -> Tensor:
        logp = row_logprobs(x, forest)
        values = [
            ppo((p - o).exp(), torch.tensor(a, dtype=torch.float64), 0.2, 0.2, None)
            for p, o, a in zip(logp, old_rows, given)
        ]
        return reduce_tokens(values, SHARED.masks, "sum")

    expected = value_and_grad(textbook, logits)
    right = value_and_grad(
        lambda x: losses.clipped(edge_logprobs(x, forest), forest, old, given, reduction="sum"), logits
    )
    assert_equal(right, expected)
    first = torch.cat(old)[edges.raw_index[edges.row_offsets[:-1]]]
    mean = float(sum(given)) / 3
    for wrong_old, wrong_advantages in ((first, given), (old, [mean] * 3)):
        wrong = value_and_grad(
            lambda x: losses.clipped(edge_logprobs(x, forest), forest, wrong_old, wrong_advantages, reduction="sum"),
            logits,
        )
        assert misses(wrong, expected)


def test_nothing_that_does_not_count_overflows() -> None:
    forest = Forest.from_sequences([[1, 2, 3], [1, 2, 4]], [[0, 0, 1], [0, 1, 1]])
    logits = SHARED.logits[:, : forest.num_tokens]
    old = [torch.tensor([0.0, -5000.0, -1.0]), torch.tensor([0.0, -3000.0, -2000.0])]
    for level in ("token", "sequence", "sequence_token"):
        value, grad = value_and_grad(
            lambda x: losses.clipped(edge_logprobs(x, forest), forest, old, [1.0, 0.0], level=level), logits
        )
        assert value.isfinite() and grad.isfinite().all() and grad.norm() > 0


def test_ratios_of_sequences_refuse_some_edges_by_name() -> None:
    forest, given = SHARED.forest, SHARED.per_row(1)
    logp = edge_logprobs(SHARED.logits, forest)
    losses.clipped(logp, all_edges(forest), None, given, level="sequence")
    with pytest.raises(CoupledLossError, match=r"sequence.*2 of 6 edges.*additive=False"):
        losses.clipped(logp[:2], some_edges(forest, [0, 2]), None, given, level="sequence")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"clip": [0.1, 0.2, 0.3]}, r"a pair \(low, high\)"),
        ({"clip": (0.1, -0.2)}, r"a pair \(low, high\)"),
        ({"dual_clip": 1.0}, "dual_clip must be greater than 1"),
        ({"level": "row"}, "level must be 'token', 'sequence' or 'sequence_token', got 'row'"),
        ({"groups": [0, 0, 1]}, "groups say what a sequence is"),
        ({"level": "sequence", "groups": [0, 1]}, "groups must be one integer per row"),
        ({"level": "sequence", "groups": torch.tensor([0.5, 1.0, 2.0])}, "groups must be one integer per row"),
        ({"importance": [1.0, -1.0, 1.0]}, "importance must be at least 0"),
        ({"importance": [1.0, float("nan"), 1.0]}, "importance must be finite"),
        ({"reduction": losses.PromptMean([0, 1])}, "one integer per row"),
        ({"reduction": "mean"}, "Constant"),
    ],
)
def test_unfit_arguments_are_refused(arguments: dict[str, Any], words: str) -> None:
    logp = edge_logprobs(SHARED.logits, SHARED.forest)
    with pytest.raises(InputError, match=words):
        losses.clipped(logp, SHARED.forest, None, [1.0, 2.0, 3.0], **arguments)


def test_constants_and_weights_out_of_range_are_refused() -> None:
    with pytest.raises(InputError, match="greater than 0"):
        losses.Constant(0)
    forest = Forest.from_sequences([[1, 2, 3]], [[0, -1, 1]])
    logp = edge_logprobs(SHARED.logits[:, :3], forest)
    with pytest.raises(ForestError, match="at least 0"):
        losses.cispo(logp, forest, None, [1.0], level="sequence", reduction="sum")
