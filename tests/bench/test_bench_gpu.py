"""``treefx bench gpu``: every stage runs in rehearsal, says what is wrong, and measures nothing without a device."""

import json
import os
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

pytest.importorskip("triton")
pytest.importorskip("transformers")

from treefx.bench.gpu import launches, stages
from treefx.bench.gpu.batches import SHARING, make_batch, shortened, tree_of
from treefx.bench.gpu.comparison import compare_steps
from treefx.bench.gpu.kernels import Attention, correct
from treefx.bench.gpu.launches import Form
from treefx.bench.gpu.packed_rows import pack_rows
from treefx.bench.gpu.scale import Scale
from treefx.bench.gpu.steps import STEP, Run, rehearsed, step
from treefx.cli.app import app
from treefx.errors import InputError, UnsupportedError
from treefx.forests.forest import Forest

pytestmark = pytest.mark.sample(6)

COUNTS = {"sanitize": 3, "correct": 3, "prologue": 4, "rates": 2, "attention": 2, "step": 5, "large": 1}
FIGURES = {
    "sanitize": {"same_bits"},
    "correct": {"rows_errors", "tree_errors"},
    "prologue": {"us_per_turn", "programs", "tile"},
    "rates": {"rates"},
    "attention": {"tree_forward_ms", "tree_backward_tflops"},
    "step": {"steps", "graphs"},
    "large": {"parts", "row_by_row", "uncut"},
}


def test_every_stage_is_tried() -> None:
    assert list(stages.STAGES) == list(COUNTS) == list(FIGURES)


@pytest.mark.sample(8)
@pytest.mark.parametrize("stage", [*list(COUNTS)[:-2], pytest.param("step", marks=pytest.mark.sample(24)), "large"])
def test_rehearsal(stage: str, tmp_path: Path) -> None:
    """The command writes its file and shows its table; every case is right, and has what the stage is there for."""
    out, before = tmp_path / "records.json", dict(os.environ)
    command = ["bench", "gpu", "--stage", stage, "--rehearse", "--cases", str(COUNTS[stage]), "--out", str(out)]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, (result.output, out.read_text() if out.exists() else None)
    found = json.loads(out.read_text())
    assert (found["stage"], found["rehearsal"], found["device"]) == (stage, True, "cpu")
    records, more = found["records"][: COUNTS[stage]], found["records"][COUNTS[stage] :]
    assert len(records) == COUNTS[stage] and "mean nothing" in result.output
    assert [{"times_packed_rows", "times_padded_rows", "of_bound"} <= record.keys() for record in more] == (
        [True, True] if stage == "step" else []
    )
    for record in records:
        assert record["wrong"] == [] and FIGURES[stage] <= record.keys()
    assert dict(os.environ) == before


def test_without_a_device_nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UnsupportedError, match="--rehearse"):
        next(stages.run("correct"))
    with pytest.raises(InputError, match="sanitize, correct, .* got 'speed'"):
        next(stages.run("speed"))


def test_rates_are_kept_for_the_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TREEFX_CACHE_DIR", str(tmp_path))
    fitted = {"program_us": 1.0, "full_us": 2.0, "partial_us": 3.0, "worst_error": 0.1}
    records = [
        {"of": "forward plain", "rates": {"128x64 w8 s3": fitted, "64x64 w4 s3": {"problem": "no room"}}, "wrong": []},
        {"not_run": "no such form", "wrong": []},
    ]
    found = json.loads(launches.keep(records).read_text())
    assert list(found.values()) == [{"forward plain": {"128x64 w8 s3": [1.0, 2.0, 3.0]}}]
    for wrong in (["--stage", "rates", "--rehearse"], ["--stage", "correct"]):
        result = CliRunner().invoke(app, ["bench", "gpu", *wrong, "--keep"])
        assert result.exit_code == 2 and "only --stage rates on a GPU" in result.output


def _dies(scale: Scale, case: Any) -> dict[str, Any]:
    os._exit(3)


def _raises(scale: Scale, case: Any) -> dict[str, Any]:
    raise RuntimeError("an illegal address")


@pytest.mark.parametrize(("measure", "said"), [(_dies, "exit code 3"), (_raises, "an illegal address")])
def test_a_case_that_fails_costs_itself_alone(
    measure: Callable[..., Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(stages.STAGES, "correct", replace(stages.STAGES["correct"], measure=measure))
    records = list(stages.run("correct", rehearsal=True, cases=2, method="fork"))
    assert [said in record["wrong"][0] for record in records] == [True, True]
    assert [line[0] for line in stages.rows(records)] == [record["case"] for record in records]
    late = list(stages.run("correct", rehearsal=True, cases=2, minutes=-1.0, method="fork"))
    assert len(late) == 2 and all("minutes are up" in record["wrong"][0] for record in late)


def test_a_wrong_attention_is_said_to_be_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    from treefx.kernels import tree_attention

    def wrong(q: Any, k: Any, v: Any, ends: Any, impl: str, deterministic: bool) -> Any:
        return tree_attention(q, k, v, torch.full_like(ends, len(ends)), impl="reference")

    monkeypatch.setattr("treefx.bench.gpu.kernels.tree_attention", wrong)
    monkeypatch.setenv("TREEFX_KERNEL_PATH", "plain")
    (case,) = [one for one in stages.STAGES["correct"].cases[3:4] if isinstance(one, Attention)]
    record = correct(Scale(True), stages.STAGES["correct"].rehearsed(case))
    assert any("out of tree must be off by at most 1.5" in text for text in record["wrong"])


def test_a_form_that_gives_way_to_another_is_not_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own results would be those of the other."""
    from treefx.kernels import tree_attention

    def gives_way(*given: Any, deterministic: bool, **options: Any) -> Any:
        warnings.warn("treefx: the Gluon forward kernel is switched off for this attention", RuntimeWarning)
        return tree_attention(*given, impl="reference")

    monkeypatch.setattr("treefx.bench.gpu.kernels.tree_attention", gives_way)
    monkeypatch.setenv("TREEFX_KERNEL_PATH", "plain")
    case = next(one for one in stages.STAGES["correct"].cases if isinstance(one, Attention) and one.form == "Gluon")
    with warnings.catch_warnings(), pytest.raises(RuntimeWarning, match="is switched off"):
        warnings.simplefilter("ignore")
        correct(Scale(True), stages.STAGES["correct"].rehearsed(case))


def test_batches_share_what_their_names_say() -> None:
    shared = {}
    for name, rows in SHARING.items():
        rows = shortened(rows)
        batch = make_batch(Scale(True), rows, 512)
        forest = Forest.from_padded(batch.input_ids, batch.attention_mask)
        shared[name] = forest.overlap_ratio
        distinct = {(row[: place + 1]) for row in rows for place in range(len(row))}
        assert forest.num_tokens == sum(pieces[-1][1] for pieces in distinct)
        assert sorted(forest.subtree_end.tolist()) == sorted(tree_of(rows).subtree_end().tolist())
    assert shared["overlap 0 %"] < shared["overlap 20 %"] < shared["overlap 60 %"] < shared["overlap 92 %"]


def test_forms_are_named_for_people() -> None:
    cases = [case for stage in stages.STAGES.values() for case in stage.cases]
    assert any(isinstance(case, Form) for case in cases)
    for stage in stages.STAGES.values():
        names = [case.name for case in stage.cases]
        assert len(set(names)) == len(names)


def _concluded(*ways: str) -> list[dict[str, Any]]:
    runs = [rehearsed(Run("0.6B", False, way, ("overlap 60 %",))) for way in ways]
    return list(compare_steps(Scale(True), [step(Scale(True), run) for run in runs]))


@pytest.mark.sample(6)
@pytest.mark.parametrize("wrong", ["position_ids", "labels", "lengths"])
def test_packed_rows_are_compared(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows in one without positions, that predict each other's first token, or that are cut elsewhere are seen."""

    def spoiled(batch: Any) -> dict[str, Any]:
        inputs = pack_rows(batch)
        others = {"position_ids": torch.zeros_like(inputs["position_ids"]), "labels": inputs["input_ids"]}
        return {**inputs, **{name: value for name, value in others.items() if name == wrong}}

    if wrong == "lengths":
        from treefx.bench.gpu.steps import attend_packed_rows

        monkeypatch.setattr(
            "treefx.bench.gpu.steps.attend_packed_rows", lambda model, rows: attend_packed_rows(model, [sum(rows)])
        )
    monkeypatch.setattr("treefx.bench.gpu.steps.pack_rows", spoiled)
    (record,) = _concluded("treefx", "packed rows")
    assert any("apart at most" in text for text in record["wrong"])


@pytest.mark.parametrize("spoiled", ["loss", "one gradient", "no gradient", "nan"])
def test_steps_that_differ_are_said_to_differ(spoiled: str) -> None:
    """A loss, or the gradient of one small parameter, that is off on one way alone; one that is not there."""

    def record(way: str) -> dict[str, Any]:
        measured = {"raw_tokens": 20, "tokens": 10, "seconds": 1.0, "loss": 2.0, "norms": {"large": 1.0, "small": 0.01}}
        return {"model": "Qwen3", "way": way, "steps": {"overlap 60 %": measured}, "wrong": []}

    records = [record("treefx"), record("packed rows"), record("padded rows")]
    (right,) = compare_steps(Scale(True), records)
    assert right["wrong"] == [] and right["token_bound"] == 2.0 and right["of_bound"] == 0.5
    measured = records[1]["steps"]["overlap 60 %"]
    if spoiled == "loss":
        measured["loss"] = 2.001
    elif spoiled == "no gradient":
        del measured["norms"]["small"]
    else:
        measured["norms"]["small"] = float("nan") if spoiled == "nan" else 0.0101
    (wrong,) = compare_steps(Scale(True), records)
    assert any("apart at most" in text for text in wrong["wrong"])


@pytest.mark.sample(4)
def test_what_does_not_fit_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from treefx.bench.gpu import steps

    measure, full = steps._measure, {"padded rows"}

    def tight(scale: Scale, run: Run, *args: Any) -> dict[str, Any]:
        if run.way in full:
            raise torch.OutOfMemoryError("full")
        return measure(scale, run, *args)

    monkeypatch.setattr(steps, "_measure", tight)
    (record,) = _concluded("treefx", "packed rows", "padded rows")
    assert record["wrong"] == [] and "times_packed_rows" in record and "times_padded_rows" not in record
    full.add("treefx")
    found = step(Scale(True), rehearsed(STEP[0]))
    assert found["wrong"][0] == "treefx must fit the device, and does not: overlap 60 %"
