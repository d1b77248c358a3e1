"""``treefx bench trainer``: every way in a separate process, and no time for wrong results."""

import json
from dataclasses import replace
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.cli.validation import assert_measured
from tests.scale.forked import fork_ways
from treefx.cli import app
from treefx.tools.bench import trainer
from treefx.tools.bench.trainer import TrainerCase, TrainerError

EAGER = TrainerCase(
    name="eager", options=(("inner", "eager"),), model="llama", layers=1, hidden_size=64, rows=24,
)  # fmt: skip


def test_a_way_in_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    fork_ways(monkeypatch)
    pytest.importorskip("trl", reason="it trains with TRL: pip install -e '.[trainers]'")
    record = trainer._start(EAGER)
    assert (record["way"], record["compiles"], record["fallbacks"]) == ("eager", 1, 0)
    assert len(record["numbers"]) == 2 * 3
    assert record["sharing"] == pytest.approx(1 / record["bound"], rel=0.2) and record["sharing"] > 3
    steps = ("first_seconds", "second_seconds", "later_seconds")
    assert 0 < sum(record[name] for name in steps) < record["whole_seconds"]
    assert_measured("trainer", trainer._compared(record, record))


def started(case: TrainerCase, off: float = 0.0) -> dict[str, Any]:
    whole, processor, later = (8.0, 6.0, 4.0) if case.name == "inductor" else (4.0, 4.5, 1.0)
    seconds = {"whole_seconds": whole, "processor_seconds": processor, "later_seconds": later}
    return {"way": case.name, **seconds, "numbers": [2.0, 3.0 + off * (case.name != "inductor")]}


def test_ways_are_compared_with_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer, "_start", started)
    result = CliRunner().invoke(app, ["bench", "trainer", "--rows", "16", "--json"])
    assert result.exit_code == 0, result.output
    inductor, treefx = json.loads(result.stdout)
    assert (inductor["whole"], inductor["processor"], inductor["later"]) == (1.0, 1.0, 1.0)
    assert (treefx["whole"], treefx["processor"], treefx["later"]) == (0.5, 0.75, 0.25)
    assert "numbers" not in treefx


@pytest.mark.parametrize("off", [1e-2, float("nan")])
def test_no_time_for_a_wrong_loss(monkeypatch: pytest.MonkeyPatch, off: float) -> None:
    monkeypatch.setattr(trainer, "_start", lambda case: started(case, off))
    with pytest.raises(TrainerError, match="no time is reported"):
        trainer.run(json_output=True)


def test_a_process_that_fails_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    fork_ways(monkeypatch)
    with pytest.raises(TrainerError, match="(?s)'broken' failed.*1 to 241"):
        trainer._start(replace(EAGER, name="broken", rows=1000))
