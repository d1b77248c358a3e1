"""``treefx bench first-step``: two processes for every way, and no time for wrong results."""

import json
from dataclasses import replace
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.cli.validation import assert_measured
from tests.scale.forked import fork_ways
from treefx.cli import app
from treefx.tools.bench import first_step
from treefx.tools.bench.first_step import FirstStepCase, FirstStepError

SMALL = FirstStepCase(name="eager", backend="eager", hidden_size=64, layers=1, vocab_size=61)


def test_a_way_in_two_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    fork_ways(monkeypatch)
    record = first_step._start(SMALL)
    assert record["way"] == "eager" and record["passes"] == {}
    assert len(record["numbers"]) % 2 == 0
    assert all(record[name] > 0 for name in ("wall", "python", "step", "second_wall", "second_python"))
    assert_measured("first-step", first_step._compared({**record, "passes": {"trace": 0.5}}, record))


def started(case: FirstStepCase, off: float = 0.0) -> dict[str, Any]:
    own = case.name == "inductor"
    seconds = {"wall": 8.0, "python": 4.0, "compilers": 4.0} if own else {"wall": 4.0, "python": 1.0, "compilers": 3.0}
    later = {f"second_{name}": value / 8 for name, value in seconds.items()}
    passes = {} if own else {"trace": 0.5}
    numbers = [2.0, 3.0 + off * (not own)]
    return {"way": case.name, **seconds, **later, "step": 0.1, "passes": passes, "numbers": numbers}


def test_ways_are_compared_with_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_step, "_start", started)
    result = CliRunner().invoke(app, ["bench", "first-step", "--layers", "4", "--json"])
    assert result.exit_code == 0, result.output
    inductor, flat, treefx = json.loads(result.stdout)
    assert (treefx["wall_of_first_way"], treefx["python_of_first_way"]) == (0.5, 0.25)
    assert treefx["second_of_wall"] == treefx["second_of_python"] == 0.125
    assert (inductor["trace"], flat["trace"]) == (0.0, 0.5)
    assert "numbers" not in treefx and "passes" not in treefx


@pytest.mark.parametrize("off", [1e-2, float("nan")])
def test_no_time_for_a_wrong_gradient(monkeypatch: pytest.MonkeyPatch, off: float) -> None:
    monkeypatch.setattr(first_step, "_start", lambda case: started(case, off))
    with pytest.raises(FirstStepError, match="no time is reported"):
        first_step.run(json_output=True)


def test_a_process_that_fails_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    fork_ways(monkeypatch)
    with pytest.raises(FirstStepError, match="(?s)'broken' failed.*no-such-backend"):
        first_step._start(replace(SMALL, name="broken", backend="no-such-backend"))
