"""Wrong masks, positions and scales: each is far beyond the tolerance, or other tests prove nothing."""

import dataclasses
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import treefx
import treefx.runtime.call_plan
from tests.backend.native import native_loss
from tests.backend.support import Pair, compile_with, in_case, llama
from tests.batches import shared_batch
from tests.models import double
from tests.oracle import FLOAT64, Outcome, outcome, relative_errors, separate_rows

STEM = [11, 12, 13, 14, 15, 16, 17, 18]
ROWS = [
    [*STEM, 21, 22, 23, 24],
    [*STEM, 21, 22, 25],
    [*STEM, 21, 26, 27, 28, 29],
    [*STEM, 31, 32],
    [*STEM[:5], 41, 42, 43],
    [51, 52, 53, 54],
]
Variant = Callable[[nn.Module, treefx.Forest], Tensor]


def logits_of(model: nn.Module, forest: treefx.Forest, used: treefx.Forest | None = None) -> Tensor:
    """Logits of the packed row, run as `used` where that is another tree over the same tokens."""
    used = forest if used is None else used
    with treefx.use(used):
        return model(**used.model_inputs(), use_cache=False).logits


def right(model: nn.Module, forest: treefx.Forest) -> Tensor:
    return native_loss(forest)(model)


def no_scale(model: nn.Module, forest: treefx.Forest) -> Tensor:
    return -treefx.edge_logprobs(logits_of(model, forest), forest).sum()


def scale_of_the_source(model: nn.Module, forest: treefx.Forest) -> Tensor:
    logp = treefx.edge_logprobs(logits_of(model, forest), forest)
    return -(forest.multiplicity[forest.edges.source] * logp).sum()


def packed_positions(model: nn.Module, forest: treefx.Forest) -> Tensor:
    place = torch.arange(forest.num_tokens, dtype=forest.depth.dtype)
    logits = logits_of(model, forest, dataclasses.replace(forest, depth=place))
    return treefx.losses.sft(treefx.edge_logprobs(logits, forest), forest)


def plain_causal_mask(model: nn.Module, forest: treefx.Forest) -> Tensor:
    ends = torch.full_like(forest.subtree_end, forest.num_tokens)
    logits = logits_of(model, forest, dataclasses.replace(forest, subtree_end=ends))
    return treefx.losses.sft(treefx.edge_logprobs(logits, forest), forest)


WRONG = (no_scale, scale_of_the_source, packed_positions, plain_causal_mask)


def gradient_error(got: Outcome, expected: Outcome) -> float:
    """Largest relative error of the gradients alone."""
    return max(error for name, error in relative_errors(got, expected).items() if name != "loss")


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_wrong_variants(name: str) -> None:
    """The right variant is exact, and each wrong one is far off, on one compilation."""
    model, forest = double(name, num_hidden_layers=1), treefx.Forest.from_sequences(ROWS)
    compiled = compile_with(model)
    expected = separate_rows(model, ROWS, [[1.0] * len(row) for row in ROWS])
    for variant in (right, *WRONG, right):
        with in_case(variant.__name__):
            error = gradient_error(outcome(model, lambda: variant(compiled, forest)), expected)
            assert error <= FLOAT64 if variant is right else error > 1e-3


def no_tree(row: Any, column: Any, end: Any) -> tuple[Any, Any, Any]:
    """Every token sees all before it in packed order."""
    return row, column, np.full_like(end, len(end))


def no_ancestors(row: Any, column: Any, end: Any) -> tuple[Any, Any, Any]:
    """Every token sees itself alone."""
    return row, column, np.arange(1, len(end) + 1, dtype=end.dtype)


def shorter_subtrees(row: Any, column: Any, end: Any) -> tuple[Any, Any, Any]:
    """The last two descendants of a token do not see it (of the last alone nothing is predicted)."""
    return row, column, np.maximum(end - 2, np.arange(1, len(end) + 1)).astype(end.dtype)


def shifted_columns(row: Any, column: Any, end: Any) -> tuple[Any, Any, Any]:
    """Every token but the first is read one column too early."""
    return row, np.maximum(column - 1, 0), end


def test_wrong_tries_of_a_padded_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = treefx.runtime.call_plan._tensors
    pair, batch = Pair(llama()), shared_batch(rows=4, length=14, shared=6)
    pair.check(batch)
    for wrong in (no_tree, no_ancestors, shorter_subtrees, shifted_columns):

        def spoiled(row: Any, column: Any, end: Any, *rest: Any) -> treefx.runtime.call_plan.Batch:
            return tensors(*wrong(row, column, end), *rest)

        monkeypatch.setattr(treefx.runtime.call_plan, "_tensors", spoiled)
        monkeypatch.setattr(treefx.runtime.call_plan, "_recent", deque())
        with in_case(wrong.__name__), pytest.raises(AssertionError, match="differ by more than"):
            pair.check(batch, tolerance=1e-3)
