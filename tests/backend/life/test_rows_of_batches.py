"""Operators that are computed on rows, in batches of all sizes: nothing is compiled anew for them either."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental import proxy_tensor

from tests.backend.life.test_batches import batch_of, compile_for_all, step
from tests.batches import distinct_tokens
from tests.mixers import CAUSAL, MIXERS, CumulativeSum, SequenceSoftmax, Sorted
from tests.models import TinyLM
from tests.oracle import compile_with, stats_of
from tests.spellings import PADDED, SPELLINGS
from treefx.bench.zoo.run import check_model
from treefx.runtime import analyses

pytestmark = pytest.mark.sample(10)

SHAPES = [(3, 7), (5, 23), (4, 50), (6, 12), (2, 9), (3, 30), (7, 14), (8, 41), (4, 8), (5, 33), (2, 17), (6, 26)]
ON_ROWS = sorted(set(MIXERS) - set(CAUSAL) - {"one_ahead", "row_scale"})
"""Not: a product that reads one column ahead, of which numbers prove more; a table of eight rows, shorter than the
number that stands for them."""


def steps(model: nn.Module, shapes: list[tuple[int, int]] = SHAPES, padding: Any = None, **options: Any) -> list[int]:
    """Exact and packed steps of all shapes; the compilations up to each."""
    compiled = compile_with(model, **{"inner": "eager", **options})
    compiles = []
    for seed, (rows, columns) in enumerate(shapes):
        batch = batch_of(rows, columns, seed, padding)
        stats = step(compiled, model, batch)
        assert (stats["ran"], stats["fallback"], stats["attention_rewritten"]) == ("packed", None, 1)
        assert stats["expansions"] and (padding is not None or stats["tokens"] == distinct_tokens(batch))
        compiles.append(stats["compiles"])
    return compiles


def model_with(mixer: type[nn.Module] | Any, attention: Any = SPELLINGS["sdpa_is_causal"]) -> nn.Module:
    return TinyLM(attention, layers=1, after=mixer()).double()


@pytest.mark.parametrize("name", ON_ROWS)
def test_an_operator_on_rows_compiles_for_the_first_batch_and_then_for_all(name: str) -> None:
    compiles = steps(model_with(MIXERS[name][0]), SHAPES[:5])
    assert compiles == [1, 2, 2, 2, 2]


@pytest.mark.parametrize("padding", ["left", "right"])
@pytest.mark.parametrize("mixer", [Sorted, SequenceSoftmax])
def test_twelve_shapes_of_padded_rows(mixer: type[nn.Module], padding: str) -> None:
    compiles = steps(model_with(mixer, PADDED["sdpa_padding"]), padding=padding, inner="aot_eager")
    assert compiles[-1] <= 3


def test_inductor() -> None:
    assert steps(model_with(Sorted), SHAPES[:4], inner="inductor") == [1, 2, 2, 2]


def test_phimoe_draws_its_experts_in_batches_of_all_shapes() -> None:
    row = check_model("phimoe", "eager", batches=6)
    assert row.verdict == "partly", row.note
    assert row.compiles <= 3


# What numbers prove and symbols do not --------------------------------------------------------------------------------


def contracted_steps() -> None:
    compiled = compile_with(model := model_with(CumulativeSum), inner="eager")
    for rows, columns in SHAPES[:3]:
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
    model = TinyLM(SPELLINGS["sdpa_is_causal"], layers=1, before=TimesSize()).double()
    compiled = compile_for_all(model)
    for rows, columns in SHAPES[:3]:
        assert step(compiled, model, batch_of(rows, columns, padding=None))["compiles"] == 1


def test_products_of_sizes() -> None:
    steps_of_products()


def test_products_of_sizes_would_be_wrong_as_torch_writes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch writes ``2 * rows`` for ``2 * rows * columns``: such a graph is compiled for every shape."""
    steps_of_products()  # which has put ours in place
    torch._dynamo.reset()
    theirs = proxy_tensor._build_proxy_for_sym_expr.__wrapped__  # type: ignore[attr-defined]
    monkeypatch.setattr(proxy_tensor, "_build_proxy_for_sym_expr", theirs)
    with pytest.raises(AssertionError, match="2 == 1"):
        steps_of_products()
