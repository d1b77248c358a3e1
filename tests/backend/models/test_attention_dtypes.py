"""Attention whose scores are formed in another type than its values: GPT-J and CodeGen cast q and k to float32."""

import pytest
import torch

from tests.backend.support import assert_packed
from tests.batches import distinct_tokens, shared_batch
from tests.models import zoo
from tests.oracle import compare

BATCH = shared_batch(rows=4, length=20, shared=8)


@pytest.mark.parametrize("name", ["gptj", "codegen"])
def test_models_in_bfloat16_with_scores_in_float32(name: str) -> None:
    model = zoo(name, num_hidden_layers=1).to(torch.bfloat16)
    checked = compare(model, BATCH, tolerance=0.1, inner="aot_eager")
    assert_packed(checked, distinct_tokens(BATCH), layers=1)


@pytest.mark.parametrize("name", ["gptj", "codegen"])
def test_models_in_float64_with_scores_in_float32(name: str) -> None:
    model = zoo(name, num_hidden_layers=1).double()
    assert_packed(compare(model, BATCH, tolerance=1e-5, inner="eager"), distinct_tokens(BATCH), layers=1)
