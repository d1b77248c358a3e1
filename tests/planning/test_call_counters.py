"""Buffers that count calls of a model: a profile leaves them alone, and a plan of any parts counts as one forward."""

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import treefx
from tests.models import TinyLM
from tests.oracle import FLOAT64, assert_close, compile_with
from tests.planning.cuts import every_node, random_cuts, uncut
from tests.planning.parts import reproducible as reproducible
from tests.planning.parts import run, sft, weighted_forest, whole_forest
from tests.spellings import SPELLINGS
from treefx.runtime.cut import Cut


class Counts(nn.Module):
    """Counts its calls and scales its logits by the count. Where `start` is given, every call is the next one to it."""

    calls: Tensor
    start: int | None = None

    def __init__(self, calls: Tensor) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = TinyLM(SPELLINGS["sdpa_is_causal"], layers=1, width=16)
        self.register_buffer("calls", calls)

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None, use_cache: bool = False) -> Any:
        if self.start is not None:
            self.calls.fill_(self.start)
        self.calls += 1
        out = self.model(input_ids=input_ids, position_ids=position_ids)
        return out._replace(logits=out.logits * (1 + 0.1 * self.calls))


@pytest.mark.parametrize("calls", [torch.zeros(()), torch.zeros(1, dtype=torch.int64)])
def test_a_plan_is_one_call(calls: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Counts(calls.clone()).double()
    compiled = compile_with(model)
    forest, _, _ = weighted_forest()
    treefx.profile(compiled, forest, lengths=(4, 8))
    assert model.calls.sum() == 0
    alone = copy.deepcopy(model)
    plans = [uncut(forest), every_node(forest, keeps=("recompute",)), random_cuts(forest, 0, 0.3)]
    for start, plan in enumerate(plans):
        alone.start = start
        assert_close(run(compiled, model, plan), whole_forest(alone, forest, sft), FLOAT64)
        assert model.calls.sum() == start + 1
    monkeypatch.setattr(Cut, "_put_back", lambda *_: nullcontext())
    alone.start = 3
    with pytest.raises(AssertionError):  # parts that go on from where the last one has counted
        assert_close(run(compiled, model, every_node(forest)), whole_forest(alone, forest, sft), FLOAT64)
