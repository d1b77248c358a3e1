"""Spellings of attention that transformers lacks: found by what they compute, exact."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from tests.backend.support import compare, compile_with
from tests.batches import Side, distinct_tokens, shared_batch
from tests.models import TinyLM
from tests.oracle import FLOAT32, FLOAT64, assert_close, eager_step, loss_of, outcome, stats_of, zero_gradients
from tests.spellings import EXPANDED, GROUPED, PADDED, SPELLINGS, Builder, Spelling
from treefx.kernels.score import walk
from treefx.passes.scores import attention_facts

VOCAB = 61
STACK = 6
"""Spellings in one model, one a block: each is found and exact on its own, and one compilation does for all."""


def stack(builders: Mapping[str, Builder], names: Sequence[str], kv_heads: int = 4) -> TinyLM:
    """A model whose block i has the attention called ``names[i]``."""
    left = iter(names)
    return TinyLM(lambda: builders[next(left)](), layers=len(names), kv_heads=kv_heads)


def assert_exact_and_packed(
    model: TinyLM, sides: Sequence[Side | None] = (None,), tolerance: float | None = None
) -> None:
    """Equal to eager on shared rows, with each attention on the distinct tokens and nothing expanded."""
    compiled, twin = compile_with(model), copy.deepcopy(model)
    tolerance = tolerance or (FLOAT64 if model.head.weight.dtype == torch.float64 else FLOAT32)
    for side in sides:
        batch = shared_batch(rows=4, length=17, shared=7, vocab=VOCAB, padding=side, seed=1)
        got = outcome(model, lambda batch=batch: loss_of(batch)(compiled))
        expected = outcome(twin, lambda batch=batch: loss_of(batch)(twin))
        assert_close(got, expected, tolerance, lambda batch=batch: zero_gradients(twin, loss_of(batch)))
        stats = stats_of(compiled)
        assert stats["fallback"] is None and stats["expansions"] == []
        assert stats["attention_rewritten"] >= len(model.blocks)
        assert stats["tokens"] == distinct_tokens(batch)


EXACT = [name for name in SPELLINGS if name != "softmax_in_float32"]


@pytest.mark.parametrize("names", [EXACT[i : i + STACK] for i in range(0, len(EXACT), STACK)], ids=", ".join)
def test_spellings(names: list[str]) -> None:
    assert_exact_and_packed(stack(SPELLINGS, names).double())


def test_softmax_in_float32() -> None:
    """Its own cast to float32 ends the comparison there."""
    assert_exact_and_packed(stack(SPELLINGS, ["softmax_in_float32"]).double(), tolerance=FLOAT32)


@pytest.mark.parametrize(("kv_heads", "dtype"), [(1, torch.float64), (2, torch.float32)])
def test_grouped_heads(kv_heads: int, dtype: torch.dtype) -> None:
    assert_exact_and_packed(stack(GROUPED, list(GROUPED), kv_heads).to(dtype))


def test_padding_masks() -> None:
    """On the right, then on the left, through one compiled model."""
    assert_exact_and_packed(stack(PADDED, list(PADDED)).double(), ["right", "left"])


NAMED = {
    "memory_tokens": "learned values before or behind the tokens (prompt or prefix tuning)",
    "differential_probabilities": "multiply each by the values",
    "sigmoid_attention": "sigmoid attention",
    "one_beside_shifted_weights": "differ from query to query by a factor",
    "scores_without_gradient": "detach",
    "probabilities_without_gradient": "detach",
}


@pytest.mark.parametrize("name", EXPANDED)
def test_what_no_tree_attention_computes(name: str) -> None:
    batch = shared_batch(rows=4, length=17, shared=7, vocab=VOCAB, padding=None, seed=1)
    stats = compare(TinyLM(EXPANDED[name], layers=1).double(), batch).stats
    assert "spellings.py" in (stats["fallback"] or stats["expansions"][0]["line"])
    assert name not in NAMED or NAMED[name] in stats["expansions"][0]["reason"]


def test_a_bias_made_of_other_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mask of scaled_dot_product_attention that holds products of tokens is none of the products q.k."""

    def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        future = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).triu(1)
        bias = (v @ k.transpose(-1, -2)).masked_fill(future, -torch.inf)
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=bias)

    batch = shared_batch(rows=4, length=17, shared=7, vocab=VOCAB, padding=None, seed=1)
    reason = compare(TinyLM(lambda: Spelling(attention), layers=1).double(), batch).stats["expansions"][0]["reason"]
    assert "several products of queries and keys" in reason
    monkeypatch.setattr(attention_facts, "walk", lambda expr: [item for item in walk(expr) if item[0] != "dot"])
    with pytest.raises(AssertionError, match="differ by more than"):
        compare(TinyLM(lambda: Spelling(attention), layers=2).double(), batch)


def test_a_sink_that_is_left_out_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_facts, "_sinks", lambda *where: None)
    with pytest.raises(AssertionError, match="differ by more than"):
        assert_exact_and_packed(stack(SPELLINGS, ["sink_behind"]).double(), tolerance=1e-3)


def test_arithmetic_on_a_mask_of_other_numbers_than_zero_and_one() -> None:
    """`(1 - mask) * lowest` hides keys where the mask is 0, shows them where it is 1, and lifts them where it is 2."""
    batch = shared_batch(rows=4, length=17, shared=7, vocab=VOCAB, seed=1)
    assert batch.attention_mask is not None
    marked = replace(batch, attention_mask=batch.attention_mask * (1 + (batch.input_ids % 3 == 0)))
    model = TinyLM(lambda: Spelling(weighted_by_the_mask), layers=1).double()
    compiled = compile_with(model)
    for given in (batch, marked):  # compiled for zeros and ones, which a mask of other numbers must not run
        expected = eager_step(model, given)
        assert_close(outcome(model, lambda given=given: loss_of(given)(compiled)), expected, FLOAT64)
        assert stats_of(compiled)["fallback"] is None


def weighted_by_the_mask(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    assert mask is not None
    seen = torch.arange(q.size(-2))[:, None] >= torch.arange(q.size(-2))
    scores = (q @ k.mT).masked_fill(~seen, -1e9) + (1.0 - mask[:, None, None, :].to(q.dtype)) * 2.0
    return scores.softmax(-1) @ v


def test_rows_padded_without_a_mask() -> None:
    batch = shared_batch(rows=4, length=17, shared=7, vocab=VOCAB, seed=1).without("attention_mask")
    stats = compare(stack(SPELLINGS, ["sdpa_is_causal", "relative_bias"]).double(), batch).stats
    assert stats["fallback"] is None
    assert stats["tokens"] <= distinct_tokens(batch)
