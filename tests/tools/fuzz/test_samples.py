"""PyTorch's own samples: the command over a fixed part of them, what counts as a difference, a planted mistake."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from tests.backend.general.test_changed_inputs import leaves_alone
from tests.tools.fuzz.test_fuzz import Stub
from treefx.cli import app
from treefx.runtime.ways import free_sizes
from treefx.tools.fuzz.samples.catalogue import draw_samples
from treefx.tools.fuzz.samples.inputs import Inputs
from treefx.tools.fuzz.samples.sample import INPUTS, Sample, sample_script
from treefx.tools.fuzz.samples.verdict import _differs_alike, differences, judge_sample

PROGRAMS = 24
"""The first ones, the same every time."""
INNER = ("eager", "aot_eager")
EXP = Sample(0, "exp", "in place", "float64", "made", True, "aot_eager")


def test_fixed_samples_give_what_eager_gives(tmp_path: Path) -> None:
    """In other processes: PyTorch's tables change the process that imports them.

    Of each kind of inputs and each form, by both inner compilers, in four types.
    """
    drawn = draw_samples(0)[:PROGRAMS]
    assert {sample.inputs for sample in drawn} == set(INPUTS) and {sample.inner for sample in drawn} == set(INNER)
    assert len({sample.form for sample in drawn}) == 5 and len({sample.dtype for sample in drawn}) == 4
    options = ["--family", "torch", "--programs", str(PROGRAMS), "--seed", "0", "--out", str(tmp_path), "--json"]
    command = [sys.executable, "-P", "-m", "treefx", "fuzz", *options]
    run = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    report = json.loads(run.stdout)
    assert report["failures"] == [] and run.returncode == 0
    assert report["programs"] == PROGRAMS
    assert report["classes"]["rows"] > 0.9 * PROGRAMS


def test_a_gradient_that_is_lost_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    assert judge_sample(EXP).kind == "rows"
    monkeypatch.setattr(free_sizes, "strided_fake", leaves_alone)
    found = judge_sample(EXP)
    assert found.kind == "wrong" and "gradient" in found.note


def test_every_operator_and_module_comes_in_two_modes() -> None:
    drawn = draw_samples(3)
    modes: dict[Any, set[bool]] = {}
    for sample in drawn:
        modes.setdefault(replace(sample, seed=0, dynamic=False, inner=""), set()).add(sample.dynamic)
    assert all(found == {False, True} for found in modes.values())
    names = {sample.name for sample in drawn}
    assert len(names) > 700 and sum(name.startswith("module ") for name in names) > 100
    assert {sample.inputs for sample in drawn} == set(INPUTS)
    assert drawn == draw_samples(3) != draw_samples(4)


@pytest.mark.parametrize("kind", INPUTS)
def test_inputs_are_of_their_kind(kind: str) -> None:
    x = torch.arange(6.0).view(2, 3).requires_grad_()
    with torch.inference_mode(kind == "inference"):
        inputs = Inputs((x, [x, 2]), kind)
    (found, [same, number]) = inputs.given
    assert found is same and number == 2 and torch.equal(found, x)
    learned = kind != "inference"
    assert found.requires_grad == learned and found.is_leaf == (kind in ("leaf", "no_grad", "inference"))
    assert len(inputs.leaves) == learned and found.is_contiguous() == (kind != "view")


@pytest.mark.parametrize(
    ("want", "got"),
    [
        (torch.ones(2), torch.ones(2, dtype=torch.float64)),
        (torch.ones(2), torch.ones(2, 1)),
        (torch.ones(2).to(torch.float8_e4m3fn), torch.zeros(2).to(torch.float8_e4m3fn)),
        (torch.ones(2, dtype=torch.complex32), torch.zeros(2, dtype=torch.complex32)),
        (torch.ones(2), None),
        (torch.ones(2, dtype=torch.float64), torch.ones(2, dtype=torch.float64) + 1e-8),
        (torch.tensor([1.0, float("nan")]), torch.tensor([1.0, 0.0])),
        (torch.tensor([1.0, float("inf")]), torch.tensor([1.0, -float("inf")])),
        (torch.tensor([1, 2]), torch.tensor([1, 3])),
        ([(True, True)], [(False, True)]),
        (2, 2.0),
    ],
)
def test_differences_are_seen(want: Any, got: Any) -> None:
    assert differences({"x": want}, {"x": want}) == {}
    assert list(differences({"x": want}, {"x": got})) == ["x"]
    assert list(differences({"x": want}, {})) == ["x"]


def test_a_script_runs_the_program_again() -> None:
    space: dict[str, Any] = {}
    text = sample_script(EXP, "wrong").replace("print(judge_sample(", "found = (judge_sample, (")
    exec(text, space)  # noqa: S102
    assert space["found"] == (judge_sample, EXP)


def test_the_command_counts_and_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Fails(Stub):
        def run(self, program: Any) -> Any:
            assert isinstance(program, Sample)
            return replace(super().run(EXP), kind="wrong" if program.seed == 1 else "rows")

    monkeypatch.setattr("treefx.tools.fuzz.search.Worker", Fails)
    monkeypatch.setattr("treefx.tools.fuzz.sample_search.draw_samples", lambda seed, inner: [EXP, replace(EXP, seed=1)])
    shown = CliRunner().invoke(app, ["fuzz", "--family", "torch", "--out", str(tmp_path)])
    assert shown.exit_code == 1 and "2 programs" in shown.output and "exp (in place" in shown.output


def test_the_family_runs_by_itself() -> None:
    shown = CliRunner().invoke(app, ["fuzz", "--family", "torch", "--family", "masks"])
    assert shown.exit_code != 0


def test_a_difference_is_excused_only_where_aot_eager_has_it() -> None:
    want, off, error = {"x": torch.zeros(2)}, {"x": torch.ones(2)}, {"error": RuntimeError("no")}
    assert _differs_alike(want, off, off) and _differs_alike(want, error, error)
    assert not any(_differs_alike(want, *pair) for pair in ((off, want), (error, want), (off, error), (error, off)))
