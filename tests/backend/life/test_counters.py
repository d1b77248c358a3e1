"""Buffers that the forward changes in place stay the tensors they were, for all who hold them."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.backend.support import compile_with
from tests.batches import shared_batch
from tests.oracle import assert_close, outcome, stats_of
from treefx.passes.packing import pack_tokens
from treefx.passes.trace import trace

VOCAB, WIDTH = 61, 16
IDS = shared_batch(rows=4, length=12, shared=6, vocab=VOCAB, padding=None).input_ids


class Counter(nn.Module):
    """Scales by a number of steps that another module may count on."""

    def __init__(self, steps: Tensor) -> None:
        super().__init__()
        self.register_buffer("steps", steps)

    def count(self) -> None:
        self.steps += 1

    def forward(self, x: Tensor) -> Tensor:
        self.count()
        return x * (1 + 0.1 * self.steps)


class CounterWithoutGradient(Counter):
    @torch.no_grad()
    def count(self) -> None:
        self.steps += 1


class CounterThatReturns(Counter):
    def count(self) -> None:
        with torch.no_grad():
            self.steps = self.steps.mul_(1).add_(1)


class Counting(nn.Module):
    def __init__(self, shared: bool, kind: type[Counter] = Counter, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.embed, self.mix, self.head = (
            nn.Embedding(VOCAB, WIDTH),
            nn.Linear(WIDTH, 3 * WIDTH),
            nn.Linear(WIDTH, VOCAB),
        )
        first = torch.zeros((), dtype=dtype)
        self.before, self.behind = kind(first), kind(first if shared else first.clone())

    def forward(self, ids: Tensor) -> Tensor:
        query, key, value = self.mix(self.before(self.embed(ids)))[:, None].chunk(3, -1)
        x = self.behind(F.scaled_dot_product_attention(query, key, value, is_causal=True)[:, 0])
        return F.cross_entropy(self.head(x)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def three_calls(model: nn.Module, run: Any) -> Any:
    """Old log-probabilities, then two training steps; the last one's outcome."""
    with torch.inference_mode():
        run(IDS)
    outcome(model, lambda: run(IDS))
    return outcome(model, lambda: run(IDS))


FLOATS, INTEGERS = torch.float64, torch.int64
CASES = [
    (False, "eager", Counter, INTEGERS),
    (False, "aot_eager", CounterThatReturns, FLOATS),
    (False, "aot_eager", CounterWithoutGradient, INTEGERS),
    (True, "eager", CounterWithoutGradient, FLOATS),
    (True, "eager", CounterThatReturns, INTEGERS),
    (True, "aot_eager", Counter, FLOATS),
]
"""Every pair of two columns."""


@pytest.mark.parametrize(("shared", "inner", "kind", "dtype"), CASES)
def test_a_counter_is_the_same_tensor_in_every_call(
    shared: bool, inner: str, kind: type[Counter], dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    reference = Counting(shared, kind, dtype).double()
    model = copy.deepcopy(reference)
    held = model.before.steps
    compiled = compile_with(model, inner=inner)
    assert_close(three_calls(model, compiled), three_calls(reference, reference), 1e-10)
    assert model.before.steps is held and torch.equal(model.before.steps, reference.before.steps)
    assert torch.equal(model.behind.steps, reference.behind.steps)
    assert (model.behind.steps is held) == shared
    assert stats_of(compiled)["fallback"] is None


def test_a_new_tensor_in_place_of_the_counter_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pack_tokens, "changed_inputs", lambda gm: {})
    torch.manual_seed(0)
    model = Counting(shared=True).double()
    held = model.before.steps
    compile_with(model)(IDS)
    assert model.before.steps is not held


def test_a_counter_that_is_raised_twice_is_read_before_it_is_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace, "read_changed_inputs_once", lambda gm: None)
    torch.manual_seed(0)
    reference = Counting(shared=True).double()
    model = copy.deepcopy(reference)
    compiled = compile_with(model, inner="aot_eager")
    wrong = three_calls(model, compiled).gradients["embed.weight"]
    right = three_calls(reference, reference).gradients["embed.weight"]
    assert (wrong - right).norm() > 0.1 * right.norm()
