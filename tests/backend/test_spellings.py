"""Spellings of attention that transformers lacks: found by what they compute, exact."""

import pytest
import torch

from tests.batches import Side, distinct_tokens, shared_batch
from tests.models import TinyLM
from tests.oracle import FLOAT32, compare
from tests.spellings import EXPANDED, GROUPED, PADDED, SPELLINGS

VOCAB = 61
BOTH = [pytest.param(torch.float64, id="float64"), pytest.param(torch.float32, id="float32")]


def assert_exact_and_packed(
    model: TinyLM, padding: Side | None, tolerance: float | None = None, padding_runs: bool = False
) -> None:
    """Equal to eager on shared rows, with both attentions on the distinct tokens and nothing expanded."""
    batch = shared_batch(rows=4, length=17, shared=7, vocab=VOCAB, padding=padding, seed=1)
    stats = compare(model, batch, tolerance).stats
    assert stats["fallback"] is None
    assert stats["attention_rewritten"] >= len(model.blocks)
    most = batch.input_ids.numel() - 1 if padding_runs else distinct_tokens(batch)
    assert distinct_tokens(batch) <= stats["tokens"] <= most


@pytest.mark.parametrize("name", SPELLINGS)
def test_spelling(name: str) -> None:
    model = TinyLM(SPELLINGS[name]).double()
    # Its own cast to float32 ends the comparison there.
    assert_exact_and_packed(model, None, FLOAT32 if name == "softmax_in_float32" else None)


@pytest.mark.parametrize("name", ["tril_buffer", "baddbmm", "chunked", "sliding_softcap", "alibi"])
def test_spelling_in_float32(name: str) -> None:
    assert_exact_and_packed(TinyLM(SPELLINGS[name]), None)


@pytest.mark.parametrize("dtype", BOTH)
@pytest.mark.parametrize("kv_heads", [1, 2])
@pytest.mark.parametrize("name", GROUPED)
def test_grouped_heads(name: str, kv_heads: int, dtype: torch.dtype) -> None:
    assert_exact_and_packed(TinyLM(GROUPED[name], kv_heads=kv_heads).to(dtype), None)


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_grouped_einsum_runs_on_rows(kv_heads: int) -> None:
    """Query groups merged with the queries are not recognised as heads: the report says so and the result is exact."""
    batch = shared_batch(rows=4, length=17, shared=7, vocab=VOCAB, padding=None, seed=1)
    stats = compare(TinyLM(EXPANDED["einsum_grouped"], kv_heads=kv_heads).double(), batch).stats
    assert "aten.bmm.default" in stats["fallback"] and "spellings.py" in stats["fallback"]


@pytest.mark.parametrize("padding", ["right", "left"])
@pytest.mark.parametrize("name", PADDED)
def test_padding_mask(name: str, padding: Side) -> None:
    # A mask that enters by arithmetic is a bias like any other: exact, and nothing tells that it hides padding.
    assert_exact_and_packed(TinyLM(PADDED[name]).double(), padding, padding_runs=name == "additive_padding")


@pytest.mark.parametrize("name", ["sdpa_is_causal", "relative_bias"])
def test_rows_padded_without_a_mask(name: str) -> None:
    batch = shared_batch(rows=4, length=17, shared=7, vocab=VOCAB, seed=1).without("attention_mask")
    stats = compare(TinyLM(SPELLINGS[name]).double(), batch).stats
    assert stats["fallback"] is None
    assert stats["tokens"] <= distinct_tokens(batch)
