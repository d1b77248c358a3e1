"""``treefx bench gpu``: every stage runs in rehearsal, reports errors, and measures nothing without a device."""

import json
import os
import select
import signal
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

pytest.importorskip("triton")
pytest.importorskip("transformers")

from tests.cli.validation import assert_measured
from treefx.cli.app import app
from treefx.errors import InputError, UnsupportedError
from treefx.forests.forest import Forest
from treefx.tools.bench.gpu import launches, stages, steps
from treefx.tools.bench.gpu.batches import SHARING, make_batch, shortened, tree_of, varied
from treefx.tools.bench.gpu.comparison import compare_steps
from treefx.tools.bench.gpu.kernels import Attention, correct
from treefx.tools.bench.gpu.launches import Form
from treefx.tools.bench.gpu.packed_rows import pack_rows
from treefx.tools.bench.gpu.scale import Scale
from treefx.tools.bench.gpu.steps import STEP, Run, attend_packed_rows, chosen, rehearsed, step

COUNTS = {"sanitize": 1, "correct": 3, "prologue": 4, "rates": 2, "attention": 2, "step": 1, "first": 1, "large": 1}
FIGURES = {
    "sanitize": {"same_bits"},
    "correct": {"rows_errors", "tree_errors"},
    "prologue": {"us_per_turn", "programs", "tile"},
    "rates": {"rates"},
    "attention": {"tree_forward_ms", "tree_backward_tflops"},
    "step": {"graphs", "compile_s"},
    "first": {"first_s", "later_s"},
    "large": {"parts", "row_by_row", "uncut"},
}

STEP_FIGURES = {"seconds", "fresh_seconds", "loop_seconds", "host_ms", "device_ms", "peak_mib", "loss", "kernels"}


def test_every_stage_is_tried() -> None:
    assert list(stages.STAGES) == list(COUNTS) == list(FIGURES)


@pytest.mark.parametrize("stage", COUNTS)
def test_rehearsal(stage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command writes its file and prints its records; every case is right, and has what the stage is there for.

    Triton's interpreter needs an interpreter of Python in which Triton is not imported yet.
    """
    if stage not in stages._INTERPRETED:
        monkeypatch.setattr(stages, "run", partial(stages.run, method="fork"))
    if stage == "large":  # tests/tools/bench/test_bench_large.py
        records = [{"limit_mib": 5.0, "peak_mib": 4.0}, {}, {}]
        monkeypatch.setattr(stages, "bench_large", SimpleNamespace(run=lambda **_: records))
    out, before = tmp_path / "records.json", dict(os.environ)
    command = ["bench", "gpu", "--stage", stage, "--rehearse", "--cases", str(COUNTS[stage]), "--out", str(out)]
    result = CliRunner().invoke(app, [*command, *(["--batches", "overlap 60 %"] if stage == "step" else [])])
    assert result.exit_code == 0, (result.output, out.read_text() if out.exists() else None)
    found = json.loads(out.read_text())
    assert (found["stage"], found["rehearsal"], found["device"]) == (stage, True, "cpu")
    measured = [record for record in found["records"] if "batch" in record]
    records = [record for record in found["records"] if record not in measured]
    assert len(records) == COUNTS[stage] and "mean nothing" in result.output
    assert [STEP_FIGURES <= record.keys() for record in measured] == ([True] if stage == "step" else [])
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
    assert all(stages.line(record).startswith(record["case"]) for record in records)
    assert_measured("gpu", stages.describe("correct", True, records))
    late = list(stages.run("correct", rehearsal=True, cases=2, minutes=-1.0, method="fork"))
    assert len(late) == 2 and all("the time is up" in record["wrong"][0] for record in late)


def test_a_wrong_attention_is_said_to_be_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    from treefx.kernels import tree_attention

    def wrong(q: Any, k: Any, v: Any, ends: Any, impl: str, deterministic: bool) -> Any:
        return tree_attention(q, k, v, torch.full_like(ends, len(ends)), impl="reference")

    monkeypatch.setattr("treefx.tools.bench.gpu.kernels.tree_attention", wrong)
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

    monkeypatch.setattr("treefx.tools.bench.gpu.kernels.tree_attention", gives_way)
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


def _measured(run: Run) -> list[dict[str, Any]]:
    """The records that a run in rehearsal reports, one per batch."""
    reported: list[dict[str, Any]] = []

    def report(record: str | dict[str, Any]) -> None:
        if isinstance(record, dict):
            reported.append(record)

    step(Scale(True, report=report), rehearsed(run))
    return reported


def _overlapping(way: str) -> list[dict[str, Any]]:
    return _measured(Run("0.6B", False, way, ("overlap 60 %",)))


EAGER = {"backend": "eager"}


def test_packed_rows_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows in one without positions, or that are cut elsewhere, are seen. Inductor compiles the latter."""
    ours, compile_model = _overlapping("treefx"), torch.compile
    for wrong in ("position_ids", "lengths"):

        def spoiled(batch: Any, wrong: str = wrong) -> dict[str, Any]:
            inputs = pack_rows(batch)
            return inputs | {"position_ids": torch.zeros_like(inputs["position_ids"])} if wrong in inputs else inputs

        with monkeypatch.context() as patch:
            if wrong == "lengths":
                patch.setattr(
                    steps,
                    "attend_packed_rows",
                    lambda model, rows, kernel: attend_packed_rows(model, [sum(rows)], kernel),
                )
            else:
                patch.setattr(torch, "compile", lambda model, **given: compile_model(model, **given | EAGER))
            patch.setattr(steps, "pack_rows", spoiled)
            (record,) = compare_steps(Scale(True), [*ours, *_overlapping("packed rows")])
        assert any("apart at most" in text for text in record["wrong"]), wrong


def _record(way: str, **changed: Any) -> dict[str, Any]:
    measured = {"raw_tokens": 20, "tokens": 10, "seconds": 1.0, "fresh_seconds": 1.0, "loss": 2.0}
    record = {"model": "Qwen3", "way": way, "batch": "overlap 60 %", "norms": {"large": 1.0, "small": 0.01}}
    return {**record, **measured, "wrong": [], **changed}


@pytest.mark.parametrize("spoiled", ["loss", "one gradient", "no gradient", "nan"])
def test_steps_that_differ_are_said_to_differ(spoiled: str) -> None:
    """A loss, or the gradient of one small parameter, that is off on one way alone; one that is not there."""
    records = [_record("treefx"), _record("packed rows"), _record("padded rows")]
    (right,) = compare_steps(Scale(True), records)
    assert right["wrong"] == [] and right["token_bound"] == 2.0 and right["of_bound"] == 0.5
    norms = {
        "loss": records[1]["norms"],
        "no gradient": {"large": 1.0},
        "nan": {"large": 1.0, "small": float("nan")},
        "one gradient": {"large": 1.0, "small": 0.0101},
    }
    records[1] |= {"norms": norms[spoiled], "loss": 2.001 if spoiled == "loss" else 2.0}
    (wrong,) = compare_steps(Scale(True), records)
    assert any("apart at most" in text for text in wrong["wrong"])


def test_a_pair_is_compared_as_soon_as_it_is_complete() -> None:
    """Each record is held against those before it, the fastest baseline counts, and fresh batches have a ratio."""
    assert list(compare_steps(Scale(True), [_record("treefx")])) == []
    assert list(compare_steps(Scale(True), [_record("padded rows"), _record("packed rows")])) == []
    slow = _record("padded rows", seconds=4.0, fresh_seconds=4.0)
    fast = _record("packed rows", seconds=1.5, fresh_seconds=1.6)
    (first,) = compare_steps(Scale(True), [_record("treefx"), slow])
    assert (first["times_padded_rows"], first["of_bound"]) == (4.0, 2.0)
    both = list(compare_steps(Scale(True), [_record("treefx"), slow, _record("treefx, regions", seconds=3.0), fast]))
    assert [record["of_bound"] for record in both] == [0.75, 0.25] and both[0]["fresh_times"] == 1.6
    assert list(compare_steps(Scale(True), [_record("treefx"), {**slow, "batch": "GRPO 2 x 8"}])) == []


def test_what_does_not_fit_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any) -> dict[str, Any]:
        raise torch.OutOfMemoryError("full")

    monkeypatch.setattr(steps, "_measure", full)
    (rows,) = _measured(Run("0.6B", False, "padded rows", ("overlap 60 %",)))
    assert (rows["wrong"], rows["problem"]) == ([], "does not fit the device")
    assert list(compare_steps(Scale(True), [_record("treefx"), {**rows, "model": "Qwen3"}])) == []
    (ours,) = _measured(Run("0.6B", False, "treefx", ("overlap 60 %",)))
    assert ours["wrong"] == ["treefx must fit the device, and does not: overlap 60 %"]


def test_rows_of_one_shape_are_compiled_once() -> None:
    rows = [run for run in STEP if run.way == "padded rows" and run.model == "0.6B" and not run.checkpointing]
    overlaps = next(run for run in rows if "overlap 60 %" in run.sharing)
    assert set(overlaps.sharing) == {name for name in SHARING if name.startswith("overlap")}
    assert chosen(overlaps, ["overlap 0 %", "GRPO 2 x 8"]) == replace(overlaps, sharing=("overlap 0 %",))
    assert chosen(overlaps, ["GRPO 2 x 8"]) is None


@pytest.mark.parametrize("name", SHARING)
def test_fresh_batches_have_other_tokens_and_rows_of_the_same_lengths(name: str) -> None:
    first, other = (make_batch(Scale(True), varied(SHARING[name], number), 5000, number) for number in (0, 3))
    assert first.attention_mask.sum(1).tolist() == other.attention_mask.sum(1).tolist()
    assert (first.input_ids != other.input_ids).float().mean() > 0.4
    assert Forest.from_padded(other.input_ids, other.attention_mask).overlap_ratio == pytest.approx(
        Forest.from_padded(first.input_ids, first.attention_mask).overlap_ratio, abs=0.03
    )


def test_cases_and_batches_are_chosen_by_name() -> None:
    assert stages.count("step", only="0.6B, treefx", batches=["overlap 60 %", "overlap 0 %"]) == 5
    for wrong in ({"only": "70B"}, {"batches": ["overlap 61 %"]}):
        with pytest.raises(InputError, match=r"--(only|batches) must be"):
            stages.count("step", **wrong)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="rates has none"):
        stages.count("rates", batches=["overlap 60 %"])


def _report_two(scale: Scale) -> None:
    for batch in ("a", "b"):
        scale.report({"model": "m", "way": "treefx", "batch": batch, "wrong": []})


def _endless(scale: Scale, case: Any) -> dict[str, Any]:
    _report_two(scale)
    time.sleep(120)
    return {"wrong": []}


def _outlives(command: int) -> Callable[[Scale, Any], dict[str, Any]]:
    """A case that ends as soon as the command is gone."""

    def measure(scale: Scale, case: Any) -> dict[str, Any]:
        _report_two(scale)
        while os.getppid() == command:
            time.sleep(0.05)
        return {"wrong": []}

    return measure


def test_a_killed_command_leaves_every_finished_record(tmp_path: Path) -> None:
    """One line per record, flushed: what was measured before the end is in the file. No process stays behind."""
    out = tmp_path / "records.jsonl"
    reads, writes = os.pipe()  # ends when no process holds the end that writes
    pid = os.fork()
    if not pid:
        measure = _outlives(os.getpid())
        stage = replace(stages.STAGES["step"], measure=measure, cases=stages.STAGES["step"].cases[:1])
        stages.STAGES["step"] = stage
        run = stages.run
        stages.run = lambda *args, **options: run(*args, **options, method="fork")  # type: ignore[assignment]
        app(["bench", "gpu", "--stage", "step", "--rehearse", "--out", str(out)])
    os.close(writes)
    until = time.monotonic() + 60
    while time.monotonic() < until and (not out.exists() or out.read_text().count("\n") < 3):
        time.sleep(0.05)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    about, *records = [json.loads(line) for line in out.read_text().splitlines()]
    assert about["stage"] == "step" and [record["batch"] for record in records] == ["a", "b"]
    assert select.select([reads], [], [], 20.0)[0] and not os.read(reads, 1), "its worker waits for ever"
    os.close(reads)


def test_a_deadline_ends_a_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(stages.STAGES, "step", replace(stages.STAGES["step"], measure=_endless))
    records = list(stages.run("step", rehearsal=True, cases=1, deadline=2.0, method="fork"))
    assert [record.get("batch") for record in records] == ["a", "b", None]
    assert "the deadline passed" in records[-1]["wrong"][0]
