"""Operators that are computed on rows, in batches of all sizes: nothing recompiles for them either."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental import proxy_tensor

from tests.backend.life.test_batches import batch_of, compile_for_all, step
from tests.backend.small import Small
from tests.batches import distinct_tokens
from tests.mixers import CAUSAL, MIXERS, CumulativeSum, Dropout, SequenceSoftmax, Sorted
from tests.oracle import FLOAT64, assert_close, compile_with, loss_of, outcome, stats_of
from tests.spellings import PADDED, SPELLINGS
from treefx.runtime import analyses

SHAPES = [(3, 7), (5, 23), (4, 50), (6, 12), (2, 9), (3, 30), (7, 14), (8, 41), (4, 8), (5, 33), (2, 17), (6, 26)]
ON_ROWS = sorted(set(MIXERS) - set(CAUSAL) - {"one_ahead", "row_scale"})
"""Not: a product that reads one column ahead, of which numbers prove more; a table of eight rows, shorter than the
number that stands for them."""


def steps(model: nn.Module, shapes: list[tuple[int, int]] = SHAPES, padding: Any = None, **options: Any) -> list[int]:
    """Exact and packed steps of all shapes; the compilations up to each."""
    compiled = compile_with(model, **{"inner": "eager", **options})
    compiles = []
    for seed, (rows, columns) in enumerate(shapes):
        side = padding if padding != "both" else ("left", "right")[seed % 2]
        batch = batch_of(rows, columns, seed, side)
        stats = step(compiled, model, batch)
        assert (stats["ran"], stats["fallback"], stats["attention_rewritten"]) == ("packed", None, 1)
        assert stats["expansions"] and (padding is not None or stats["tokens"] == distinct_tokens(batch))
        compiles.append(stats["compiles"])
    return compiles


class Each(nn.Module):
    """The sum of several mixers of one input, each of which is given packed tokens."""

    def __init__(self, *mixers: Any) -> None:
        super().__init__()
        self.mixers = nn.ModuleList(mixer() for mixer in mixers)

    def forward(self, x: Tensor) -> Tensor:
        return sum((mixer(x) for mixer in self.mixers), x) / len(self.mixers)


def model_with(*mixers: Any, attention: Any = SPELLINGS["sdpa_is_causal"]) -> nn.Module:
    return Small(attention, after=Each(*mixers)).double()


@pytest.mark.parametrize("first", range(3))
def test_operators_on_rows_compile_for_the_first_batch_and_then_for_all(first: int) -> None:
    names = ON_ROWS[first::3]
    assert steps(model_with(*(MIXERS[name][0] for name in names)), SHAPES[:4]) == [1, 2, 2, 2], names


def test_twelve_shapes_of_padded_rows() -> None:
    """On the left and on the right, in turn."""
    model = model_with(Sorted, SequenceSoftmax, attention=PADDED["sdpa_padding"])
    assert steps(model, padding="both")[-1] <= 3


def test_random_draws_in_batches_of_all_shapes() -> None:
    """Every cell of the rows draws for itself, as in the eager model."""
    model = Small(SPELLINGS["sdpa_is_causal"], after=Dropout()).double()
    compiled = compile_with(model, inner="eager")
    for seed, (rows, columns) in enumerate(SHAPES[:3]):
        batch = batch_of(rows, columns, seed, None)

        def drawing(run: Any, batch: Any = batch) -> Tensor:
            torch.manual_seed(0)
            return loss_of(batch)(run)

        expected = outcome(model, lambda drawing=drawing: drawing(model))
        assert_close(outcome(model, lambda drawing=drawing: drawing(compiled)), expected, FLOAT64)
        assert stats_of(compiled)["ran"] == "packed" and stats_of(compiled)["compiles"] <= 2


# What numbers prove and symbols do not --------------------------------------------------------------------------------


def contracted_steps() -> None:
    compiled = compile_with(model := model_with(CumulativeSum), inner="eager")
    for rows, columns in SHAPES[:2]:
        step(compiled, model, batch_of(rows, columns, padding=None))
    assert all(item["contracted"] for item in stats_of(compiled)["expansions"])


def test_a_running_sum_stays_read_once_per_token() -> None:
    """It is proved causal for a number of columns: compiled for each, rather than computed on rows to the end."""
    contracted_steps()


def test_asking_symbols_alone_would_leave_it_on_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(analyses, "_gains", lambda analysis: None)
    with pytest.raises(AssertionError, match="contracted"):
        contracted_steps()


# Sizes that a graph computes ------------------------------------------------------------------------------------------


class TimesSize(nn.Module):
    """A factor of three sizes."""

    def forward(self, x: Tensor) -> Tensor:
        return x * (2 * x.shape[0] * x.shape[1])


def steps_of_products() -> None:
    model = Small(SPELLINGS["sdpa_is_causal"], before=TimesSize()).double()
    compiled = compile_for_all(model)
    for rows, columns in SHAPES[:2]:
        assert step(compiled, model, batch_of(rows, columns, padding=None))["compiles"] == 1


def test_products_of_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch writes ``2 * rows`` for ``2 * rows * columns``: such a graph is compiled for every shape."""
    steps_of_products()  # which puts ours in place
    torch._dynamo.reset()
    theirs = proxy_tensor._build_proxy_for_sym_expr.__wrapped__  # type: ignore[attr-defined]
    monkeypatch.setattr(proxy_tensor, "_build_proxy_for_sym_expr", theirs)
    with pytest.raises(AssertionError, match="2 == 1"):
        steps_of_products()
