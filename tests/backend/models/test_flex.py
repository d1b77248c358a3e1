"""``flex_attention`` in a captured graph is found like any other attention, and exact."""

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import flex_attention as flex

import treefx
from tests.backend.native import TakesCacheFlag, native_loss
from tests.backend.support import compile_with
from tests.batches import distinct_tokens, shared_batch
from tests.models import TinyLM
from tests.oracle import FLOAT64, Outcome, assert_close, loss_of, outcome, separate_rows, stats_of
from tests.planning.cuts import every_node
from tests.planning.parts import TRAIN_AND_KV, run

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


@pytest.fixture(autouse=True)
def _gradients_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch refuses them, as its own kernel has no backward there; written out it needs none."""
    monkeypatch.setattr(flex, "_validate_device", lambda *tensors: None)


def test_flex_attention() -> None:
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


compiled_flex = torch.compile(flex.flex_attention)
"""As models call it: compiled by itself."""


class CompiledFlex(nn.Module):
    """Causal by its score, of any length, with a learned slope per head; on request written out."""

    def __init__(self) -> None:
        super().__init__()
        self.slope = nn.Parameter(torch.linspace(0.1, 0.5, 4))
        self.lowered = True

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        def score_mod(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return torch.where(q >= k, score - self.slope[h] * (q - k), -float("inf"))

        if self.lowered:
            return compiled_flex(q, k, v, score_mod=score_mod)
        place = torch.arange(q.size(2))
        scores = q @ k.mT / math.sqrt(q.size(-1)) - self.slope[:, None, None] * (place[:, None] - place)
        return scores.masked_fill(place[:, None] < place, -float("inf")).softmax(-1) @ v


def forests(count: int = 8) -> list[treefx.Forest]:
    """Of other sizes each, the deepest first: shallower ones run on what it compiled."""
    rows = [
        [[3, 4, *range(5, 7 + n)], [3, 4, *range(5, 6 + n), 50 - n, 20], [9, *range(20, 22 + 2 * n)]]
        for n in reversed(range(count))
    ]
    return [treefx.Forest.from_sequences(each) for each in rows]


def models() -> tuple[nn.Module, nn.Module]:
    """A model, and the same written out."""
    model, plain = TinyLM(CompiledFlex, layers=1).double(), TinyLM(CompiledFlex, layers=1).double()
    plain.load_state_dict(model.state_dict())
    attention: Any = plain.blocks[0].attention
    attention.lowered = False
    return TakesCacheFlag(model), TakesCacheFlag(plain)


def of_rows(plain: nn.Module, forest: treefx.Forest) -> Outcome:
    rows = [row.tolist() for row in forest.sequences()]
    return separate_rows(plain, rows, [[1.0] * len(row) for row in rows])


def test_compiled_flex_attention_compiles_once_for_all_forests() -> None:
    model, plain = models()
    compiled = compile_with(model, inner="eager")
    compiles = []
    for forest in forests():
        got = outcome(model, lambda forest=forest: native_loss(forest)(compiled))
        assert_close(got, of_rows(plain, forest), FLOAT64)
        compiles.append(stats_of(compiled)["compiles"])
    assert compiles == [1] * 8


def test_compiled_flex_attention_compiles_once_more_for_all_plans() -> None:
    model, plain = models()
    compiled = compile_with(model, inner="eager")
    compiles = []
    for forest in forests():
        assert_close(run(compiled, model, every_node(forest)), of_rows(plain, forest), FLOAT64)
        compiles.append(stats_of(compiled)["compiles"])
    assert compiles == compiles[:1] * 8 and compiles[0] <= TRAIN_AND_KV
