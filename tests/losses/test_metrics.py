"""Metrics weigh every token as often as its rows do, and add up over parts."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.losses.test_preferences import Pairs, compared, row_sums
from tests.losses.textbook import Batch, Values, batches, row_logprobs, some_edges
from treefx import Forest, edge_logprobs, losses
from treefx.losses.metrics import all_or_nothing

some = settings(max_examples=25)


def mean(values: Values, masks: Values) -> float:
    """Over all tokens of all rows, by weight."""
    total = float(torch.cat(masks).sum())
    return float((torch.cat(masks) * torch.cat(values)).sum()) / total if total else float("nan")


def assert_means(metrics: losses.Metrics, expected: dict[str, float]) -> None:
    got = metrics.means()
    assert set(got) == {name for name, value in expected.items() if value == value}
    for name, value in got.items():
        assert value == pytest.approx(expected[name], rel=1e-10, abs=1e-12), name


@some
@given(batches(), st.booleans(), st.booleans())
def test_clip_ratios_of_tokens(batch: Batch, per_edge: bool, by_token: bool) -> None:
    forest, metrics = batch.forest, losses.Metrics()
    given: Any = batch.per_token(1) if by_token else batch.per_row(1)
    given[0] = given[0] * 0
    signs = [a[1:] if by_token else torch.full((len(row) - 1,), a) for a, row in zip(given, batch.rows, strict=True)]
    old, old_rows = batch.policy(2, per_edge)
    logp = edge_logprobs(batch.logits, forest)
    factors = [row.relu() for row in batch.per_token(3)]
    losses.clipped(logp, forest, old, given, (0.1, 0.3), dual_clip=1.2, importance=factors, metrics=metrics)
    logs = [p - o for p, o in zip(row_logprobs(batch.logits, forest), old_rows, strict=True)]
    low = [(x.exp() < 0.9) & (a < 0) for x, a in zip(logs, signs, strict=True)]
    high = [(x.exp() > 1.3) & (a > 0) for x, a in zip(logs, signs, strict=True)]
    dual = [(x.exp() > 1.2) & (a < 0) for x, a in zip(logs, signs, strict=True)]
    expected = {
        "clip_ratio/low_mean": mean(low, batch.masks),
        "clip_ratio/high_mean": mean(high, batch.masks),
        "clip_ratio/region_mean": mean([a | b for a, b in zip(low, high, strict=True)], batch.masks),
        "clip_ratio/dual_mean": mean(dual, batch.masks),
        "ratio": mean([x.exp() for x in logs], batch.masks),
        "approx_kl": mean([-x for x in logs], batch.masks),
    }
    assert_means(metrics, expected)


@some
@given(batches(every_row_counts=True), st.booleans())
def test_clip_ratios_of_sequences_count_every_sequence_alike(batch: Batch, per_edge: bool) -> None:
    forest, metrics, given = batch.forest, losses.Metrics(), batch.per_row(1)
    old, old_rows = batch.policy(2, per_edge)
    losses.clipped(
        edge_logprobs(batch.logits, forest), forest, old, given, 0.05, "row_mean", level="sequence", metrics=metrics
    )
    logs = []
    for p, o, m in zip(row_logprobs(batch.logits, forest), old_rows, batch.masks, strict=True):
        logs.append((m * (p - o)).sum() / m.sum())
    ratio, sign = torch.stack(logs).exp(), torch.tensor(given)
    low, high = ((ratio < 0.95) & (sign < 0)).double(), ((ratio > 1.05) & (sign > 0)).double()
    expected = {
        "clip_ratio/low_mean": float(low.mean()),
        "clip_ratio/high_mean": float(high.mean()),
        "clip_ratio/region_mean": float((low + high).mean()),
        "ratio": float(ratio.mean()),
        "approx_kl": float(-torch.stack(logs).mean()),
    }
    assert_means(metrics, expected)


@some
@given(batches(), st.booleans())
def test_divergence_entropy_and_clipped_weights(batch: Batch, per_edge: bool) -> None:
    forest, metrics, given = batch.forest, losses.Metrics(), batch.per_row(1)
    other, other_rows = batch.policy(2, per_edge)
    logp = edge_logprobs(batch.logits, forest)
    losses.kl(logp, forest, other, "k2", "row_mean", metrics=metrics)
    losses.cispo(logp, forest, other, given, (1.0, 0.1), "row_mean", metrics=metrics)
    by_source = torch.rand(forest.num_tokens, dtype=torch.float64)
    losses.entropy(by_source[forest.edges.source], forest, "sum", metrics=metrics)
    logs = [p - o for p, o in zip(row_logprobs(batch.logits, forest), other_rows, strict=True)]
    clipped = [(x.exp() > 1.1) & (a > 0) for x, a in zip(logs, given, strict=True)]
    expected = {
        "kl": mean([x**2 / 2 for x in logs], batch.masks),
        "cispo_clip_ratio": mean(clipped, batch.masks),
        "entropy": mean([by_source[index[:-1]] for index in forest.token_of], batch.masks),
    }
    assert_means(metrics, expected)


@some
@given(compared())
def test_rewards_of_pairs(drawn: tuple[Batch, Pairs]) -> None:
    (batch, pairs), metrics = drawn, losses.Metrics()
    ref, ref_rows = batch.policy(2, False)
    losses.dpo(edge_logprobs(batch.logits, batch.forest), batch.forest, ref, pairs, 0.3, metrics=metrics)
    policy = row_sums(row_logprobs(batch.logits, batch.forest), batch.masks)
    rewards = [0.3 * (p - r) for p, r in zip(policy, row_sums(ref_rows, batch.masks), strict=True)]
    better, worse = torch.stack([rewards[w] for w, _ in pairs]), torch.stack([rewards[r] for _, r in pairs])
    expected = {
        "rewards/chosen": float(better.mean()),
        "rewards/rejected": float(worse.mean()),
        "rewards/margins": float((better - worse).mean()),
        "rewards/accuracies": float((better > worse).double().mean()),
        "logps/chosen": float(torch.stack([policy[w] for w, _ in pairs]).mean()),
        "logps/rejected": float(torch.stack([policy[r] for _, r in pairs]).mean()),
    }
    assert_means(metrics, expected)


SHARED = Batch([[1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 6]], [[0, 1, 1, 1], [0, 0, 1, 1], [0, 1, 2]], 5)


def test_parts_add_up_and_edges_counted_once_would_not() -> None:
    forest, given = SHARED.forest, SHARED.per_row(1)
    (ref, _), logp = SHARED.policy(2, True), edge_logprobs(SHARED.logits, SHARED.forest)
    whole, parts = losses.Metrics(), losses.Metrics()

    def record(metrics: losses.Metrics, values: torch.Tensor, part: Forest) -> None:
        losses.clipped(values, part, ref, given, 0.01, metrics=metrics)
        losses.kl(values, part, ref, metrics=metrics)

    record(whole, logp, forest)
    for chosen in ([0, 3], [1, 2, 4]):
        record(parts, logp[chosen], some_edges(forest, chosen))
    assert_means(parts, whole.means())
    differences = logp - ref
    once = (torch.exp(-differences) - 1 + differences).mean()
    assert float(once) != pytest.approx(whole.means()["kl"], rel=1e-2)


def test_metrics_of_kto_and_orpo_have_trainers_names() -> None:
    forest, metrics = SHARED.forest, losses.Metrics()
    logp = edge_logprobs(SHARED.logits, forest)
    losses.kto(logp, forest, logp - 0.1, [True, True, False], kl_rows=[0], metrics=metrics)
    assert metrics.means() == pytest.approx(
        {
            "kl": 0.3,
            "rewards/chosen": 0.02,
            "rewards/rejected": 0.03,
            "logps/chosen": float(logp[1] + logp[3]),
            "logps/rejected": float(logp[0] + 2 * logp[4]),
        }
    )
    losses.orpo(logp, forest, [(0, 1)], metrics=metrics)
    assert {"nll_loss", "log_odds_chosen", "log_odds_ratio"} < set(metrics.means())
    metrics.clear()
    assert metrics.means() == {}


def test_what_failed_around_is_forgotten_too() -> None:
    """A plan is run again inside of a step that another rank may end."""
    metrics, values = losses.Metrics(), torch.ones(2)
    metrics.add("kept", values, values)
    with pytest.raises(ValueError, match="other rank"), all_or_nothing():
        metrics.add("around", values, values)
        with all_or_nothing():
            metrics.add("kept", values, values)
        raise ValueError("other rank")
    assert set(metrics.totals) == {"kept"}
    assert metrics.totals["kept"].tolist() == [2.0, 2.0]
