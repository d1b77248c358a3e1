"""Packed rows: sequences in one row, each kept to itself by the model's masks, share what their prefixes share.

The truth is the caller's own call in eager mode, which equals running every sequence on its own.
"""

from typing import Any

import pytest
import torch
from torch import nn

from tests.backend.packed import AGENTS, Packed, loss_inside, loss_outside, pack, trie_size
from tests.backend.support import Pair, assert_packed, compare, in_case
from tests.models import double, zoo
from tests.oracle import FLOAT64, assert_close, outcome

MODELS: dict[str, dict[str, Any]] = {
    "llama": {}, "mistral": {"sliding_window": 4}, "gemma2": {"sliding_window": 4}, "gpt_neox": {},
}  # fmt: skip


def one_layer(name: str) -> nn.Module:
    layers = {} if name == "gemma2" else {"num_hidden_layers": 1}  # a window in the first, none in the second
    return double(name, **MODELS.get(name, {}), **layers)


def assert_shared(checked: Any, packed: Packed) -> None:
    assert_packed(checked, trie_size(packed))
    stats = checked.stats
    assert stats["ran"] == "packed" and stats["raw_tokens"] == packed.input_ids.numel() and not stats["expansions"]


@pytest.mark.parametrize("name", ["mistral", "gpt_neox"])
def test_labels_inside(name: str) -> None:
    packed = pack(AGENTS)
    assert_shared(compare(one_layer(name), loss_inside(packed)), packed)


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_the_loss_outside(name: str) -> None:
    packed = pack(AGENTS)
    assert_shared(compare(one_layer(name), loss_outside(packed)), packed)


def test_experts() -> None:
    packed = pack(AGENTS)
    assert_shared(compare(zoo("qwen3_moe", num_hidden_layers=1), loss_inside(packed)), packed)


def test_the_call_equals_its_sequences_run_on_their_own() -> None:
    """What makes the caller's own call the truth."""
    model, packed = one_layer("llama"), pack(AGENTS)

    def separate() -> torch.Tensor:
        losses = []
        for item in packed.segments:
            ids = torch.tensor([item])
            logp = model(input_ids=ids).logits[0, :-1].log_softmax(-1)
            losses += [-logp[i, token] for i, token in enumerate(item[1:])]
        return torch.stack(losses).mean()

    checked = compare(model, loss_inside(packed))
    assert_close(
        outcome(checked.model, lambda: loss_inside(packed)(checked.compiled)), outcome(model, separate), FLOAT64
    )


def test_trailing_pads() -> None:
    """One more segment (verl), or a segment each (NeMo-RL, padding_free with pad_to_multiple_of)."""
    pair = Pair(one_layer("llama"))
    for counted in (True, False):
        packed = pack(AGENTS, pads=3, counted=counted)
        with in_case(counted):
            assert_shared(pair.check(loss_inside(packed)), packed)


def test_several_packed_rows_share_across_rows_and_segments() -> None:
    packed = pack(AGENTS[:4], AGENTS[1:], counted=False)
    assert_shared(compare(one_layer("mistral"), loss_outside(packed)), packed)


def test_eager_attention() -> None:
    packed = pack(AGENTS)
    model = one_layer("llama")
    model.set_attn_implementation("eager")
    assert_shared(compare(model, loss_inside(packed)), packed)
