"""Integers that come with a call and say how much of it is wanted (``logits_to_keep``): others compile nothing."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.backend.life.test_batch_numbers import Alibi, Convolved
from tests.backend.life.test_batches import batch_of
from tests.backend.small import Small
from tests.batches import Batch
from tests.mixers import Sorted
from tests.models import double
from tests.oracle import FLOAT64, assert_close, outcome, stats_of
from tests.spellings import SPELLINGS
from treefx.inputs import sizes
from treefx.runtime import compiled_graph

SHAPES = [(3, 17), (5, 23), (4, 50), (3, 17), (3, 17)]
KEPT = [5, 6, 3, 9, 11, 2, 8, 7, 4, 12]


class Last(nn.Module):
    """The logits of the last columns, as transformers slices them."""

    def __init__(self, model: nn.Module | None = None) -> None:
        super().__init__()
        self.model = model or Small(SPELLINGS["sdpa_is_causal"])

    def forward(self, input_ids: Tensor, logits_to_keep: int) -> Tensor:
        return self.model(input_ids).logits[:, -logits_to_keep:, :]


def loss(run: Any, batch: Batch, kept: int) -> Tensor:
    """Every logit has another weight."""
    found = run(input_ids=batch.input_ids, logits_to_keep=kept)
    logits = found if isinstance(found, Tensor) else found.logits
    weight = torch.linspace(0.5, 2.0, logits[..., 0].numel(), dtype=logits.dtype).view(logits.shape[:2])
    return (logits.square() * weight[..., None]).mean()


def steps(model: nn.Module, kept: list[int], dynamic: bool | None = None, **options: Any) -> list[int]:
    """Exact steps over batches of several shapes; the compilations up to each."""
    settings = {"inner": "eager", "min_sharing": 1.0, **options}
    compiled, compiles = torch.compile(model, backend="treefx", options=settings, dynamic=dynamic), []
    for seed, number in enumerate(kept):
        batch = batch_of(*SHAPES[seed % len(SHAPES)], seed, None)
        expected = outcome(model, lambda batch=batch, number=number: loss(model, batch, number))
        got = outcome(model, lambda batch=batch, number=number: loss(compiled, batch, number))
        assert_close(got, expected, FLOAT64)
        stats = stats_of(compiled)
        assert stats["fallback"] is None
        compiles.append(stats["compiles"])
    return compiles


def test_logits_to_keep_compiles_twice() -> None:
    assert steps(Last().double(), KEPT)[-1] == 2


def test_inductor() -> None:
    """All that depends on sizes in one graph: numbers of the batch in a bias, a convolution, an operator on rows."""
    model = Small(Alibi, before=Convolved(), after=Sorted())
    assert steps(Last(model).double(), KEPT[:2], inner="inductor", dynamic=True) == [1, 1]


def test_logits_to_keep_in_calls_that_do_not_run_packed() -> None:
    assert steps(Last().double(), KEPT[:6], min_sharing=100.0)[-1] == 2


def test_numbers_that_are_not_below_the_columns() -> None:
    """All columns, more than there are, none, one, and those behind the first ones: each kind compiles for itself."""
    compiles = steps(Last().double(), [5, 6, 17, 22, 50, 50, 20, 0, 1, -2, 9, 10, 16, 22])
    assert compiles[-4] == compiles[-1] <= 9


def test_a_first_batch_that_is_kept_whole_speaks_for_itself_alone() -> None:
    """All columns are a separate case, with sizes as numbers; later cases compile for all."""
    assert steps(Last().double(), [5, 23, 6, 9, 12, 3, 8])[-1] <= 3


def test_numbers_left_as_they_are_would_compile_each_value(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_graph, "numbers_as_tensors", lambda gm, roles: (gm, {}))
    assert steps(Last().double(), KEPT[:3]) == [1, 2, 3]


def with_labels(run: Any, batch: Batch, kept: int) -> Tensor:
    """ms-swift's: the labels of the columns that are kept, in the model's own loss."""
    labels = batch.input_ids[:, -kept:].clone()
    labels[0, 0] = -100
    value: Tensor = run(input_ids=batch.input_ids, labels=labels, logits_to_keep=kept).loss
    return value


def labelled_steps(kept_columns: list[int] = KEPT) -> int:
    model = double("llama", num_hidden_layers=1)
    compiled = torch.compile(model, backend="treefx", dynamic=True, options={"inner": "eager"})
    for seed, kept in enumerate(kept_columns):
        batch = batch_of(*SHAPES[seed % len(SHAPES)], seed, None)
        if kept == len(batch.input_ids):  # labels [B, B] are a case of their own
            continue
        expected = outcome(model, lambda batch=batch, kept=kept: with_labels(model, batch, kept))
        assert_close(outcome(model, lambda batch=batch, kept=kept: with_labels(compiled, batch, kept)), expected, 1e-6)
        assert stats_of(compiled)["ran"] == "packed" and stats_of(compiled)["fallback"] is None
    return int(stats_of(compiled)["compiles"])


def test_labels_of_the_kept_columns_compile_nothing() -> None:
    assert labelled_steps() == 1


def test_labels_whose_number_has_no_name_would_compile_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizes, "_numbers_of_caller", lambda known, args: {})
    assert labelled_steps(KEPT[:2]) == 2


def test_a_graph_of_numbers_alone() -> None:
    """It has no tensor that another one could join."""
    compiled = torch.compile(lambda n: torch.ones(n).cumsum(0), backend="treefx", options={"inner": "eager"})
    for number in (4, 5, 6):
        assert torch.equal(compiled(number), torch.arange(1.0, number + 1))
