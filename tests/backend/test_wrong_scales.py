"""Wrong variants of the native level: each is far beyond the tolerance, or other tests prove nothing."""

import dataclasses
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import treefx
from tests.backend.test_native import native_loss
from tests.models import double
from tests.oracle import FLOAT64, Outcome, compile_with, outcome, relative_errors, separate_rows

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


def error_of(variant: Variant, name: str) -> float:
    model, forest = double(name), treefx.Forest.from_sequences(ROWS)
    compiled = compile_with(model)
    expected = separate_rows(model, ROWS, [[1.0] * len(row) for row in ROWS])
    return gradient_error(outcome(model, lambda: variant(compiled, forest)), expected)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_right_variant(name: str) -> None:
    assert error_of(right, name) <= FLOAT64


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize("variant", WRONG, ids=lambda variant: variant.__name__)
def test_wrong_variant(variant: Variant, name: str) -> None:
    assert error_of(variant, name) > 1e-3
