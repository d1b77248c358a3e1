"""Spellings of attention that transformers lacks: found by what they compute, exact."""

import pytest
import torch

from tests.batches import Side, distinct_tokens, shared_batch
from tests.models import TinyLM
from tests.oracle import FLOAT32, compare
from tests.spellings import GROUPED, PADDED, SPELLINGS

VOCAB = 61
BOTH = [pytest.param(torch.float64, id="float64"), pytest.param(torch.float32, id="float32")]


def assert_exact_and_packed(model: TinyLM, padding: Side | None, tolerance: float | None = None) -> None:
    """Equal to eager on shared rows, with both attentions on the distinct tokens and nothing expanded."""
    batch = shared_batch(rows=4, length=17, shared=7, vocab=VOCAB, padding=padding, seed=1)
    stats = compare(model, batch, tolerance).stats
    assert stats["fallback"] is None
    assert stats["attention_rewritten"] >= len(model.blocks)
    assert stats["tokens"] == distinct_tokens(batch)


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


@pytest.mark.parametrize("padding", ["right", "left"])
@pytest.mark.parametrize("name", PADDED)
def test_padding_mask(name: str, padding: Side) -> None:
    assert_exact_and_packed(TinyLM(PADDED[name]).double(), padding)


@pytest.mark.parametrize("name", ["sdpa_is_causal", "relative_bias"])
def test_rows_padded_without_a_mask(name: str) -> None:
    batch = shared_batch(rows=4, length=17, shared=7, vocab=VOCAB, seed=1).without("attention_mask")
    stats = compare(TinyLM(SPELLINGS[name]).double(), batch).stats
    assert stats["fallback"] is None
    assert stats["tokens"] <= distinct_tokens(batch)
