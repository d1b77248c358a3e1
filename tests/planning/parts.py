"""What tests of forests in parts share: a model, a weighted forest, plans from no cut to one part per token."""

import functools
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import treefx
from tests.backend.native import Rows, TakesCacheFlag, branches, random_weights, rollouts
from tests.models import TinyLM
from tests.oracle import FLOAT64, Outcome, assert_close, compile_with, outcome, separate_rows
from tests.planning.cuts import cut_at, every_node, inside_nodes, random_cuts, uncut
from tests.spellings import GROUPED, SPELLINGS
from treefx.planning.execution import boundary
from treefx.planning.execution.backward import backward
from treefx.planning.search.plan import Plan
from treefx.runtime.cut import EdgeSubset

SHARED = [[11, 12, 13, 14, 15, 21, 22, 23], [11, 12, 13, 14, 15, 31, 32], [11, 12, 13, 14, 15, 41, 42, 43]]
"""Three branches on one cut, and a cut above it that all of them read as well."""

Loss = Callable[[Tensor, EdgeSubset], Tensor]
TRAIN_AND_KV = 2
"""Compilations: one graph with gradients, one for K/V alone; never one per part."""


def sft(logp: Tensor, forest: treefx.Forest) -> Tensor:
    return treefx.losses.sft(logp, forest)


def run(compiled: Any, model: nn.Module, plan: Plan, loss: Loss = sft, **options: Any) -> Outcome:
    model.zero_grad(set_to_none=True)
    value = backward(compiled, plan, loss, **options)
    gradients = {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
    return Outcome(value, gradients)


def whole_forest(model: nn.Module, forest: treefx.Forest, loss: Any, entropies: bool = False) -> Outcome:
    """The loss on all edges at once, their log-probabilities from the model itself on every row alone.

    Args:
        model: runs eagerly.
        forest: the forest.
        loss: gets [E]; [E, 2] where entropies are asked for.
        entropies: of the distributions that predict the edges.
    """
    edge_to = {int(target): edge for edge, target in enumerate(forest.edges.target)}

    def step() -> Tensor:
        found: dict[int, Tensor] = {}
        for row, path in zip(forest.sequences(), forest.token_of, strict=True):
            ids = torch.as_tensor(row)
            logp = model(input_ids=ids[None]).logits[0].log_softmax(-1)
            entropy = -(logp.exp() * logp).sum(-1)
            for place in range(1, len(ids)):
                both = torch.stack([logp[place - 1, ids[place]], entropy[place - 1]])
                found[edge_to[int(path[place])]] = both if entropies else both[0]
        values = torch.stack([found[edge] for edge in range(len(edge_to))])
        return loss(values, boundary.all_edges(forest))  # type: ignore[no-any-return]

    return outcome(model, step)


@pytest.fixture(scope="module", autouse=True)
def reproducible() -> Iterator[None]:
    """Instead of a fresh Dynamo per test: tests share models, and what these are compiled to."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch._dynamo.reset()
    with torch._dynamo.config.patch(recompile_limit=64):
        yield
    torch._dynamo.reset()
    torch.set_num_threads(threads)
    tiny.cache_clear()


@functools.cache
def tiny(spelling: str = "sdpa_is_causal", **changes: Any) -> tuple[nn.Module, Any]:
    """A small model in float64 and the same compiled, one for all tests that ask for it; none changes it."""
    torch.manual_seed(0)
    model = TakesCacheFlag(TinyLM({**SPELLINGS, **GROUPED}[spelling], **changes)).double()
    return model, compile_with(model)


def weighted_forest(seed: int = 0) -> tuple[treefx.Forest, Rows, list[list[float]]]:
    rows = rollouts(seed)
    weights = random_weights(rows, seed)
    return treefx.Forest.from_sequences(rows, weights=weights), rows, weights


def plans_of(forest: treefx.Forest) -> list[Plan]:
    """From no cut to one part per token: at nodes, inside of nodes, nested, siblings joined, all modes."""
    recomputed = every_node(forest, keeps=("recompute",))
    everywhere = cut_at(forest, range(forest.num_tokens))
    plans = [uncut(forest), every_node(forest), recomputed, inside_nodes(forest), everywhere]
    return plans + [random_cuts(forest, seed, share) for seed, share in enumerate((0.1, 0.3, 0.6))]


def check_drawn_forests(model: nn.Module, compiled: Any, examples: int) -> None:
    """Drawn forests with drawn cuts and drawn weights, against every row on its own."""

    @settings(max_examples=examples, deadline=None)
    @given(trees=st.lists(branches, min_size=1, max_size=3), seed=st.integers(0, 99), share=st.floats(0.05, 1.0))
    def check(trees: list[Rows], seed: int, share: float) -> None:
        rows = [row for tree in trees for row in tree]
        random.Random(seed).shuffle(rows)
        weights = random_weights(rows, seed)
        forest = treefx.Forest.from_sequences(rows, weights=weights)
        expected = separate_rows(model, rows, weights)
        if all(g is None or not g.any() for g in expected.gradients.values()):
            return
        assert_close(run(compiled, model, random_cuts(forest, seed, share)), expected, FLOAT64)

    check()


def assert_right_only_without(wrong: Any, got: Outcome, expected: Outcome) -> None:
    if wrong is None:
        assert_close(got, expected, FLOAT64)
    else:
        with pytest.raises(AssertionError, match="differ by more than"):
            assert_close(got, expected, 1e-3)
