"""DPO, IPO, SimPO, ORPO and KTO in float64 against the textbook's on separate rows."""

from collections.abc import Callable
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
    row_logprobs,
    some_edges,
    value_and_grad,
)
from treefx import CoupledLossError, Forest, InputError, edge_logprobs, losses

some = settings(max_examples=25)
Pairs = list[tuple[int, int]]


@st.composite
def compared(draw: st.DrawFn) -> tuple[Batch, Pairs]:
    """Rows of which some are compared, some in several pairs."""
    batch = draw(batches(every_row_counts=True, least_rows=2))
    row = st.integers(0, len(batch.rows) - 1)
    pair = st.tuples(row, row).filter(lambda both: both[0] != both[1])
    return batch, draw(st.lists(pair, min_size=1, max_size=5))


def row_sums(values: Values, masks: Values) -> list[Tensor]:
    return [(mask * value).sum() for mask, value in zip(masks, values, strict=True)]


def log_sigmoid(x: Tensor) -> Tensor:
    return -torch.log1p(torch.exp(-x))


@some
@given(compared(), st.booleans(), st.sampled_from([0.0, 0.2]), st.sampled_from(["mean", "sum"]))
def test_dpo(drawn: tuple[Batch, Pairs], per_edge: bool, smoothing: float, reduction: Any) -> None:
    batch, pairs = drawn
    ref, ref_rows = batch.policy(2, per_edge)

    def textbook(logp: Values) -> Tensor:
        policy, reference = row_sums(logp, batch.masks), row_sums(ref_rows, batch.masks)
        terms = []
        for w, r in pairs:
            margin = 0.3 * (policy[w] - reference[w] - (policy[r] - reference[r]))
            terms.append(-(1 - smoothing) * log_sigmoid(margin) - smoothing * log_sigmoid(-margin))
        return getattr(torch.stack(terms), reduction)()  # type: ignore[no-any-return]

    check(
        batch,
        lambda logp, forest: losses.dpo(logp, forest, ref, pairs, 0.3, label_smoothing=smoothing, reduction=reduction),
        textbook,
    )


@some
@given(compared(), st.booleans(), st.booleans())
def test_ipo(drawn: tuple[Batch, Pairs], per_edge: bool, by_length: bool) -> None:
    batch, pairs = drawn
    ref, ref_rows = batch.policy(2, per_edge)

    def textbook(logp: Values) -> Tensor:
        h = [p - q for p, q in zip(row_sums(logp, batch.masks), row_sums(ref_rows, batch.masks))]
        h = [value / mask.sum() for value, mask in zip(h, batch.masks)] if by_length else h
        return torch.stack([(h[w] - h[r] - 1 / (2 * 0.4)) ** 2 for w, r in pairs]).mean()

    check(
        batch,
        lambda logp, forest: losses.ipo(logp, forest, ref, pairs, 0.4, length_normalized=by_length),
        textbook,
    )


@some
@given(compared())
def test_simpo(drawn: tuple[Batch, Pairs]) -> None:
    batch, pairs = drawn

    def textbook(logp: Values) -> Tensor:
        mean = [value / mask.sum() for value, mask in zip(row_sums(logp, batch.masks), batch.masks)]
        return torch.stack([-log_sigmoid(2.5 * (mean[w] - mean[r]) - 1.4) for w, r in pairs]).mean()

    check(batch, lambda logp, forest: losses.simpo(logp, forest, pairs, 2.5, 1.4), textbook)


@some
@given(compared(), st.sampled_from(["row_mean", "token_mean", None]))
def test_orpo(drawn: tuple[Batch, Pairs], nll: Any) -> None:
    batch, pairs = drawn

    def textbook(logp: Values) -> Tensor:
        mean = [value / mask.sum() for value, mask in zip(row_sums(logp, batch.masks), batch.masks)]
        odds = [value.exp() / (1 - value.exp()) for value in mean]
        ratio = torch.stack([-0.2 * log_sigmoid(torch.log(odds[w] / odds[r])) for w, r in pairs]).mean()
        if nll == "row_mean":
            return ratio - torch.stack([mean[w] for w, _ in pairs]).mean()
        if nll == "token_mean":
            chosen = torch.cat([batch.masks[w] * logp[w] for w, _ in pairs]).sum()
            return ratio - chosen / torch.cat([batch.masks[w] for w, _ in pairs]).sum()
        return ratio

    check(batch, lambda logp, forest: losses.orpo(logp, forest, pairs, 0.2, nll=nll), textbook)


def test_odds_of_certain_and_of_impossible_rows() -> None:
    forest = Forest.from_sequences([[1, 2], [1, 3]])
    for chosen, rejected in ((-1e-9, -700.0), (-700.0, -1e-9)):
        logp = torch.tensor([chosen, rejected], dtype=torch.float64)
        value, grad = value_and_grad(lambda x: losses.orpo(x, forest, [(0, 1)], nll=None), logp)
        assert value.isfinite() and grad.isfinite().all()


@some
@given(batches(least_rows=2), st.booleans(), st.booleans(), st.data())
def test_kto(batch: Batch, per_edge: bool, measured: bool, data: st.DataObject) -> None:
    count = len(batch.rows)
    good = data.draw(st.lists(st.booleans(), min_size=count, max_size=count))
    mismatched = data.draw(st.lists(st.integers(1, count - 1), max_size=3)) if measured else []
    mismatched = mismatched or ([0] if measured else [])
    ref, ref_rows = batch.policy(2, per_edge)

    def textbook(logp: Values) -> Tensor:
        h = [p - q for p, q in zip(row_sums(logp, batch.masks), row_sums(ref_rows, batch.masks))]
        point = torch.tensor(0.25)
        if measured:
            point = torch.stack([h[b].detach() for b in mismatched]).mean().clamp(min=0)
        terms = []
        for b in range(count):
            if b not in mismatched:
                gain = h[b] - point if good[b] else point - h[b]
                terms.append((1.2 if good[b] else 0.7) * (1 - torch.sigmoid(0.3 * gain)))
        return torch.stack(terms).mean()

    point: dict[str, Any] = {"kl_rows": mismatched} if measured else {"kl": 0.25}
    check(
        batch,
        lambda logp, forest: losses.kto(
            logp, forest, ref, good, 0.3, desirable_weight=1.2, undesirable_weight=0.7, **point
        ),
        textbook,
    )


SHARED = Batch([[1, 2, 3, 4], [1, 2, 3, 5, 6], [1, 2, 7]], [[0, 0, 1, 1], [0, 0, 1, 1, 1], [0, 0, 1]], 3)
PAIRS = [(0, 1), (2, 1)]


def calls(ref: Any) -> dict[str, Callable[[Tensor, Forest], Tensor]]:
    return {
        "dpo": lambda logp, forest: losses.dpo(logp, forest, ref, PAIRS),
        "ipo": lambda logp, forest: losses.ipo(logp, forest, ref, PAIRS),
        "simpo": lambda logp, forest: losses.simpo(logp, forest, PAIRS),
        "orpo": lambda logp, forest: losses.orpo(logp, forest, PAIRS),
        "kto": lambda logp, forest: losses.kto(logp, forest, ref, [True, False, True], kl=0.0),
    }


@pytest.mark.parametrize("name", ["dpo", "ipo", "simpo", "orpo", "kto"])
def test_some_edges_are_refused_by_name(name: str) -> None:
    forest = SHARED.forest
    ref, _ = SHARED.policy(2, True)
    logp = edge_logprobs(SHARED.logits, forest)
    calls(ref)[name](logp, forest)
    with pytest.raises(CoupledLossError, match=rf"{name} reads whole rows.*2 of 6 edges.*additive=False"):
        calls(ref)[name](logp[:2], some_edges(forest, [0, 1]))


def test_wrong_pairs_are_told_apart() -> None:
    """The other way round, and a row of two pairs counted in one of them."""
    forest, logits = SHARED.forest, SHARED.logits
    ref, ref_rows = SHARED.policy(2, True)
    reference = row_sums(ref_rows, SHARED.masks)

    def textbook(x: Tensor) -> Tensor:
        policy = row_sums(row_logprobs(x, forest), SHARED.masks)
        h = [p - q for p, q in zip(policy, reference)]
        return torch.stack([-log_sigmoid(0.1 * (h[w] - h[r])) for w, r in PAIRS]).mean()

    expected = value_and_grad(textbook, logits)
    right = value_and_grad(lambda x: calls(ref)["dpo"](edge_logprobs(x, forest), forest), logits)
    assert_equal(right, expected)
    swapped = value_and_grad(
        lambda x: losses.dpo(edge_logprobs(x, forest), forest, ref, [(r, w) for w, r in PAIRS]), logits
    )
    once = value_and_grad(lambda x: losses.dpo(edge_logprobs(x, forest), forest, ref, PAIRS[:1]), logits)
    assert misses(swapped, expected) and misses(once, expected)


def test_what_both_rows_of_a_pair_share_gets_no_gradient() -> None:
    forest = Forest.from_sequences([[1, 2, 3, 4], [1, 2, 3, 5]])
    ref = -torch.ones(len(forest.edges), dtype=torch.float64)
    _, grad = value_and_grad(
        lambda x: losses.dpo(x, forest, ref, [(0, 1)]), -2 * torch.rand(len(forest.edges), dtype=torch.float64)
    )
    assert [bool(g == 0) for g in grad] == [True, True, False, False]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda logp, f: losses.dpo(logp, f, logp, [(0, 3)]), "rows from 0 to 2, got 0 to 3"),
        (lambda logp, f: losses.dpo(logp, f, logp, [(0, 1), (1, 1)]), "pair 1 compares row 1 with itself"),
        (lambda logp, f: losses.dpo(logp, f, logp, [0, 1]), r"pairs must be \[P, 2\]"),
        (lambda logp, f: losses.dpo(logp, f, logp, []), r"pairs must be \[P, 2\]"),
        (lambda logp, f: losses.dpo(logp, f, logp, PAIRS, 0.0), "beta must be greater than 0"),
        (lambda logp, f: losses.dpo(logp, f, logp, PAIRS, label_smoothing=0.5), "label_smoothing"),
        (lambda logp, f: losses.dpo(logp, f, logp, PAIRS, reduction="token_mean"), "'mean' or 'sum'"),
        (lambda logp, f: losses.dpo(logp, f, logp * float("nan"), PAIRS), "ref_logp must be finite"),
        (lambda logp, f: losses.dpo(logp, f, logp[1:], PAIRS), "ref_logp must be a tensor"),
        (lambda logp, f: losses.orpo(logp, f, PAIRS, nll="sum"), "nll must be"),
        (lambda logp, f: losses.kto(logp, f, logp, [True, False, True]), "kl_rows="),
        (lambda logp, f: losses.kto(logp, f, logp, [True, False, True], kl=0.0, kl_rows=[0]), "kl_rows="),
        (lambda logp, f: losses.kto(logp, f, logp, [True, False, True], kl=-1.0), "at least 0"),
        (lambda logp, f: losses.kto(logp, f, logp, [1, 0, 1], kl=0.0), "one bool per row"),
        (lambda logp, f: losses.kto(logp, f, logp, [True, False, True], kl_rows=[3]), "kl_rows must be row numbers"),
        (lambda logp, f: losses.kto(logp, f, logp, [True] * 3, kl_rows=[0, 1, 2]), "none is left"),
    ],
)
def test_unfit_arguments_are_refused(call: Callable[[Tensor, Forest], Tensor], words: str) -> None:
    with pytest.raises(InputError, match=words):
        call(edge_logprobs(SHARED.logits, SHARED.forest), SHARED.forest)


@pytest.mark.parametrize("name", ["ipo", "simpo", "orpo"])
def test_means_over_no_tokens_are_refused(name: str) -> None:
    forest = Forest.from_sequences(SHARED.rows, [*SHARED.weights[:2], [0, 0, 0]])
    ref, _ = SHARED.policy(2, True)
    with pytest.raises(InputError, match=f"{name} compares means over tokens, but the weights of row 2 sum to 0"):
        calls(ref)[name](edge_logprobs(SHARED.logits, forest), forest)
