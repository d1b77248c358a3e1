"""The simulation against the paper: agreement, explained misses, and the command that shows it."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from treefx.cli import app
from treefx.errors import InputError
from treefx.tools.simulate.hardware.machine import Machine
from treefx.tools.simulate.models import SMALL, sublayers
from treefx.tools.simulate.published import Comparison, compare
from treefx.tools.simulate.study import SPLITS, run_study, software
from treefx.tools.simulate.sublayer import Outcome, simulate

MACHINE = Machine(group_bytes=2.0**20)  # four times coarser than the command, and four times faster


@pytest.fixture(scope="module")
def outcomes() -> list[Outcome]:
    return run_study(MACHINE)


@pytest.fixture(scope="module")
def figures(outcomes: list[Outcome]) -> dict[str, Comparison]:
    return {comparison.figure.name: comparison for comparison in compare(outcomes)}


@pytest.mark.parametrize(
    "name",
    [
        "T3, mean",
        "T3-MCA, mean",
        "T3-MCA against ideal overlap, mean",
        "ideal overlap of GEMM and reduce-scatter, mean",
        "ideal overlap of GEMM and reduce-scatter, most",
        "reduce-scatter with near-memory add, 8 GPUs",
        "reduce-scatter with near-memory add, 16 GPUs",
        "data moved, less, mean",
        "data moved, less, most",
        "large models, T3-MCA, mean",
        "reduce-scatter reads, less, mean",
        "GEMM and reduce-scatter stores, less, mean",
    ],
)
def test_the_figures_that_tell_simulations_apart_agree(figures: dict[str, Comparison], name: str) -> None:
    assert figures[name].agrees, figures[name]


def test_what_is_missed_says_why(figures: dict[str, Comparison]) -> None:
    silent = [name for name, comparison in figures.items() if not comparison.agrees and not comparison.figure.reason]
    assert silent == []


def test_op_reaches_the_bound_and_large_layers_stay_behind_it_without_arbitration(outcomes: list[Outcome]) -> None:
    """Section 6.1.2: T3 is close to ideal overlap on OP, and far from it on the FC layers that read much."""
    behind = {
        name: [o.speedup("ideal") / o.speedup("t3") - 1 for o in outcomes[:16] if o.sublayer.name == name]
        for name in ("OP", "FC-2")
    }
    assert max(behind["OP"]) < 0.05
    assert max(behind["FC-2"]) > 0.15 and min(behind["FC-2"]) > 0.05


def test_a_wrong_machine_misses(outcomes: list[Outcome]) -> None:
    """Half the link, or a cache that no output displaces anything in, disagrees where it must."""
    half = [simulate(sub, replace(MACHINE, link_bytes_per_second=75e9)) for sub in sublayers(SMALL)]
    missed = {c.figure.name for c in compare([*half, *outcomes[16:]]) if not c.agrees}
    assert "T3, mean" in missed
    huge = [simulate(sub, replace(MACHINE, cache_bytes=2.0**30)) for sub in sublayers(SMALL)]
    missed = {c.figure.name for c in compare([*huge, *outcomes[16:]]) if not c.agrees}
    assert {"GEMM reads, less, mean", "data moved, less, most"} <= missed


def test_chunks_in_software_gain_less_the_more_units_they_take(outcomes: list[Outcome]) -> None:
    """Section 3.2: units lent to the collective cost more than they hide."""
    gains = [[software(outcome, MACHINE, split)[1] for outcome in outcomes[:8]] for split in SPLITS]
    free, eight, sixteen = (sum(gain) / len(gain) for gain in gains)
    assert eight < sixteen < free
    assert all(1 <= software(outcome, MACHINE)[0] <= 16 for outcome in outcomes[:8])


def test_chunks_in_software_never_pass_what_is_ideal(outcomes: list[Outcome]) -> None:
    slow = replace(MACHINE, memory_bytes_per_second=20e9)
    short_of_memory = [simulate(sub, slow) for sub in sublayers(SMALL[1:])[:4]]
    for outcome, machine in [(o, MACHINE) for o in outcomes] + [(o, slow) for o in short_of_memory]:
        assert software(outcome, machine)[1] <= outcome.speedup("ideal") * (1 + 1e-9)


def _invoke(*arguments: str) -> Any:
    result = CliRunner().invoke(app, ["simulate", *arguments, "--json"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_the_command_writes_a_page_a_record_and_a_picture(tmp_path: Path) -> None:
    record = _invoke("t3", "--model", "T-NLG", "--out", str(tmp_path))
    assert len(record["sublayers"]) == 8 and record["figures"] == []
    assert json.loads((tmp_path / "t3.json").read_text()) == record
    assert "| T-NLG FC-2 | 8 |" in (tmp_path / "t3.md").read_text()
    assert (tmp_path / "t3.png").read_bytes().startswith(b"\x89PNG")


def test_the_command_for_chunks_says_the_best_number() -> None:
    record = _invoke("chunks", "--gemm-ms", "2", "--mib", "64", "--link-gbps", "50")
    assert record["best_chunks"] == 16
    assert record["seconds"]["1"] == pytest.approx(2e-3 + 64 * 2**20 / 50e9)


@pytest.mark.parametrize(("option", "value"), [("--model", "GPT-5"), ("--link-gbps", "0"), ("--memory-gbps", "-1")])
def test_the_command_refuses_what_cannot_be(option: str, value: str) -> None:
    with pytest.raises(InputError, match=f"expected {option}"):
        CliRunner().invoke(app, ["simulate", "t3", option, value], catch_exceptions=False)
