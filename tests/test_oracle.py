"""The oracle itself: its two references agree, and it sees the mistakes it is there for."""

import math

import pytest
import torch
from torch import nn

from tests.batches import IGNORED, Batch, distinct_tokens, padded, shared_batch
from tests.models import TinyLM, double, zoo
from tests.oracle import Outcome, assert_close, eager_step, relative_errors, separate_rows
from tests.spellings import PADDED, SPELLINGS


def weights_of(batch: Batch) -> list[list[float]]:
    """What each token of each row weighs in the mean over all labels."""
    assert batch.labels is not None and batch.attention_mask is not None
    counts = (batch.labels[:, 1:] != IGNORED).sum().double()
    kept = [labels[mask.bool()] for labels, mask in zip(batch.labels, batch.attention_mask, strict=True)]
    return [((labels != IGNORED) / counts).tolist() for labels in kept]


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2"])
def test_padded_batch_equals_separate_rows(name: str) -> None:
    batch, model = shared_batch(rows=5, length=14, shared=6), double(name)
    assert_close(eager_step(model, batch), separate_rows(model, batch.rows(), weights_of(batch)), 1e-12)


def test_left_padding_equals_separate_rows_where_positions_do_not_count() -> None:
    batch = shared_batch(rows=5, length=14, shared=6, vocab=61, padding="left")
    model = TinyLM(PADDED["sdpa_padding"], positions=False).double()
    weights = weights_of(batch)

    class Rows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, input_ids: torch.Tensor) -> object:
            return self.model(input_ids, torch.ones_like(input_ids))

    separate = separate_rows(Rows(), batch.rows(), weights)
    renamed = {name.removeprefix("model."): g for name, g in separate.gradients.items()}
    assert_close(eager_step(model, batch), Outcome(separate.loss, renamed), 1e-12)


def test_float64_has_no_casts_left() -> None:
    """Weights that differ in the eleventh digit give a loss that differs about there."""
    for name in ("llama", "gpt2", "gemma2", "qwen3", "mistral"):
        batch, model = shared_batch(rows=3, length=10, shared=5), double(name)
        before = eager_step(model, batch).loss
        with torch.no_grad():
            next(model.parameters())[11:99, 0] += 1e-11
        after = eager_step(model, batch).loss
        assert 0 < abs(float(after - before)) < 1e-9, name


def one_gradient(*values: float, loss: float = 1.0) -> Outcome:
    return Outcome(torch.tensor(loss), {"weight": torch.tensor(values)})


@pytest.mark.parametrize(
    "wrong",
    [
        one_gradient(1.0, 2.1),
        one_gradient(1.0, 2.0, loss=1.1),
        one_gradient(1.0, math.nan),
        one_gradient(1.0, math.inf),
        one_gradient(1.0, 2.0, loss=math.nan),
        one_gradient(0.0, 0.0),
        Outcome(torch.tensor(1.0), {"weight": None}),
    ],
    ids=["gradient", "loss", "nan", "infinity", "nan_loss", "zero", "missing"],
)
def test_wrong_outcomes_are_named(wrong: Outcome) -> None:
    right = one_gradient(1.0, 2.0)
    assert_close(right, right, 1e-12)
    with pytest.raises(AssertionError, match="weight|loss"):
        assert_close(wrong, right, 1e-2)


def test_wrong_positions_and_masks_are_seen() -> None:
    """What a backend could get wrong on shared rows is far beyond every tolerance."""
    batch, model = shared_batch(rows=4, length=14, shared=6), zoo("llama")
    expected = eager_step(model, batch)
    for columns, wrong in {
        "positions": torch.arange(14).expand(4, 14) * 2,
        "one_position": torch.arange(14).expand(4, 14).clone().index_fill(1, torch.tensor([9]), 10),
    }.items():
        got = eager_step(model, Batch(batch.input_ids, batch.attention_mask, batch.labels, wrong))
        assert max(relative_errors(got, expected).values()) > 1e-3, columns


def test_attention_weighs_in() -> None:
    """Another spelling's mask on the same weights moves the gradients: masks are not idle."""
    batch = shared_batch(rows=4, length=17, shared=7, vocab=61, padding=None, seed=1)
    states = [TinyLM(SPELLINGS[name]).double() for name in ("additive_triu", "chunked", "alibi")]
    for other in states[1:]:
        other.load_state_dict(states[0].state_dict())
        errors = relative_errors(eager_step(other, batch), eager_step(states[0], batch))
        assert max(errors.values()) > 1e-2


def test_distinct_tokens() -> None:
    batch = padded([[5, 6, 7], [5, 6, 8], [5, 6], [6]], "left")
    assert distinct_tokens(batch, "own") == 5
    assert distinct_tokens(batch) == 4 + 2 + 1
    assert distinct_tokens(batch.without("attention_mask")) == 4 + 3 + 2
    assert distinct_tokens(padded([[5, 6, 7], [5, 6, 8], [5, 6], [6]])) == 5


def test_shared_batches_share() -> None:
    for padding in ("right", "left", None):
        batch = shared_batch(rows=4, length=16, shared=6, padding=padding)
        rows = batch.rows()
        assert max(map(len, rows)) == 16
        assert len({tuple(row[:6]) for row in rows}) == 1
        assert distinct_tokens(batch, "own") < sum(map(len, rows))
        assert batch.labels is not None and (batch.labels == IGNORED).any()
