"""Spellings of attention that transformers lacks: found by what they compute, exact."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.backend.support import compare, compile_with
from tests.batches import Side, distinct_tokens, shared_batch
from tests.models import TinyLM
from tests.oracle import FLOAT32, FLOAT64, eager_step, stats_of
from tests.spellings import EXPANDED, GROUPED, PADDED, SPELLINGS, Spelling
from treefx.passes.scores import attention_facts

pytestmark = pytest.mark.sample(10)

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
    assert_exact_and_packed(TinyLM(GROUPED[name], kv_heads=kv_heads, layers=1).to(dtype), None)


@pytest.mark.parametrize("padding", ["right", "left"])
@pytest.mark.parametrize("name", PADDED)
def test_padding_mask(name: str, padding: Side) -> None:
    assert_exact_and_packed(TinyLM(PADDED[name], layers=1).double(), padding)


@pytest.mark.parametrize("name", EXPANDED)
def test_what_no_tree_attention_computes(name: str) -> None:
    batch = shared_batch(rows=4, length=17, shared=7, vocab=VOCAB, padding=None, seed=1)
    stats = compare(TinyLM(EXPANDED[name], layers=1).double(), batch).stats
    assert "spellings.py" in (stats["fallback"] or stats["expansions"][0]["line"])


NAMED = {
    "memory_tokens": "learned values before or behind the tokens (prompt or prefix tuning)",
    "differential_probabilities": "multiply each by the values",
    "sigmoid_attention": "sigmoid attention",
    "one_beside_shifted_weights": "differ from query to query by a factor",
    "scores_without_gradient": "detach",
    "probabilities_without_gradient": "detach",
}


@pytest.mark.parametrize(("name", "words"), NAMED.items())
def test_the_report_says_why(name: str, words: str) -> None:
    batch = shared_batch(rows=2, length=5, shared=3, vocab=VOCAB, padding=None, seed=1)
    compiled = compile_with(TinyLM(EXPANDED[name], layers=1).double())
    with torch.no_grad():
        compiled(**batch.inputs())
    assert words in stats_of(compiled)["expansions"][0]["reason"]


def test_a_sink_that_is_left_out_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_facts, "_sinks", lambda *where: None)
    with pytest.raises(AssertionError, match="differ by more than"):
        assert_exact_and_packed(TinyLM(SPELLINGS["sink_behind"]).double(), None, 1e-3)


def test_arithmetic_on_a_mask_of_other_numbers_than_zero_and_one() -> None:
    """`(1 - mask) * lowest` hides keys where the mask is 0, shows them where it is 1, and lifts them where it is 2."""
    batch = shared_batch(rows=4, length=17, shared=7, vocab=VOCAB, seed=1)
    assert batch.attention_mask is not None
    marked = replace(batch, attention_mask=batch.attention_mask * (1 + (batch.input_ids % 3 == 0)))
    spelling = Spelling(weighted_by_the_mask)
    model = TinyLM(lambda: spelling, layers=1).double()
    compiled = compare(model, batch).compiled  # compiled for zeros and ones
    assert compare(model, marked).stats["fallback"] is None
    expected = eager_step(model, marked).loss
    with torch.no_grad():
        assert abs(float(compiled(**marked.inputs()).loss / expected) - 1) <= FLOAT64


def weighted_by_the_mask(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    assert mask is not None
    seen = torch.arange(q.size(-2))[:, None] >= torch.arange(q.size(-2))
    scores = (q @ k.mT).masked_fill(~seen, -1e9) + (1.0 - mask[:, None, None, :].to(q.dtype)) * 2.0
    return scores.softmax(-1) @ v


@pytest.mark.parametrize("name", ["sdpa_is_causal", "relative_bias"])
def test_rows_padded_without_a_mask(name: str) -> None:
    batch = shared_batch(rows=4, length=17, shared=7, vocab=VOCAB, seed=1).without("attention_mask")
    stats = compare(TinyLM(SPELLINGS[name]).double(), batch).stats
    assert stats["fallback"] is None
    assert stats["tokens"] <= distinct_tokens(batch)
