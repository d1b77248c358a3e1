"""The dry run: what it says is what a call then does, and nothing has run."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import treefx
from tests.inspection.causes import CAUSES, Planted
from tests.inspection.situations import LM, compiled, ids_of, train
from tests.oracle import refused


def test_a_dry_run_says_what_the_call_then_does() -> None:
    ids = ids_of()
    model = LM()
    report = treefx.explain(model, {"input_ids": ids, "labels": ids}, {"min_sharing": 1.0})
    ran = torch.compile(model, backend="treefx", options={"inner": "aot_eager", "min_sharing": 1.0})
    train(ran, ids)
    found = treefx.inspect(ran)
    for name in ("ran", "raw_tokens", "tokens", "attention_rewritten", "expansions", "sharing_ratio"):
        assert report.stats[name] == found.stats[name], name
    assert [(item.name, item.ran, item.flops_after) for item in report.operators] == [
        (item.name, item.ran, item.flops_after) for item in found.operators
    ]
    assert report.forest == found.forest and report.verdict.coverage == found.verdict.coverage
    assert report.memory.bytes > 0 and report.restoration and not report.calls
    assert report.verdict.sentence.count("This batch would run") + report.verdict.sentence.count("this batch") == 1
    assert treefx.Report.from_json(report.to_json()) == report


def test_nothing_runs_and_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    def compiles(*args: Any, **options: Any) -> Any:
        raise AssertionError("something was compiled")

    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx_inner", compiles)
    model = Planted(CAUSES["batch statistic"].plant)
    before = copy.deepcopy(model.state_dict())
    ids = ids_of()
    random = torch.get_rng_state()
    report = treefx.explain(model, {"input_ids": ids, "labels": ids}, {"min_sharing": 1.0})
    assert torch.equal(random, torch.get_rng_state())
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert "TFX109" in {loss.code for loss in report.verdict.losses}
    with refused("has run"):
        treefx.inspect(torch.compile(model, backend="treefx"))


@pytest.mark.parametrize("name", ["dropout", "4-D mask", "graph break", "too little sharing", "cache in use"])
def test_causes_are_named_before_anything_runs(name: str) -> None:
    cause = CAUSES[name]
    ids = cause.ids()
    batch: dict[str, Tensor] = {"input_ids": ids, **cause.given(ids)}
    report = treefx.explain(Planted(cause.plant), batch, {"min_sharing": cause.min_sharing})
    assert f"[{cause.code}]" in report.why() or cause.code in report.verdict.sentence
    assert report.verdict.advice and report.stats["ran"] == ("packed" if name == "dropout" else "ordinary")


def test_a_compiled_model_and_bad_input() -> None:
    ids = ids_of()
    report = treefx.explain(compiled(), ids, {"min_sharing": 1.0})
    assert report.stats["tokens"] == 18
    with refused("batch", "list"):
        treefx.explain(LM(), [[1, 2]])
    with refused("model", "int"):
        treefx.explain(3, ids)
    with refused("no_such_option"):
        treefx.explain(LM(), ids, {"no_such_option": 1})
