"""Modules that compute token by token and cut the graph: taken whole where they are proved to, and else left alone."""

import functools
import weakref
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import treefx
from tests.backend.native import TakesCacheFlag
from tests.backend.support import Pair, assert_packed, compare
from tests.batches import batch_with_forks, distinct_tokens, shared_batch
from tests.models import TinyLM
from tests.oracle import FLOAT64, assert_close, compile_with, separate_rows, stats_of
from tests.planning.cuts import random_cuts
from tests.planning.parts import SHARED, run
from tests.spellings import SPELLINGS
from treefx.runtime.whole import token_modules
from treefx.runtime.whole.token_proof import prove_token_module

WIDTH = 32


class Experts(nn.Module):
    """Loops over the experts that some token chose, as models of transformers do; weights of experts are stacked."""

    def __init__(self, experts: int = 4, choices: int = 2) -> None:
        super().__init__()
        self.choices, self.router = choices, nn.Linear(WIDTH, experts, bias=False)
        self.weight = nn.Parameter(torch.randn(experts, WIDTH, WIDTH) / WIDTH**0.5)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        scores, chosen = self.route(flat).softmax(-1).topk(self.choices)
        return self.add_experts(flat, scores, chosen).view_as(x)

    def route(self, flat: Tensor) -> Tensor:
        return self.router(flat)

    def add_experts(self, flat: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
        out = torch.zeros_like(flat)
        mask = F.one_hot(chosen, len(self.weight)).permute(2, 1, 0)
        for expert in mask.sum((-1, -2)).nonzero()[:, 0].tolist():
            choice, token = torch.where(mask[expert])
            found = F.linear(flat[token], self.weight[expert]).tanh() * scores[token, choice, None]
            out.index_add_(0, token, found.to(out.dtype))
        return out


class Scored(Experts):
    """Returns its router's scores too, in line."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(x), self.router(x).flatten(0, -2)


class Limited(Experts):
    """Each expert takes the first tokens of the batch that choose it."""

    most = 9

    def add_experts(self, flat: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
        admitted = F.one_hot(chosen, len(self.weight)).flatten(0, 1).cumsum(0).view(*chosen.shape, -1)
        admitted = admitted.gather(-1, chosen[..., None])[..., 0] <= self.most
        return super().add_experts(flat, scores * admitted, chosen)


class OfLargeCapacity(Experts):
    """The same with a limit that no example reaches."""

    capacity = 100_000


class Balanced(Experts):
    """Subtracts the mean score of the batch."""

    def route(self, flat: Tensor) -> Tensor:
        scores = self.router(flat)
        return scores - scores.mean(0)


class BalancedByCounts(Experts):
    """The same by a path that has no derivative."""

    def route(self, flat: Tensor) -> Tensor:
        scores = self.router(flat)
        return scores - F.one_hot(scores.argmax(-1), scores.shape[-1]).to(scores.dtype).mean(0)


class Noisy(Experts):
    def route(self, flat: Tensor) -> Tensor:
        return self.router(flat) + 0.1 * torch.rand_like(flat[:, :1])


class Counting(Experts):
    """Counts its calls, in a number that the trace does not see."""

    calls = 0

    def route(self, flat: Tensor) -> Tensor:
        self.calls = self.calls + 1
        return super().route(flat)


class InPlace(Experts):
    def route(self, flat: Tensor) -> Tensor:
        return self.router(flat.mul_(0.5))


class Apart(Experts):
    """Experts that are modules: without a token, they have no gradient."""

    def __init__(self) -> None:
        super().__init__()
        del self.weight
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    @property
    def weight(self) -> list[Tensor]:
        return [expert.weight for expert in self.experts]


class ByPosition(Experts):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * torch.arange(1, x.shape[1] + 1, device=x.device)[:, None]


REFUSED = (Limited, OfLargeCapacity, Balanced, BalancedByCounts, Noisy, Counting, InPlace, Apart, ByPosition)
prove = functools.partial(prove_token_module, width=WIDTH, dims=3, autocast=None)


@pytest.fixture(autouse=True)
def forget(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Starts without proofs: Dynamo comes to each module for the first time."""
    monkeypatch.setattr(token_modules, "_cutting", type(token_modules._cutting)())
    monkeypatch.setattr(token_modules, "_proofs", type(token_modules._proofs)())
    monkeypatch.setattr(token_modules, "_LIBRARY", "tests.")
    yield


def model(after: nn.Module, layers: int = 1) -> nn.Module:
    return TinyLM(SPELLINGS["sdpa_is_causal"], layers=layers, after=after).double()


def test_a_loop_over_experts_runs_once_per_distinct_token() -> None:
    """Batches of two shapes, all gradients in float64."""
    pair = Pair(model(Experts()))
    for seed, (rows, length) in enumerate(((4, 16), (5, 19))):
        batch = shared_batch(rows=rows, length=length, shared=8, vocab=61, padding=None, seed=seed)
        assert_packed(pair.check(batch), distinct_tokens(batch), layers=1)


def test_code_of_others_is_not_judged_by_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    """They could miss a branch that only rare values take."""
    monkeypatch.setattr(token_modules, "_LIBRARY", "transformers.")
    batch = shared_batch(rows=4, length=16, shared=8, vocab=61, padding=None)
    assert compare(model(Experts()), batch).stats["fallback"] is not None


def test_the_other_mode_and_other_choices_are_those_of_the_call() -> None:
    """Nothing of a proved module is a constant of the graph."""
    pair = Pair(model(Experts()))
    batch = batch_with_forks()
    pair.check(batch)
    for choices, is_training in ((1, True), (3, False)):
        for item in (pair.eager, pair.model):
            item.train(is_training)
            for module in item.modules():
                if isinstance(module, Experts):
                    module.choices = choices
        pair.check(batch)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_proof(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    found = prove(Experts().to(dtype), dtype=dtype)
    assert found is not None and found.one and found.names == ("weight", "router.weight")
    scored = prove(Scored().to(dtype), dtype=dtype)
    assert scored is not None and not scored.one and [of.in_line for of in scored.results] == [False, True]


@pytest.mark.parametrize("kind", REFUSED)
def test_refused(kind: type[Experts]) -> None:
    """State is as before, also where the module changed it."""
    torch.manual_seed(1)
    module = kind().double()
    before = torch.get_rng_state()
    assert prove(module, dtype=torch.float64) is None
    assert torch.equal(torch.get_rng_state(), before)


def test_parts_of_a_plan() -> None:
    """No state crosses: the module runs on the tokens of each part."""
    torch.manual_seed(2)
    whole = TakesCacheFlag(model(Experts()))
    compiled = compile_with(whole, inner="eager")
    forest = treefx.Forest.from_sequences(SHARED)
    expected = separate_rows(whole, SHARED, [[1.0] * len(row) for row in SHARED])
    assert_close(run(compiled, whole, random_cuts(forest, 1, 0.3)), expected, FLOAT64)
    assert stats_of(compiled)["fallback"] is None


def test_what_is_not_proved_stays_exact_and_would_be_wrong_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = shared_batch(rows=4, length=16, shared=8, vocab=61, padding=None)
    torch.manual_seed(1)
    limited = model(Limited())
    assert compare(limited, batch).stats["fallback"] is not None
    known = prove(Experts().double(), dtype=torch.float64)
    assert known is not None
    torch._dynamo.reset()
    monkeypatch.setattr(token_modules, "_cutting", {Experts.forward})
    monkeypatch.setattr(
        token_modules,
        "prove_token_module",
        lambda module, *_: replace(known, module=weakref.ref(module)),
    )
    with pytest.raises(AssertionError, match="differ by more than"):
        compare(limited, batch)
