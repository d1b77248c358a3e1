"""``treefx bench trl``: every run can be made, one is trained for real, and there are no times for other losses."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from tests.cli.validation import assert_measured
from tests.scale.forked import fork_ways
from treefx.cli import app
from treefx.errors import InputError
from treefx.tools.bench.trainers.material import Material, make_material
from treefx.tools.bench.trl import build, run
from treefx.tools.bench.trl.cases import CASES, TrlCase
from treefx.tools.bench.trl.run import TrlError

pytest.importorskip("trl", reason="it trains with TRL: pip install -e '.[trainers]'")
pytest.importorskip("peft", reason="it trains with TRL: pip install -e '.[trainers]'")


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Material:
    return make_material(tmp_path_factory.mktemp("material"), rows=9, layers=1, hidden_size=64)


@pytest.mark.parametrize("name", CASES)
def test_every_run_is_a_trainer_with_its_settings(name: str, material: Material, tmp_path: Path) -> None:
    case, model = CASES[name], AutoModelForCausalLM.from_pretrained(material.model)
    chats = [json.loads(line)["messages"] for line in material.chats.read_text(encoding="utf-8").splitlines()]
    tokenizer: Any = AutoTokenizer
    made = build._trainer(case, model, tokenizer.from_pretrained(material.model), chats, str(tmp_path))
    assert all(getattr(made.args, setting) == value for setting, value in case.settings)
    assert made.args.torch_compile_backend == "treefx" and hasattr(made.model, "peft_config") == case.adapter
    rows = made.train_dataset
    assert len(rows) == 9 or (case.name == "sft, packing" and 0 < len(rows) < 9)


def test_a_run_in_processes_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    fork_ways(monkeypatch)
    name = "sft, padding free"
    (record,) = run.run([name], ways=("eager", "treefx"), rows=16, layers=1, hidden_size=64)
    assert (record["run"], record["steps"], record["fallbacks"]) == (name, 2, 0)
    assert_measured("trl", record)
    assert record["error"] < 1e-4 and record["compiles"] <= 2
    assert float(record["sharing"].split()[0]) > 1.5
    assert record["treefx_seconds"] > 0 and record["inductor_seconds"] == record["whole"] == ""


def started(case: TrlCase, off: float = 0.0) -> dict[str, Any]:
    """A process that trained two steps."""
    shared = {f"treefx/{name}": value for name, value in (("sharing", 2.5), ("sharing_possible", 3.0))}
    counted = {"treefx/compiles": 1.0, "treefx/fallback": 0.0}
    return {
        "way": f"{case.name} with {case.way}", "version": "trl 1",
        "numbers": [2.0, 3.0 + (off if case.way == "treefx" else 0.0)],
        "whole_seconds": {"eager": 5.0, "inductor": 8.0, "treefx": 4.0}[case.way],
        "log": [{**shared, **counted}] * 2 if case.way == "treefx" else [],
    }  # fmt: skip


def test_ways_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "_start", lambda case: started(case, 3e-5))
    arguments = ["--rows", "4", "--layers", "1", "--width", "64"]
    result = CliRunner().invoke(app, ["bench", "trl", "--only", "dpo", *arguments, "--json"])
    assert result.exit_code == 0, result.output
    (record,) = json.loads(result.stdout)
    assert record["write"] == 'torch_compile_backend="treefx"; keep_groups(trainer)'
    assert (record["run"], record["steps"], record["whole"], record["note"]) == ("dpo", 2, 0.5, "")
    assert record["sharing"] == "2.50 to 2.50" and record["error"] == pytest.approx(1e-5)
    result = CliRunner().invoke(app, ["bench", "trl", *arguments, "--no-inductor", "--json"])
    assert [entry["run"] for entry in json.loads(result.stdout)] == list(CASES)
    assert all(entry["whole"] == "" for entry in json.loads(result.stdout))


def test_a_trainer_that_fails_with_inductor_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(case: TrlCase) -> dict[str, Any]:
        if case.way == "inductor":
            raise TrlError("'dpo' failed in its own process:\nno such kernel")
        return started(case)

    monkeypatch.setattr(run, "_start", failing)
    (record,) = run.run(["dpo"], rows=4, layers=1, hidden_size=64)
    assert_measured("trl", record)
    assert (record["note"], record["inductor_seconds"], record["whole"]) == ("no such kernel", "", "")


@pytest.mark.parametrize("off", [1e-2, float("nan")])
def test_no_time_for_a_wrong_loss(off: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "_start", lambda case: started(case, off))
    with pytest.raises(TrlError, match="dpo with treefx and dpo with eager .* no time is reported"):
        run.run(["dpo"], rows=4, layers=1, hidden_size=64)


def test_a_run_without_sharing_in_its_log_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "_start", lambda case: {**started(case), "log": []})
    with pytest.raises(TrlError, match="expected to log what treefx shared"):
        run.run(["dpo"], rows=4, layers=1, hidden_size=64)


def test_a_process_that_fails_and_a_name_that_is_unknown_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    fork_ways(monkeypatch)
    with pytest.raises(TrlError, match="(?s)'dpo' failed in its own process"):
        run._start(replace(CASES["dpo"], folder="/nowhere"))
    with pytest.raises(InputError, match="expected runs of sft; .* got ppo"):
        run.choose(["dpo", "ppo"])
