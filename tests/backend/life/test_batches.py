"""One analysis and one compilation for batches of any number of rows, columns and tokens.

As everywhere in ``torch.compile``, the first batch is compiled for its sizes, and the second one for all; with
``dynamic=True`` the first one is compiled for all.
"""

import itertools
import random
import warnings
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.batches import Batch, distinct_tokens, shared_batch
from tests.mixers import CumulativeSum
from tests.models import TinyLM, double, zoo
from tests.oracle import FLOAT32, FLOAT64, assert_close, compile_with, eager_step, loss_of, outcome, stats_of
from tests.spellings import PADDED, SPELLINGS
from treefx.passes.labels import constants
from treefx.passes.trace.batch_sizes import BatchSizes

pytestmark = pytest.mark.sample(20)

SHAPES = [(3, 7), (5, 23), (4, 50), (6, 12), (2, 9)]
FIXED_SIZES = {"softmax_in_float32", "counted_from_the_end", "narrow_integers"}
"""The first rounds to float32 (``tests.backend.models.test_spellings`` compares it), the second writes the number of
columns into its scores, the third reads its scores as tables, and both are analysed for each."""


def batch_of(rows: int, columns: int, seed: int = 0, padding: Any = "right") -> Batch:
    return shared_batch(rows=rows, length=columns, shared=columns // 2, vocab=61, seed=seed, padding=padding)


def step(compiled: Any, model: nn.Module, batch: Batch, tolerance: float = FLOAT64) -> dict[str, Any]:
    """One exact step; the statistics of its call."""
    expected = eager_step(model, batch)
    assert_close(outcome(model, lambda: loss_of(batch)(compiled)), expected, tolerance)
    return stats_of(compiled)


def compile_for_all(model: nn.Module, **options: Any) -> Any:
    settings = {"inner": "eager", "min_sharing": 1.0, **options}
    return torch.compile(model, backend="treefx", options=settings, dynamic=True)


def steps(model: nn.Module, shapes: list[tuple[int, int]] = SHAPES, padding: Any = None) -> dict[str, Any]:
    """Exact steps of all shapes, all packed."""
    compiled = compile_for_all(model)
    for seed, (rows, columns) in enumerate(shapes):
        batch = batch_of(rows, columns, seed, padding)
        stats = step(compiled, model, batch)
        assert stats["ran"] == "packed" and stats["fallback"] is None
        assert stats["tokens"] == distinct_tokens(batch)
    return stats


@pytest.mark.parametrize("name", sorted(set(SPELLINGS) - FIXED_SIZES))
def test_every_spelling_of_attention_compiles_once(name: str) -> None:
    assert steps(TinyLM(SPELLINGS[name], layers=1).double())["compiles"] == 1


@pytest.mark.parametrize("name", sorted(PADDED))
def test_every_spelling_of_padding_compiles_once(name: str) -> None:
    assert steps(TinyLM(PADDED[name], layers=1).double(), padding="right")["compiles"] == 1


@pytest.mark.parametrize("name", ["gpt_neo", "gemma2", "bloom"])
def test_architectures_with_windows_caps_and_slopes_compile_once(name: str) -> None:
    assert steps(double(name), [(3, 7), (5, 19), (4, 30)], "right")["compiles"] == 1


def test_experts_compile_once() -> None:
    """In float32: PyTorch's grouped products have no other dtype on a CPU."""
    model = zoo("qwen3_moe")
    compiled = compile_for_all(model)
    for rows, columns in [(3, 7), (5, 19), (4, 30)]:
        stats = step(compiled, model, batch_of(rows, columns), FLOAT32)
        assert stats["fallback"] is None and stats["compiles"] == 1


def test_inductor_compiles_for_the_first_batch_and_then_for_all() -> None:
    model = TinyLM(SPELLINGS["sdpa_is_causal"], layers=1, width=16).double()
    compiled = torch.compile(model, backend="treefx", options={"min_sharing": 1.0})
    compiles = []
    for rows, columns in SHAPES[:4]:
        stats = step(compiled, model, batch_of(rows, columns))
        compiles.append(stats["compiles"])
        assert stats["ran"] == "packed"
    assert compiles == [1, 2, 2, 2]


@settings(max_examples=3)
@given(seed=st.integers(0, 2**16))
def test_any_order_of_sizes_is_exact(seed: int) -> None:
    draw = random.Random(seed)
    torch._dynamo.reset()
    model = TinyLM(PADDED["sdpa_padding"], layers=1, width=16).double()
    compiled = compile_with(model, inner="eager")
    sizes = [(draw.choice([1, 2, 4, 8, 16, 61]), draw.choice([2, 4, 8, 16, 61, 64])) for _ in range(4)]
    for number, (rows, columns) in enumerate(sizes):
        step(compiled, model, batch_of(rows, columns, number, draw.choice(["left", "right"])))


@settings(max_examples=3)
@given(seed=st.integers(0, 2**16))
def test_batches_of_one_column_among_others(seed: int) -> None:
    """They have no label: what the caller makes of the logits is compared."""
    draw = random.Random(seed)
    torch._dynamo.reset()
    model = TinyLM(PADDED["sdpa_padding"], layers=1, width=16).double()
    compiled = compile_with(model, inner="eager")
    for number in range(4):
        logits_step(compiled, model, batch_of(draw.choice([1, 2, 16]), draw.choice([1, 1, 2, 16]), number, "right"))


def logits_step(compiled: Any, model: nn.Module, batch: Batch) -> int:
    """One exact step of a loss of the caller's; the compilations so far."""

    def loss(run: Any) -> Tensor:
        kept = batch.attention_mask[..., None]
        return (run(batch.input_ids, batch.attention_mask).logits * kept).square().mean()

    expected = outcome(model, lambda: loss(model))
    assert_close(outcome(model, lambda: loss(compiled)), expected, FLOAT64)
    return int(stats_of(compiled)["compiles"])


ORDERS = [
    [(1, 9), (4, 9), (1, 12), (4, 15), (1, 20)],
    [(4, 9), (4, 1), (4, 12), (3, 1), (1, 1), (5, 1), (6, 20), (1, 1)],
    [(1, 1), (4, 9), (1, 9), (4, 1), (3, 12), (1, 13), (2, 1), (1, 1)],
]


@pytest.mark.parametrize("sizes", ORDERS)
def test_one_row_one_column_and_one_token_compile_once_each(sizes: list[tuple[int, int]]) -> None:
    """Dynamo has a graph for each of them, and one for all other batches; the first batch has its own, as always."""
    model = TinyLM(PADDED["sdpa_padding"], layers=1, width=16).double()
    compiled = compile_with(model, inner="eager")
    compiles = [logits_step(compiled, model, batch_of(*size, seed, "right")) for seed, size in enumerate(sizes)]
    kinds = {(rows == 1, columns == 1) for rows, columns in sizes}
    assert compiles[-1] <= len(kinds) + 1


# Sizes that an analysis has to know -----------------------------------------------------------------------------------


class Mirrored(nn.Module):
    """A bias by the distance from the end of the batch: its elements change with the number of columns."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        columns = torch.arange(q.shape[2])
        bias = torch.where(columns[:, None] >= columns, 0.1 * columns.flip(0).to(q.dtype), -torch.inf)
        return nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias)


class Share(nn.Module):
    """Scores that are weighed by the share of the batch's columns that a key stands at."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        columns = torch.arange(q.shape[2])
        bias = torch.where(columns[:, None] >= columns, columns.to(q.dtype) / q.shape[2], -torch.inf)
        return nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias)


class ShortBatches(nn.Module):
    """Hides the third key before each query in batches of fewer than 40 columns."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        columns = torch.arange(q.shape[2])
        short = columns + columns.flip(0) < 39
        hidden = short[:, None] & (columns[:, None] - columns == 3)
        return nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=(~hidden).tril())


class Wrapped(nn.Module):
    """Reads a table of the batch's columns from its end."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        columns = torch.arange(q.shape[2])
        left = columns[-1 - columns]
        hidden = (left + columns < 39)[:, None] & (columns[:, None] - columns == 3)
        return nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=(~hidden).tril())


@pytest.mark.parametrize("attention", [Mirrored, Share, ShortBatches, Wrapped])
def test_tables_that_change_with_the_columns_are_not_carried_over(attention: type[nn.Module]) -> None:
    model = TinyLM(attention, layers=1).double()
    compiled = compile_for_all(model)
    for rows, columns in SHAPES:
        step(compiled, model, batch_of(rows, columns, padding=None))


def windowed_steps() -> None:
    """A window of 8 in a buffer: at 5 columns it hides nothing."""
    model = double("gpt_neo")
    compiled = compile_for_all(model)
    for rows, columns in [(4, 5), (4, 30)]:
        step(compiled, model, batch_of(rows, columns))


def test_a_window_wider_than_the_first_batch_stays_a_window() -> None:
    windowed_steps()


def test_tables_of_the_first_batch_alone_would_be_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """What makes the test above hold: constants are read for as many columns as any batch may have."""

    def columns_of_the_call(self: BatchSizes, columns: Any, tensors: Any) -> int:
        return int(columns.node.expr.xreplace(self.values(tensors)))

    monkeypatch.setattr(BatchSizes, "table_columns", columns_of_the_call)
    with pytest.raises(AssertionError, match="differ by more than"):
        windowed_steps()


def test_tables_taken_for_corners_would_be_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "is_corner", lambda node: True)
    model = TinyLM(ShortBatches, layers=1).double()
    compiled = compile_for_all(model)
    with pytest.raises(AssertionError, match="differ by more than"):
        step(compiled, model, batch_of(4, 30, padding=None))


# Inputs as callers have them ------------------------------------------------------------------------------------------


def test_slices_of_a_batch() -> None:
    """``model(ids[:, :-1])``: inputs that do not lie dense in memory."""
    model = TinyLM(SPELLINGS["sdpa_is_causal"], layers=1).double()
    compiled = compile_with(model, inner="aot_eager")

    def loss(run: Any, ids: Tensor) -> Tensor:
        logits = run(ids[:, :-1]).logits
        return nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())

    for rows, columns in SHAPES:
        ids = batch_of(rows, columns, padding=None).input_ids
        expected = outcome(model, lambda ids=ids: loss(model, ids))
        assert_close(outcome(model, lambda ids=ids: loss(compiled, ids)), expected, FLOAT64)
    assert stats_of(compiled)["compiles"] == 2


class Counted(nn.Module):
    """Counts calls, and columns, in buffers that it changes in place."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("longest", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.longest.clamp_(min=x.shape[1])
        return x * (1 + 0.1 * self.calls)


def test_buffers_are_changed_in_batches_of_all_sizes() -> None:
    model = TinyLM(SPELLINGS["sdpa_is_causal"], layers=1, before=Counted()).double()
    compiled = compile_with(model, inner="eager")
    held = model.before.calls
    for number, (rows, columns) in enumerate(SHAPES, start=1):
        with torch.no_grad():
            model.before.calls.fill_(number - 1)
        expected = eager_step(model, batch_of(rows, columns))
        with torch.no_grad():
            model.before.calls.fill_(number - 1)
        batch = batch_of(rows, columns)
        assert_close(outcome(model, lambda batch=batch: loss_of(batch)(compiled)), expected, FLOAT64)
        assert model.before.calls is held and float(held) == number
    assert int(model.before.longest) == max(columns for _, columns in SHAPES)


# Where sizes have to be numbers ---------------------------------------------------------------------------------------


def sizes_as_numbers(**options: Any) -> tuple[nn.Module, Any]:
    model = TinyLM(SPELLINGS["sdpa_is_causal"], layers=1, width=16).double()
    settings = {"inner": "eager", "min_sharing": 1.0, **options}
    return model, torch.compile(model, backend="treefx", options=settings, dynamic=False)


def test_static_shapes_are_kept_as_asked() -> None:
    model, compiled = sizes_as_numbers()
    for rows, columns in SHAPES[:3]:
        assert step(compiled, model, batch_of(rows, columns))["ran"] == "packed"


def shapes_of_their_own(**options: Any) -> tuple[nn.Module, Any]:
    """A model with a running sum, which is analysed for each number of columns."""
    model = TinyLM(SPELLINGS["sdpa_is_causal"], layers=1, width=16, before=CumulativeSum()).double()
    return model, compile_for_all(model, **options)


def test_a_shape_beyond_the_limit_is_compiled_when_it_returns() -> None:
    model, compiled = shapes_of_their_own(max_shapes=2)
    ran = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for columns in (8, 9, 10, 10, 10, 9, 8, 8, 8):
            ran.append(step(compiled, model, batch_of(3, columns, padding=None))["ran"])
    packed = [way == "packed" for way in ran]
    assert packed == [True, True, False, True, True, True, False, True, True]
    ours = [str(item.message) for item in caught if "max_shapes" in str(item.message)]
    assert len(ours) == 1 and "pad_to_multiple_of" in ours[0]


def test_shapes_that_never_return_compile_nothing_more() -> None:
    model, compiled = shapes_of_their_own(max_shapes=2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        seen = [step(compiled, model, batch_of(3, columns, padding=None))["ran"] for columns in range(8, 15)]
    assert seen == ["packed", "packed", *itertools.repeat("ordinary", 5)]


# Graphs of Dynamo that compute the same -------------------------------------------------------------------------------


def test_models_of_one_class_share_what_was_compiled() -> None:
    models = [TinyLM(SPELLINGS["sdpa_is_causal"], layers=1, width=16).double() for _ in range(2)]
    compiles = 0
    for model, (rows, columns) in zip(models, [(3, 9), (5, 20)], strict=True):
        torch._dynamo.reset_code_caches()
        compiled = compile_for_all(model)
        compiles += step(compiled, model, batch_of(rows, columns))["compiles"]
    assert compiles == 1
