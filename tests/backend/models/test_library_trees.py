"""A library's own recurrence kernel along a tree, a call per level: what a GPU runs, by stand-ins on the CPU."""

import copy
import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import treefx
from tests.backend.models.test_libraries import (
    BATCH,
    calls_libraries,
    check,
    flattened,
    model_of,
    model_of_packed,
    packed_step,
)
from tests.backend.packed import AGENTS, trie_size
from tests.backend.support import compile_with
from tests.batches import Batch, distinct_tokens, shared_batch
from tests.libraries import CALLS
from tests.oracle import FLOAT64, assert_close, outcome
from treefx.kernels.recurrence import tree_levels
from treefx.passes.trace import library_tree

FUNCTIONS = {
    "qwen3_next": "chunk_gated_delta_rule", "qwen3_5_text": "chunk_gated_delta_rule", "kimi_linear": "chunk_kda",
    "mamba2": "mamba_chunk_scan_combined", "nemotron_h": "mamba_chunk_scan_combined",
    "falcon_h1": "mamba_chunk_scan_combined", "bamba": "mamba_chunk_scan_combined",
}  # fmt: skip


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(library_tree, "_KEPT_WHOLE", {"cpu"})
    CALLS.clear()
    yield
    CALLS.clear()


def fresh(name: str) -> nn.Module:
    try:
        return copy.deepcopy(model_of(name))
    except ValueError:
        pytest.skip(f"this version of transformers has no {name}")


@pytest.mark.zoo
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_call_per_level(name: str) -> None:
    model = fresh(name)
    stats = check(model, compile_with(model, inner="eager"), BATCH)
    assert stats["ran"] == "packed" and stats["expansions"] == [] and stats["recurrences_rewritten"] == 1
    assert stats["tokens"] <= distinct_tokens(BATCH) < stats["raw_tokens"]
    # A prefix and its branches are two levels; the backward runs the forward again.
    assert CALLS == {FUNCTIONS[name]: 2 * 2}


@pytest.mark.parametrize("name", ["qwen3_next", "mamba2"])
def test_lengths_and_paddings_through_one_compilation(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes are symbols from the start; Mamba-2's become symbols when they change."""
    levels: list[int] = []

    def found(*args: Any) -> tree_levels.Levels:
        made = tree_levels.find_levels(*args)
        levels.append(len(made.levels))
        return made

    monkeypatch.setattr(library_tree, "find_levels", found)
    model = fresh(name)
    options: Any = {"inner": "eager", "min_sharing": 1.0}
    compiled = torch.compile(model, backend="treefx", options=options, dynamic=None if name == "mamba2" else True)
    batches = [BATCH, shared_batch(4, 13, 6, 61, seed=1), shared_batch(3, 11, 5, 61, seed=2, padding="left")]
    batches += [shared_batch(2, 70, 50, 61, seed=3, padding="right")]
    for batch in batches:
        with torch.no_grad():
            compiled(**batch.inputs())
        levels.clear()
        stats = check(model, compiled, batch)
        assert stats["ran"] == "packed" and stats["expansions"] == []
        assert CALLS == {FUNCTIONS[name]: sum(levels)} and len(levels) == 2, "once forward, once backward"


@calls_libraries
@pytest.mark.parametrize("name", ["qwen3_next", "nemotron_h"])
def test_packed_sequences(name: str) -> None:
    """Three levels: the prompt, its turns, and what follows them; nothing else is told of ends or numbers."""
    model = copy.deepcopy(model_of_packed(name))
    packed, more = flattened(AGENTS)
    stats = packed_step(model, compile_with(model, inner="eager"), packed, **more)
    assert stats["ran"] == "packed" and stats["expansions"] == [] and stats["tokens"] <= trie_size(packed)
    assert set(CALLS) == {FUNCTIONS[name]} and CALLS[FUNCTIONS[name]] <= 2 * 3


@pytest.mark.parametrize(("name", "depth", "levels"), [
    ("qwen3_next", 3, 3), ("qwen3_next", 40, 0), ("kimi_linear", 3, 3), ("mamba2", 40, 0),
])  # fmt: skip
def test_depths_of_a_forest(name: str, depth: int, levels: int) -> None:
    """A comb: every token of the longest row is a node. Where levels are many, ``tree_scan`` runs if it can."""
    model = fresh(name)
    compiled = compile_with(model, inner="eager")
    spine = [(7 * i) % 50 + 3 for i in range(depth + 1)]
    rows = [spine, *([*spine[:i], 1, 2] for i in range(1, depth))]
    forest = treefx.Forest.from_sequences(rows)

    def on_tree() -> Tensor:
        with treefx.use(forest):
            logits = compiled(**forest.model_inputs(), use_cache=False).logits
            return treefx.losses.sft(treefx.edge_logprobs(logits, forest), forest)

    def on_rows() -> Tensor:
        losses = []
        for row in rows:
            logits = model(input_ids=torch.tensor([row]), use_cache=False).logits[0, :-1]
            losses.append(nn.functional.cross_entropy(logits, torch.tensor(row[1:]), reduction="sum"))
        return torch.stack(losses).sum()

    expected = outcome(model, on_rows)
    CALLS.clear()
    assert_close(outcome(model, on_tree), expected, FLOAT64)
    assert CALLS[FUNCTIONS[name]] == 2 * levels


def test_states_of_the_wrong_node_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    def first_parent(*args: Any) -> tree_levels.Levels:
        found = tree_levels.find_levels(*args)
        levels = [
            level if level.parents is None else dataclasses.replace(level, parents=torch.zeros_like(level.parents))
            for level in found.levels
        ]
        return dataclasses.replace(found, levels=tuple(levels))

    monkeypatch.setattr(library_tree, "find_levels", first_parent)
    model = fresh("qwen3_next")
    ids = torch.tensor([[3, 4, 5, 6], [3, 4, 7, 8], [9, 2, 5, 6], [9, 2, 7, 8]])
    with pytest.raises(AssertionError):
        check(model, compile_with(model, inner="eager"), Batch(ids, None, ids))


@pytest.mark.parametrize("name", ["qwen3_next", "kimi_linear"])
def test_a_release_without_states(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its calls are read in operators, or run on rows."""

    later = {
        function: dataclasses.replace(how, needs=how.needs | {"argument_of_a_later_release"})
        for function, how in library_tree._LEVELED.items()
    }
    monkeypatch.setattr(library_tree, "_LEVELED", later)
    model = fresh(name)
    stats = check(model, compile_with(model, inner="eager"), BATCH)
    assert stats["ran"] == "packed"
    assert CALLS == ({} if name == "qwen3_next" else {"chunk_kda": 2})
