"""Architectures of transformers: equal to eager training, with every layer's attention on distinct tokens."""

import pytest

from tests.backend.support import assert_packed
from tests.batches import distinct_tokens, shared_batch
from tests.models import PACKED_ZOO, zoo
from tests.oracle import compare

pytestmark = pytest.mark.zoo

BATCH = shared_batch(rows=4, length=20, shared=8)


@pytest.mark.parametrize("name", PACKED_ZOO)
def test_architecture(name: str) -> None:
    attentions = 4 if name == "diffllama" else 2  # two per layer there
    assert_packed(compare(zoo(name), BATCH), distinct_tokens(BATCH), attentions)


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2", "mixtral", "bloom"])
def test_architecture_on_inductor(name: str) -> None:
    assert_packed(compare(zoo(name), BATCH, inner="inductor"), distinct_tokens(BATCH), layers=2)
