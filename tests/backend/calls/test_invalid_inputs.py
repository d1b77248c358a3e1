"""Where eager raises, treefx raises: labels, ids and indices out of range, at padding and at ignored positions too."""

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.backend.masked import VOCAB, batch_of, causal
from tests.backend.support import compile_with, in_case
from tests.oracle import FLOAT64, assert_close, outcome, stats_of
from treefx.kernels.expand import entries
from treefx.passes.packing import emit_losses
from treefx.passes.packing.vocab_tail import surprise
from treefx.runtime.padding import Padding

WIDTH, KINDS = 16, 5
REAL, PADDED = (0, 5), (1, 11)
"""A cell of a token, and one of padding, in a batch that is padded on the right."""

Loss = Callable[[Tensor, Tensor], Tensor]
"""Logits [R, V] and labels [R] -> scalar."""
Extra = Callable[["LM", Tensor, Tensor], Tensor]
"""Model, embedded tokens [B, T, C] and one more input [B, T] -> [B, T, C]."""


class LM(nn.Module):
    """A causal LM of one layer with a given loss, and a given use of one more input."""

    def __init__(self, loss: Loss, extra: Extra | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.qkv, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, 48), nn.Linear(WIDTH, VOCAB)
        self.kinds, self.loss, self.extra = nn.Embedding(KINDS, WIDTH), loss, extra
        self.double()

    def forward(self, ids: Tensor, mask: Tensor, labels: Tensor, more: Tensor) -> Tensor:
        x = self.embed(ids)
        x = x if self.extra is None else self.extra(self, x, more)
        q, k, v = self.qkv(x)[:, None].chunk(3, -1)
        x = x + F.scaled_dot_product_attention(q, k, v, causal(q) & mask[:, None, None].bool())[:, 0]
        return self.loss(self.head(x)[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits, labels)


def ignoring_minus_one(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits, labels.masked_fill(labels == -100, -1), ignore_index=-1)


def ignoring_a_token(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits, labels.masked_fill(labels == -100, 9), ignore_index=9)


def smoothed(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits, labels, label_smoothing=0.1)


def weighted(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits, labels, weight=torch.linspace(0.5, 2.0, VOCAB, dtype=logits.dtype))


def likelihood(logits: Tensor, labels: Tensor) -> Tensor:
    return F.nll_loss(logits.log_softmax(-1), labels, reduction="sum")


def kept(labels: Tensor) -> Tensor:
    return labels != -100


def gathered(logits: Tensor, labels: Tensor) -> Tensor:
    chosen = labels.masked_fill(~kept(labels), 0)[:, None]
    return -(logits.log_softmax(-1).gather(-1, chosen)[:, 0] * kept(labels)).sum()


def taken(logits: Tensor, labels: Tensor) -> Tensor:
    chosen = labels.masked_fill(~kept(labels), 0)[:, None]
    return -(torch.take_along_dim(logits.log_softmax(-1), chosen, -1)[:, 0] * kept(labels)).sum()


def indexed(logits: Tensor, labels: Tensor) -> Tensor:
    """Negative indices count from the end here, in eager as well."""
    chosen = labels.masked_fill(~kept(labels), 0)
    return -(logits.log_softmax(-1)[torch.arange(len(chosen)), chosen] * kept(labels)).sum()


LOSSES: tuple[Loss, ...] = (
    cross_entropy, ignoring_minus_one, ignoring_a_token, smoothed, weighted, likelihood, gathered, taken, indexed
)  # fmt: skip


def named(item: Any) -> str:
    return str(getattr(item, "__name__", item))


def outcome_of(model: LM, run: Any, given: tuple[Tensor, ...]) -> Any:
    """Loss and gradients, or the error."""
    try:
        return outcome(model, lambda: run(*given))
    except Exception as error:  # noqa: BLE001
        return error


class Checker:
    """A model in eager mode and compiled once: equal numbers, or errors of one kind."""

    def __init__(self, model: LM, **options: Any) -> None:
        self.eager, self.model = model, copy.deepcopy(model)
        self.compiled = compile_with(self.model, **options)

    def check(self, given: tuple[Tensor, ...]) -> Any:
        """Run a batch both ways; the error, or None."""
        expected, got = outcome_of(self.eager, self.eager, given), outcome_of(self.model, self.compiled, given)
        if not isinstance(expected, Exception):
            assert not isinstance(got, Exception), f"eager has a result, but treefx raises {got!r}"
            assert_close(got, expected, FLOAT64)
            assert stats_of(self.compiled)["fallback"] is None
            return None
        assert isinstance(got, type(expected)), f"eager raises {expected!r}, but treefx {got!r}"
        return got


def batch(cell: tuple[int, int] | None = None, label: int = 0) -> tuple[Tensor, ...]:
    """ids, mask, labels and one more input in [0, KINDS), padded on the right; one label given."""
    ids, mask, labels = batch_of("right")
    if cell is not None:
        labels[cell] = label
    return ids, mask, labels, ids % KINDS


@pytest.mark.parametrize("loss", LOSSES, ids=named)
def test_labels_out_of_range(loss: Loss) -> None:
    """At tokens and at padding; an error leaves nothing behind for valid labels."""
    checker = Checker(LM(loss))
    for label, cell in itertools.product((-1, -99, VOCAB), (REAL, PADDED)):
        with in_case(f"label {label} at {cell}"):
            error = checker.check(batch(cell, label))
            wraps = label == -1 and loss in (indexed, ignoring_minus_one)
            assert (error is None) == wraps or loss is taken  # which counts from the end, whatever the index
            assert error is None or loss in (indexed, weighted) or str(label) in str(error)
    assert checker.check(batch()) is None


@pytest.mark.parametrize("loss", [cross_entropy, gathered], ids=named)
def test_labels_out_of_range_of_logits_in_chunks(loss: Loss) -> None:
    checker = Checker(LM(loss), max_logits=1)
    for label in (-1, VOCAB, VOCAB + 400):
        with in_case(label):
            assert checker.check(batch(REAL, label)) is not None


@pytest.mark.parametrize("loss", [cross_entropy, gathered], ids=named)
def test_a_label_that_reads_zero_is_noticed(loss: Loss, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plausible mistake: all negative labels count as ignored."""
    monkeypatch.setattr(emit_losses, "entries", lambda target, size, ignored: target.clamp(min=-1))
    with pytest.raises(AssertionError, match="eager raises"):
        Checker(LM(loss)).check(batch(REAL, -2))


@pytest.mark.parametrize("dtype", [torch.int32, torch.bool], ids=named)
@pytest.mark.parametrize("loss", [likelihood, smoothed], ids=named)
def test_dtypes_of_labels(loss: Loss, dtype: torch.dtype) -> None:
    """Labels of 32 bits are an error of the loss, not of the tracer."""
    ids, mask, labels, more = batch()
    Checker(LM(loss)).check((ids, mask, labels.clamp(min=0).to(dtype), more))


def test_targets_of_the_operators() -> None:
    hidden, weight = torch.ones(2, 4), torch.ones(300, 4)
    slot = torch.tensor([0, 1])
    with pytest.raises(IndexError, match="300"):
        surprise(hidden, weight, None, slot, torch.tensor([3, 556]), 1.0, None, 128)
    assert entries(torch.tensor([3, 7, -5]), 8, -5).tolist() == [3, 7, -1]


# Lookups --------------------------------------------------------------------------------------------------------------


def embedded(model: LM, x: Tensor, more: Tensor) -> Tensor:
    return x + model.kinds(more)


def embedded_above_zero(model: LM, x: Tensor, more: Tensor) -> Tensor:
    return x + model.kinds(more.clamp(min=0))


def indexed_table(model: LM, x: Tensor, more: Tensor) -> Tensor:
    return x + model.kinds.weight[more]


def selected(model: LM, x: Tensor, more: Tensor) -> Tensor:
    return x + model.kinds.weight.index_select(0, more.flatten()).view(x.shape)


def one_hot(model: LM, x: Tensor, more: Tensor) -> Tensor:
    return x + F.one_hot(more, KINDS).to(x.dtype) @ model.kinds.weight


def checked(model: LM, x: Tensor, more: Tensor) -> Tensor:
    torch._assert_async(((more >= 0) & (more < KINDS)).all(), "kinds")
    return x + more[..., None]


def scattered(model: LM, x: Tensor, more: Tensor) -> Tensor:
    return x + torch.zeros_like(x[..., :KINDS]).scatter(-1, more[..., None], 1.0) @ model.kinds.weight


EXTRAS: tuple[Extra, ...] = (
    embedded, embedded_above_zero, indexed_table, selected, one_hot, checked, scattered
)  # fmt: skip


@pytest.mark.parametrize("extra", EXTRAS, ids=named)
def test_indices_out_of_range_at_padding(extra: Extra) -> None:
    """Padding that is dropped is not looked up; an error leaves nothing behind for valid indices."""
    checker = Checker(LM(cross_entropy, extra))
    for index in (-1, -KINDS - 1, KINDS):
        *given, more = batch()
        more[PADDED] = index
        valid = (extra is indexed_table and index == -1) or (extra is embedded_above_zero and index < 0)
        with in_case(index):
            assert (checker.check((*given, more)) is None) == valid
    assert checker.check(batch()) is None


@pytest.mark.parametrize("padding", ["auto", "drop"])
def test_token_ids_of_padding(padding: str) -> None:
    checker = Checker(LM(cross_entropy), padding=padding)
    for token, side in itertools.product((VOCAB, -100), ("right", "left")):
        ids, mask, labels = batch_of(side)
        with in_case(f"{token}, {side}"):
            error = checker.check((ids.masked_fill(mask == 0, token), mask, labels, ids % KINDS))
            assert isinstance(error, IndexError) and str(token) in str(error)


def test_padding_that_is_not_looked_up_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Padding, "check_lookups", lambda self, grid: None)
    with pytest.raises(AssertionError, match="eager raises"):
        test_token_ids_of_padding("auto")
