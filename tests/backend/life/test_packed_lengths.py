"""Packed rows of any length: two compilations serve them all, and random packings are exact."""

import functools
import itertools
import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tests import strategies
from tests.backend.calls.test_packed_rows import one_layer
from tests.backend.calls.test_packed_traps import given_mask
from tests.backend.packed import AGENTS, Packed, loss_inside, loss_outside, pack, trie_size
from tests.oracle import FLOAT64, assert_close, compile_with, outcome, stats_of
from treefx.inputs import sizes


def exact_step(compiled: Any, model: nn.Module, packed: Packed, step: Any = loss_inside) -> dict[str, Any]:
    """One exact step; the statistics of its call."""
    expected = outcome(model, lambda: step(packed)(model))
    assert_close(outcome(model, lambda: step(packed)(compiled)), expected, FLOAT64)
    return stats_of(compiled)


def drawn(seed: int, sequences: int) -> list[list[int]]:
    """Sequences of which several start alike."""
    draw = random.Random(seed)
    stem = [draw.randrange(3, 60) for _ in range(6)]
    rows = [[*stem[: draw.randint(1, 6)], *draw.choices(range(3, 60), k=draw.randint(0, 5))] for _ in range(sequences)]
    return [*rows, rows[0]]


def assert_lengths_share(compiled: Any, model: nn.Module, step: Any = loss_inside, seeds: int = 12) -> None:
    lengths: set[int] = set()
    for seed in range(seeds):
        rows = drawn(seed, 3 + seed)
        pads = next(n for n in itertools.count(seed % 3) if n + sum(map(len, rows)) not in lengths)
        packed = pack(rows, pads=pads, counted=seed % 2 == 0)
        stats = exact_step(compiled, model, packed, step)
        assert stats["ran"] == "packed" and stats["fallback"] is None
        assert stats["tokens"] == trie_size(packed) and stats["raw_tokens"] == packed.input_ids.numel()
        lengths.add(packed.input_ids.numel())
    assert stats["compiles"] <= 2


def test_twelve_lengths_compile_twice_at_most() -> None:
    """And a single sequence among them runs as the row that it is."""
    model = one_layer("mistral")
    compiled = compile_with(model, inner="eager")
    assert_lengths_share(compiled, model)
    packed = pack([AGENTS[2]])
    assert exact_step(compiled, model, packed)["tokens"] == trie_size(packed)


def test_lengths_with_the_loss_outside() -> None:
    model = one_layer("llama")
    assert_lengths_share(compile_with(model, inner="eager"), model, loss_outside, 6)


def test_given_masks_of_all_lengths() -> None:
    model = one_layer("llama")
    compiled = compile_with(model, inner="eager")
    for seed in range(4):
        packed = pack(drawn(seed, 3 + seed), pads=seed)
        mask = given_mask(packed)
        stats = exact_step(compiled, model, packed, lambda packed, mask=mask: loss_inside(packed, attention_mask=mask))
        assert stats["ran"] == "packed" and stats["compiles"] <= 2
        assert stats["tokens"] == trie_size(pack(drawn(seed, 3 + seed)))


def test_rows_longer_than_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some masks are looked up in a table for the first row's length, up to a power of two: one more is made, for all.

    What the first analysis says of rows that are not packed holds for lengths of its table alone, too.
    """
    monkeypatch.setattr(sizes, "_TABLE", 32)
    model = one_layer("mistral")
    compiled = torch.compile(model, backend="treefx", options={"inner": "eager", "min_sharing": 1.0}, dynamic=True)
    for seed, length in enumerate([30, 50, 60, 45]):
        rows = drawn(seed, 3)
        packed = pack(rows, pads=length - pack(rows).input_ids.numel())
        stats = exact_step(compiled, model, packed)
        assert stats["ran"] == "packed" and stats["tokens"] == trie_size(packed) and stats["compiles"] <= 2


def test_rows_of_any_number() -> None:
    model = one_layer("mistral")
    compiled = compile_with(model, inner="eager")
    for seed, lengths in enumerate([(3, 4), (4, 5, 3), (2, 6), (5, 5, 5, 2)]):
        packed = pack(*[drawn(10 * seed + row, size) for row, size in enumerate(lengths)], counted=seed % 2 == 0)
        stats = exact_step(compiled, model, packed)
        assert stats["tokens"] == trie_size(packed) and stats["compiles"] <= 2


@functools.cache
def compiled_for_all() -> tuple[Any, nn.Module]:
    """One model for all packings."""
    model = one_layer("mistral")
    return torch.compile(model, backend="treefx", options={"inner": "eager", "min_sharing": 1.0}, dynamic=True), model


PACKINGS = st.one_of(
    strategies.chains(), strategies.stars(), strategies.with_duplicates(), strategies.one_token_rows(),
    strategies.first_token_forks(), strategies.random_rows(),
)  # fmt: skip


@settings(max_examples=10)
@given(PACKINGS, st.integers(0, 3), st.booleans())
def test_random_packings(rows: list[list[int]], pads: int, counted: bool) -> None:
    packed = pack(rows, pads=pads, counted=counted)
    if packed.input_ids.numel() > 1 and bool((packed.labels >= 0).any()):
        stats = exact_step(*compiled_for_all(), packed)
        assert stats["ran"] == "packed" and stats["tokens"] == trie_size(packed)
