"""Ops that mix tokens in an unknown way: the graph expands before them, stays exact, names op and line."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.backend.small import Small
from tests.backend.support import compare, compile_with
from tests.batches import batch_with_forks
from tests.mixers import ALONG_TREE, CAUSAL, MIXERS, Dropout
from tests.oracle import loss_of, refused
from tests.spellings import SPELLINGS

BELOW = ("roll", "batch_norm", "row_shift", "row_scale", "last_token")
"""For each reason why a mixer is not causal, one that has it."""


def assert_named(stats: dict[str, Any], words: tuple[str, ...], source: str) -> None:
    """Some expansion blames an op called like one of the words, at a line of `source`."""
    found = [item for item in stats["expansions"] if any(word in item["op"] for word in words)]
    assert found, f"no expansion is named after one of {words}: {stats['expansions']}"
    assert all(item["reason"] for item in found)
    assert any(source in item["line"] for item in found), f"no line of {source} in {found}"


@pytest.mark.parametrize("name", MIXERS)
def test_mixer_between_blocks_and_head_expands_there(name: str) -> None:
    """A causal one stands below the blocks as well."""
    mixer, words = MIXERS[name]
    below = mixer() if name in CAUSAL else None
    model = Small(SPELLINGS["sdpa_is_causal"], before=below, after=mixer()).double()
    stats = compare(model, batch_with_forks()).stats
    assert stats["fallback"] is None
    assert stats["attention_rewritten"] == 1
    if name in ALONG_TREE:
        assert stats["expansions"] == []
        return
    assert_named(stats, words, "mixers.py")
    assert all(item["contracted"] for item in stats["expansions"]) == (name in CAUSAL)


@pytest.mark.parametrize("name", BELOW)
def test_mixer_below_the_blocks_keeps_everything_exact(name: str) -> None:
    mixer, words = MIXERS[name]
    model = Small(SPELLINGS["sdpa_is_causal"], before=mixer()).double()
    stats = compare(model, batch_with_forks()).stats
    if stats["fallback"] is None:
        assert_named(stats, words, "mixers.py")
        assert stats["attention_rewritten"] == 0
    else:
        assert any(word in stats["fallback"] for word in words)


@pytest.mark.parametrize("name", ["same_conv", "row_mean", "batch_norm"])
def test_mixer_of_padded_rows(name: str) -> None:
    mixer, words = MIXERS[name]
    model = Small(SPELLINGS["sdpa_is_causal"], after=mixer()).double()
    # Padding reaches the loss through the mixer: dropping it would change the result.
    stats = compare(model, batch_with_forks("right")).stats
    assert_named(stats, words, "mixers.py")


class Bidirectional(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        return nn.functional.scaled_dot_product_attention(q, k, v)


class OneAhead(nn.Module):
    """Causal but for one token."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        hidden = torch.ones(q.size(-2), q.size(-2), dtype=torch.bool).triu(2)
        return (q @ k.mT).masked_fill(hidden, float("-inf")).softmax(-1) @ v


class PrefixVisible(nn.Module):
    """Causal, and every token sees the first three."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        seen = torch.ones(q.size(-2), q.size(-2), dtype=torch.bool).tril()
        seen[:, :3] = True
        return nn.functional.scaled_dot_product_attention(q, k, v, seen)


class AlmostMasked(nn.Module):
    """The future is only discouraged, not hidden."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        bias = torch.full((q.size(-2), q.size(-2)), -2.0, dtype=q.dtype).triu(1)
        return nn.functional.scaled_dot_product_attention(q, k, v, bias)


class MaskByRow(nn.Module):
    """Odd rows do not see the token before."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        length = q.size(-2)
        place, row = torch.arange(length), torch.arange(q.size(0))
        behind = place[:, None] - place[None, :]
        odd = (row % 2 == 1)[:, None, None, None]
        return nn.functional.scaled_dot_product_attention(q, k, v, (behind >= 0) & ~(odd & (behind == 1)))


@pytest.mark.parametrize("attention", [Bidirectional, OneAhead, PrefixVisible, AlmostMasked, MaskByRow])
def test_attention_that_is_not_causal_is_not_rewritten(attention: type[nn.Module]) -> None:
    stats = compare(Small(attention).double(), batch_with_forks()).stats
    assert stats["attention_rewritten"] == 0
    blamed = [item["op"] for item in stats["expansions"]] + [stats["fallback"] or ""]
    assert any(word in text for text in blamed for word in ("attention", "softmax", "bmm")), blamed


def test_evaluation_without_dropout_is_packed() -> None:
    model = Small(SPELLINGS["sdpa_is_causal"], after=Dropout()).double().eval()
    stats = compare(model, batch_with_forks()).stats
    assert stats["fallback"] is None
    assert stats["expansions"] == []


def test_on_unsupported_error_names_the_op() -> None:
    model = Small(SPELLINGS["sdpa_is_causal"], after=MIXERS["roll"][0]()).double()
    with refused("roll"):
        loss_of(batch_with_forks())(compile_with(model, on_unsupported="error"))


def test_on_unsupported_fallback_runs_the_ordinary_graph() -> None:
    model = Small(SPELLINGS["sdpa_is_causal"], after=MIXERS["roll"][0]()).double()
    stats = compare(model, batch_with_forks(), on_unsupported="fallback").stats
    assert "roll" in stats["fallback"]
    assert stats["attention_rewritten"] == 0
