"""The search itself: a fixed program of every family, its folder, its command, and programs that end badly."""

import faulthandler
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import treefx
from tests.tools.fuzz.test_grammar import PLAIN
from treefx.cli import app
from treefx.tools.fuzz import worker as workers
from treefx.tools.fuzz.describe import describe
from treefx.tools.fuzz.grammar import FAMILIES, generate
from treefx.tools.fuzz.journal import Finding, Journal
from treefx.tools.fuzz.program import Program
from treefx.tools.fuzz.report import failures_of, summary
from treefx.tools.fuzz.script import parts_of
from treefx.tools.fuzz.search import Search, Settings
from treefx.tools.fuzz.truth import (
    FAILURES,
    Outcome,
    autocast_explains,
    errors_of,
    judge,
    least_share,
    low_casts_explain,
    player,
)
from treefx.tools.fuzz.worker import Worker

ONE_LAYER = {"faults": 4, "hooks": 2, "planned": 2, "shapes": 2, "threads": 2}
"""Programs of one layer, of the families whose programs compile many graphs."""
NUMBERS = {family: ONE_LAYER.get(family, place % 2) for place, family in enumerate(FAMILIES)}
"""A fixed program of each family, of seed 0; ``treefx fuzz`` goes on from there."""


@pytest.mark.parametrize("family", FAMILIES)
def test_a_program_of_every_family_is_exact_or_refused(family: str) -> None:
    program = generate(0, NUMBERS[family], [family], "eager")
    found = judge(program)
    assert found.kind not in FAILURES, f"number {NUMBERS[family]}: {describe(program)}: {found.note}"


NAN = float("nan")


@torch.no_grad()
def mistaken(model: Any) -> Any:
    """A compiler that gets every weight a bit wrong."""
    for parameter in model.parameters():
        parameter.mul_(1 + 1e-8)
    return model


def test_casts_to_float32_explain_rounding_alone() -> None:
    """Gradients that cancel may round as far as eager's do; what the casts do not explain stays wrong."""
    drawn = (generate(0, number, ["losses"], "eager") for number in range(1000))
    program = next(p for p in drawn if any("single" in part.traits for part in parts_of(p)) and not p.modes)
    eager = player(program)(lambda model: model)
    assert low_casts_explain(program, eager, eager, lambda model: model)
    off = {name: value * (1 + 1e-4) if value.is_floating_point() else value for name, value in eager.items()}
    assert not low_casts_explain(program, eager, off, lambda model: model)

    assert not low_casts_explain(program, eager, eager, mistaken)


def test_autocast_explains_rounding_where_gradients_cancel_alone() -> None:
    """The biases of keys have no gradient but rounding; errors without autocast stay errors."""
    drawn = (generate(0, number, ["modes"], "eager") for number in range(1000))
    program = next(p for p in drawn if p.modes == ("autocast",) and len(p.calls) == 1)
    play = player(program)
    eager, exact = play(lambda model: model, torch.float32), play(lambda model: model)
    name = next(name for name in eager if name.endswith("k0.bias"))
    largest = max(float(value.abs().max()) for key, value in exact.items() if "gradient" in key)
    off = {**eager, name: eager[name] + 1e-4 * largest}
    assert errors_of(off, exact)[name] > 0.1
    assert autocast_explains(program, eager, off, lambda model: model)
    assert not autocast_explains(program, eager, {**eager, name: eager[name] + largest}, lambda model: model)

    assert not autocast_explains(program, eager, off, mistaken)


def test_rounding_of_single_precision_is_no_difference() -> None:
    """A gradient that is zero in float64 is rounding in float32, in another order another one."""
    drawn = (generate(0, number, ["modes"], "eager") for number in range(1000))
    program = next(p for p in drawn if p.modes == ("float32",) and len(p.calls) == 1)
    exact = player(program)(lambda model: model)
    name = next(name for name in exact if name.endswith("k0.bias"))
    largest = max(float(value.abs().max()) for key, value in exact.items() if "gradient" in key)
    share = least_share(program)

    def error(off: float) -> float:
        return errors_of({**exact, name: exact[name] + off * largest}, exact, share)[name]

    assert error(1e-8) < 1e-5 < error(1e-6)
    others = [drawn for drawn in (generate(0, number, ["modes"], "eager") for number in range(40)) if drawn.modes]
    assert {least_share(other) for other in others if "float32" not in other.modes} <= {1e-4, 1.0}


class Stub:
    """A worker that judges by what a program says, without a process."""

    runs: list[int] = []

    def __init__(self, limit_s: float) -> None:
        self.done: list[int] = []

    def run(self, program: Program) -> Outcome:
        Stub.runs.append(program.seed)
        self.done.append(program.seed)
        kind = "wrong" if program.seed == 2 and program.calls else "exact"
        return Outcome(kind, "0 loss: 1.0e+00" if kind == "wrong" else "", seconds=0.1)

    def restart(self) -> None:
        self.done = []

    def close(self) -> None:
        pass


@pytest.fixture
def stubbed(monkeypatch: pytest.MonkeyPatch) -> type[Stub]:
    monkeypatch.setattr("treefx.tools.fuzz.search.Worker", Stub)
    Stub.runs = []
    return Stub


def test_a_search_goes_on_where_it_ended(stubbed: type[Stub], tmp_path: Path) -> None:
    first = Search(Settings(programs=3, out=tmp_path, shrunk=0)).run()
    stubbed.runs.clear()
    told: list[Finding] = []
    second = Search(Settings(programs=5, out=tmp_path, shrunk=0)).run(told.append)
    assert stubbed.runs == [3, 4] == [finding.number for finding in told]
    assert second[:3] == first and len(second) == 5


def test_a_line_that_was_cut_short_is_run_again(stubbed: type[Stub], tmp_path: Path) -> None:
    Search(Settings(programs=2, out=tmp_path)).run()
    path = tmp_path / "programs.jsonl"
    path.write_text(path.read_text()[:-20])
    stubbed.runs.clear()
    assert len(Search(Settings(programs=2, out=tmp_path)).run()) == 2
    assert stubbed.runs == [1]


def test_a_folder_of_another_search_is_refused(tmp_path: Path) -> None:
    Journal(tmp_path, {"seed": 0})
    with pytest.raises(treefx.TreefxError, match="another folder"):
        Journal(tmp_path, {"seed": 1})


def test_what_fails_becomes_a_small_script(stubbed: type[Stub], tmp_path: Path) -> None:
    (failed,) = failures_of(Search(Settings(programs=4, out=tmp_path)).run())
    assert failed.number == 2 and failed.script is not None
    assert "def play(compile" in Path(failed.script).read_text()
    assert failed.program.startswith("attention (causal); output loss; inner eager") or "causal" not in failed.program


def test_minutes_end_a_search(stubbed: type[Stub]) -> None:
    assert len(Search(Settings(programs=10**6, minutes=0.02)).run()) < 10**6


def test_the_report_counts_by_family_and_class() -> None:
    findings = [
        Finding(0, "masks", "eager", "exact"),
        Finding(1, "masks", "eager", "wrong"),
        Finding(2, "rows", "eager", "rows"),
    ]
    report = summary(findings)
    assert report["classes"]["wrong"] == 1 and report["families"]["masks"]["exact"] == 1
    assert [item["number"] for item in report["failures"]] == [1]


def test_the_command_fails_where_a_program_does(stubbed: type[Stub], tmp_path: Path) -> None:
    options = ["fuzz", "--programs", "3", "--shrink", "0", "--out", str(tmp_path)]
    shown = CliRunner().invoke(app, options)
    assert shown.exit_code == 1
    assert "wrong: " in shown.output and "failures" in shown.output
    read: dict[str, Any] = json.loads(CliRunner().invoke(app, [*options, "--json"]).stdout)
    assert read["programs"] == 3 and read["classes"]["wrong"] == 1


def test_the_command_ends_well_where_nothing_fails(stubbed: type[Stub], tmp_path: Path) -> None:
    shown = CliRunner().invoke(app, ["fuzz", "--programs", "2", "--out", str(tmp_path)])
    assert shown.exit_code == 0 and "nothing failed" in shown.output


def _ends(connection: Any) -> None:
    connection.recv()
    faulthandler.disable()  # its dump would look like a crash of the tests
    os.kill(os.getpid(), signal.SIGSEGV)


def _hangs(connection: Any) -> None:
    connection.recv()
    time.sleep(60)


@pytest.mark.parametrize(("serve", "kind", "note"), [(_ends, "crashed", "SIGSEGV"), (_hangs, "hung", "not done after")])
def test_a_process_that_ends_or_hangs_is_replaced(
    serve: Any, kind: str, note: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "_context", lambda: workers.multiprocessing.get_context("fork"))
    monkeypatch.setattr(workers, "_serve", serve)
    one = Worker(limit_s=1.0)
    found = one.run(PLAIN)
    assert (found.kind, note in found.note) == (kind, True)
    assert one.run(PLAIN).kind == kind
    one.close()


@pytest.mark.parametrize(
    ("got", "error"),
    [
        ((1.0 + 1e-12, NAN, 2.0), 0.5e-12),
        ((1.0, NAN, 2.0), 0.0),
        ((1.0, 5.0, 2.0), 0.0),
        ((NAN, NAN, 2.0), float("inf")),
    ],
)
def test_what_eager_itself_cannot_tell_is_not_compared(got: tuple[float, ...], error: float) -> None:
    want = {"0 output 0": torch.tensor([1.0, NAN, 2.0], dtype=torch.float64)}
    found = errors_of({"0 output 0": torch.tensor(got, dtype=torch.float64)}, want)["0 output 0"]
    assert found == pytest.approx(error, rel=1e-3)
