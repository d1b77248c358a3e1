"""One analysis and one compilation for batches of any number of rows, columns and tokens.

As everywhere in ``torch.compile``, the first batch is compiled for its sizes, and the second one for all; with
``dynamic=True`` the first one is compiled for all. What inductor makes of them: ``test_kept_logits.test_inductor``.
"""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.backend.small import Small
from tests.batches import Batch, distinct_tokens, shared_batch
from tests.mixers import CumulativeSum
from tests.models import double, zoo
from tests.oracle import FLOAT32, FLOAT64, assert_close, compile_with, eager_step, loss_of, outcome, stats_of
from tests.spellings import PADDED, SPELLINGS
from treefx.inputs.sizes import BatchSizes
from treefx.passes.labels import constants

SHAPES = [(3, 7), (5, 23), (4, 50), (6, 12), (2, 9)]
STACK = "tril_buffer additive_triu einsum_heads_first baddbmm chunked relative_bias alibi sink_behind".split()
"""Spellings that differ in what they make of the number of columns.

``tests.backend.models.test_spellings`` has all of them, each compiled for numbers.
"""


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


def test_spellings_of_attention_compile_once() -> None:
    stats = steps(Small(*(SPELLINGS[name] for name in STACK)).double(), SHAPES[:3])
    assert stats["compiles"] == 1 and stats["attention_rewritten"] == len(STACK)


def test_every_spelling_of_padding_compiles_once() -> None:
    stats = steps(Small(*PADDED.values()).double(), SHAPES[:3], "right")
    assert stats["compiles"] == 1 and stats["attention_rewritten"] == len(PADDED)


def test_an_architecture_with_slopes_compiles_once() -> None:
    """Windows of transformers in batches of all sizes: ``test_packed_lengths``."""
    assert steps(double("bloom", num_hidden_layers=1), [(3, 7), (5, 19), (4, 30)], "right")["compiles"] == 1


def test_experts_compile_once() -> None:
    """In float32: PyTorch's grouped products have no other dtype on a CPU."""
    model = zoo("qwen3_moe", num_hidden_layers=1)
    compiled = compile_for_all(model)
    for rows, columns in [(3, 7), (5, 19), (4, 30)]:
        stats = step(compiled, model, batch_of(rows, columns), FLOAT32)
        assert stats["fallback"] is None and stats["compiles"] == 1


def test_one_row_first_and_padding_on_both_sides() -> None:
    """Sizes of one, and those that the model has, too: of the vocabulary, and the number of its columns."""
    model = Small(PADDED["sdpa_padding"]).double()
    compiled = compile_with(model, inner="eager")
    for seed, (rows, columns) in enumerate([(1, 9), (16, 64), (61, 2), (2, 61)]):
        step(compiled, model, batch_of(rows, columns, seed, "left" if seed % 2 else "right"))


def logits_step(compiled: Any, model: nn.Module, batch: Batch) -> int:
    """One exact step of a caller's loss, as one column has no label; the compilations until now."""

    def loss(run: Any) -> Tensor:
        kept = batch.attention_mask[..., None]
        return (run(batch.input_ids, batch.attention_mask).logits * kept).square().mean()

    expected = outcome(model, lambda: loss(model))
    assert_close(outcome(model, lambda: loss(compiled)), expected, FLOAT64)
    return int(stats_of(compiled)["compiles"])


def test_one_row_one_column_and_one_token_compile_once_each() -> None:
    """Dynamo has a graph for each of them, and one for all other batches; the first batch has its own, as always."""
    sizes = [(1, 1), (4, 9), (1, 9), (4, 1), (3, 12), (1, 13), (2, 1), (5, 1), (6, 20), (1, 1)]
    model = Small(PADDED["sdpa_padding"]).double()
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
    model = Small(attention).double()
    compiled = compile_for_all(model)
    for rows, columns in SHAPES[1:3]:
        step(compiled, model, batch_of(rows, columns, padding=None))


class Windowed(nn.Module):
    """A window of 8 in a buffer, as GPT-Neo has it: at 5 columns it hides nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.ones(64, 64, dtype=torch.bool).tril().triu(-7))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        return nn.functional.scaled_dot_product_attention(q, k, v, self.seen[: q.shape[2], : q.shape[2]])


def windowed_steps() -> None:
    model = Small(Windowed).double()
    compiled = compile_for_all(model)
    for rows, columns in [(4, 5), (4, 30)]:
        step(compiled, model, batch_of(rows, columns, padding=None))


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
    model = Small(ShortBatches).double()
    compiled = compile_for_all(model)
    with pytest.raises(AssertionError, match="differ by more than"):
        step(compiled, model, batch_of(4, 30, padding=None))


# Inputs as callers have them ------------------------------------------------------------------------------------------


def test_slices_of_a_batch() -> None:
    """``model(ids[:, :-1])``: inputs that do not lie dense in memory."""
    model = Small(SPELLINGS["sdpa_is_causal"]).double()
    compiled = compile_with(model, inner="eager")

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
    model = Small(SPELLINGS["sdpa_is_causal"], before=Counted()).double()
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
    model = Small(SPELLINGS["sdpa_is_causal"]).double()
    settings = {"inner": "eager", "min_sharing": 1.0, **options}
    return model, torch.compile(model, backend="treefx", options=settings, dynamic=False)


def test_static_shapes_are_kept_as_asked() -> None:
    model, compiled = sizes_as_numbers()
    for rows, columns in SHAPES[:2]:
        assert step(compiled, model, batch_of(rows, columns))["ran"] == "packed"


def shapes_of_their_own(**options: Any) -> tuple[nn.Module, Any]:
    """A model with a running sum, which is analysed for each number of columns."""
    model = Small(SPELLINGS["sdpa_is_causal"], before=CumulativeSum()).double()
    return model, compile_for_all(model, **options)


def test_a_shape_beyond_the_limit_is_compiled_when_it_returns() -> None:
    """Those that never return compile nothing more."""
    model, compiled = shapes_of_their_own(max_shapes=2)
    ran = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for columns in (8, 9, 11, 12, 13, 10, 10, 10, 9, 8, 8, 8):
            ran.append(step(compiled, model, batch_of(3, columns, padding=None))["ran"])
    packed = [way == "packed" for way in ran]
    assert packed == [True, True, False, False, False, False, True, True, True, False, True, True]
    ours = [str(item.message) for item in caught if "max_shapes" in str(item.message)]
    assert len(ours) == 1 and "pad_to_multiple_of" in ours[0]


# Graphs of Dynamo that compute the same -------------------------------------------------------------------------------


def test_models_of_one_class_share_what_was_compiled() -> None:
    models = [Small(SPELLINGS["sdpa_is_causal"]).double() for _ in range(2)]
    compiles = 0
    for model, (rows, columns) in zip(models, [(3, 9), (5, 20)], strict=True):
        torch._dynamo.reset_code_caches()
        compiled = compile_for_all(model)
        compiles += step(compiled, model, batch_of(rows, columns))["compiles"]
    assert compiles == 1
