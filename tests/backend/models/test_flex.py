"""``flex_attention`` in a captured graph is found like any other attention, and exact."""

import copy
import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import flex_attention as flex

from tests.backend.support import compile_with
from tests.batches import distinct_tokens, shared_batch
from tests.models import TinyLM
from tests.oracle import FLOAT64, assert_close, loss_of, outcome, stats_of

VOCAB, LENGTH = 61, 17


class Flex(nn.Module):
    """A mask of padding read by index, a learned slope per head, and a causal block mask."""

    def __init__(self, lowered: bool = True, heads: int = 4) -> None:
        super().__init__()
        self.slope = nn.Parameter(torch.linspace(0.1, 0.5, heads))
        self.lowered = lowered
        self.blocks = flex.create_block_mask(lambda b, h, q, k: q >= k, None, None, LENGTH, LENGTH, device="cpu")

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        assert mask is not None

        def score_mod(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return torch.where(mask[b, k] > 0, score - self.slope[h] * (q - k), -float("inf"))

        if self.lowered:
            return flex.flex_attention(q, k, v, score_mod=score_mod, block_mask=self.blocks, enable_gqa=True)
        groups = q.size(1) // k.size(1)
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        place = torch.arange(q.size(2))
        scores = q @ k.mT / math.sqrt(q.size(-1)) - self.slope[:, None, None] * (place[:, None] - place)
        seen = (place[:, None] >= place) & (mask[:, None, None] > 0)
        return scores.masked_fill(~seen, -float("inf")).softmax(-1) @ v


def test_flex_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    # torch refuses gradients on the CPU, where its own kernel has no backward; written out it needs none.
    monkeypatch.setattr(flex, "_validate_device", lambda *tensors: None)
    batch = shared_batch(rows=4, length=LENGTH, shared=7, vocab=VOCAB, seed=1)
    model = TinyLM(Flex, kv_heads=2).double()
    plain = copy.deepcopy(model)
    for block in plain.blocks:
        block.attention.lowered = False
    compiled = compile_with(model)
    got = outcome(model, lambda: loss_of(batch)(compiled))
    assert_close(got, outcome(plain, lambda: loss_of(batch)(plain)), FLOAT64)
    stats = stats_of(compiled)
    assert stats["fallback"] is None and stats["attention_rewritten"] == 2
    assert stats["tokens"] == distinct_tokens(batch)
