"""Divergences, entropies and importance weights in float64 against their definitions on separate rows."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.losses.test_surrogates import reductions
from tests.losses.textbook import (
    Batch,
    Values,
    assert_equal,
    batches,
    check,
    misses,
    reduce_tokens,
    value_and_grad,
)
from treefx import Forest, ForestError, InputError, edge_entropy, edge_logprobs, losses

some = settings(max_examples=25)
ESTIMATES = {
    "k1": lambda d: d,
    "k2": lambda d: d**2 / 2,
    "k3": lambda d: torch.exp(-d) - 1 + d,
}


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@some
@given(batches(), st.booleans(), st.sampled_from([None, True, False]), st.data())
def test_kl(estimator: Any, batch: Batch, per_edge: bool, old_per_edge: bool | None, data: st.DataObject) -> None:
    reduction = data.draw(reductions(batch))
    ref, ref_rows = batch.policy(2, per_edge)
    old, old_rows = (None, None) if old_per_edge is None else batch.policy(3, old_per_edge)

    def textbook(logp: Values) -> Tensor:
        values = [ESTIMATES[estimator](p - r) for p, r in zip(logp, ref_rows)]
        if old_rows is not None:
            values = [value * (p - o).exp() for value, p, o in zip(values, logp, old_rows)]
        return reduce_tokens(values, batch.masks, reduction)

    check(
        batch,
        lambda logp, forest: losses.kl(logp, forest, ref, estimator, reduction, old_logp=old),
        textbook,
    )


def row_entropies(x: Tensor, forest: Forest, temperature: float = 1.0) -> Values:
    found = []
    for index in forest.token_of:
        p = torch.softmax(x[0, index[:-1]] / temperature, dim=-1)
        found.append(-(p * p.log()).sum(-1))
    return found


@some
@given(batches(), st.sampled_from([1.0, 0.7, 1.6]), st.data())
def test_entropy(batch: Batch, temperature: float, data: st.DataObject) -> None:
    reduction, forest, logits = data.draw(reductions(batch)), batch.forest, batch.logits
    assert_equal(
        value_and_grad(lambda x: losses.entropy(edge_entropy(x, forest, temperature), forest, reduction), logits),
        value_and_grad(lambda x: reduce_tokens(row_entropies(x, forest, temperature), batch.masks, reduction), logits),
    )


def test_tokens_that_cannot_come_have_no_entropy() -> None:
    forest = Forest.from_sequences([[1, 2, 3], [1, 2, 4]])
    logits = torch.randn(1, 4, 9, dtype=torch.float64)
    logits[..., 5:] = -torch.inf
    allowed = logits[..., :5]
    got = value_and_grad(lambda x: edge_entropy(x, forest).sum(), logits)
    expected = value_and_grad(lambda x: edge_entropy(x, forest).sum(), allowed)
    assert_equal([got[0], got[1][..., :5]], expected)
    assert not got[1][..., 5:].any()


@pytest.mark.parametrize(("has_bias", "softcap"), [(False, None), (True, 4.0)])
def test_entropies_of_hidden_states(has_bias: bool, softcap: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("treefx.logprobs._ROWS_PER_CHUNK", 2)
    forest = Forest.from_sequences([[1, 2, 3, 4], [1, 2, 3, 5], [1, 6]])
    draw = torch.Generator().manual_seed(0)
    shapes = [(1, forest.num_tokens, 8), (23, 8)] + [(23,)] * has_bias
    leaves = [torch.randn(*shape, generator=draw, dtype=torch.float64).requires_grad_() for shape in shapes]
    probe = torch.randn(len(forest.edges), generator=draw, dtype=torch.float64)

    def plain(hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        logits = torch.nn.functional.linear(hidden, weight, bias)
        p = torch.softmax((logits if softcap is None else softcap * (logits / softcap).tanh())[0] / 0.8, -1)
        return -(p * p.log()).sum(-1)[forest.edges.source]

    def fused(hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return edge_entropy(hidden, forest, 0.8, weight=weight, bias=bias, softcap=softcap)

    results = []
    for function in (fused, plain):
        value = function(*leaves)
        results.append([value.detach(), *torch.autograd.grad((probe * value).sum(), leaves)])
    assert_equal(*results)


def test_low_precision_entropies_are_computed_in_float32() -> None:
    forest = Forest.from_sequences([[1, 2, 3], [1, 2, 4]])
    logits = (3 * torch.randn(1, 4, 50)).bfloat16()
    got = edge_entropy(logits, forest)
    assert got.dtype == torch.float32
    assert torch.allclose(got.double(), edge_entropy(logits.double(), forest), atol=1e-5)


def test_log_probabilities_are_no_entropies() -> None:
    forest = Forest.from_sequences([[1, 2, 3], [1, 2, 4]])
    logits = torch.randn(1, 4, 9)
    with pytest.raises(InputError, match="edge_entropy"):
        losses.entropy(edge_logprobs(logits, forest), forest)
    with pytest.raises(ForestError, match=r"one entropy per edge, floats \[3\]"):
        losses.entropy(torch.ones(4), forest)
    with pytest.raises(InputError, match="temperature"):
        edge_entropy(logits, forest, 0.0)
    with pytest.raises(InputError, match="hidden-state form"):
        edge_entropy(logits, forest, softcap=3.0)
    with pytest.raises(InputError, match="'k1', 'k2' or 'k3', got 'k4'"):
        losses.kl(edge_logprobs(logits, forest), forest, torch.zeros(3), "k4")  # type: ignore[arg-type]


def test_estimators_are_told_apart() -> None:
    forest = Forest.from_sequences([[1, 2, 3], [1, 2, 4]])
    logp, ref = -torch.rand(3, dtype=torch.float64), -2 * torch.rand(3, dtype=torch.float64)
    found = {name: value_and_grad(lambda x: losses.kl(x, forest, ref, name), logp) for name in ESTIMATES}  # type: ignore[arg-type]
    assert misses(found["k1"], found["k2"]) and misses(found["k2"], found["k3"]) and misses(found["k3"], found["k1"])


@some
@given(
    batches(),
    st.booleans(),
    st.sampled_from(["truncate", "mask"]),
    st.sampled_from(["token", "sequence"]),
    st.sampled_from([(0.0, 1.1), (0.9, 1.2), (0.0, 0.8), (0.5, float("inf"))]),
)
def test_importance_weights(batch: Batch, per_edge: bool, mode: Any, level: Any, bounds: tuple[float, float]) -> None:
    (old, old_rows), (sampling, sampling_rows) = batch.policy(2, per_edge), batch.policy(3, False)
    metrics = losses.Metrics()
    got = losses.importance_weights(old, sampling, batch.forest, bounds, mode=mode, level=level, metrics=metrics)
    outside, sampled, expected = 0.0, 0.0, []
    for o, s, mask in zip(old_rows, sampling_rows, batch.masks, strict=True):
        difference = torch.where(mask != 0, o - s, 0.0)
        ratio = difference.exp() if level == "token" else difference.sum().exp().expand(len(mask))
        missed = (ratio < bounds[0]) | (ratio > bounds[1])
        kept = ratio.clamp(*bounds) if mode == "truncate" else ratio.masked_fill(missed, 0.0)
        expected.append(torch.where(mask != 0, kept, 1.0))
        outside, sampled = outside + float((mask * missed).sum()), sampled + float(mask.sum())
    assert_equal([row[1:] for row in got], expected)
    assert all(row[0] == 1 for row in got)
    if sampled:
        assert metrics.means()["importance/outside"] == pytest.approx(outside / sampled)
    losses.policy_gradient(edge_logprobs(batch.logits, batch.forest), batch.forest, [1.0] * len(got), importance=got)


@pytest.mark.parametrize("arguments", [{"bounds": (2.0, 1.0)}, {"mode": "clip"}, {"level": "row"}])
def test_unfit_importance_weights_are_refused(arguments: dict[str, Any]) -> None:
    forest = Forest.from_sequences([[1, 2, 3]])
    with pytest.raises(InputError, match="expected|bounds"):
        losses.importance_weights(torch.zeros(2), torch.zeros(2), forest, **arguments)
    with pytest.raises(ForestError, match="sampling_logp must be finite"):
        losses.importance_weights(torch.zeros(2), torch.tensor([0.0, torch.nan]), forest)
