"""``treefx bench shapes``: every way in a separate process, and no time for wrong results."""

import json
from dataclasses import replace
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.cli.validation import assert_measured
from tests.scale.forked import fork_ways
from treefx.cli import app
from treefx.tools.bench import shapes
from treefx.tools.bench.shapes import ShapesCase, ShapesError

EAGER = ShapesCase(
    name="eager", options=(("inner", "eager"), ("min_sharing", 1.0)), batches=3, rows=(2, 4), columns=(6, 12),
    vocab_size=61, hidden_size=64, layers=1,
)  # fmt: skip


def test_a_way_in_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    fork_ways(monkeypatch)
    record = shapes._start(EAGER)
    assert record["way"] == "eager" and record["compiles"] == 2
    assert len(record["numbers"]) == 2 * EAGER.batches
    assert 0 < record["steps_seconds"] < record["whole_seconds"] and record["bound"] > 1
    assert_measured("shapes", shapes._compared(record, record))


def started(case: ShapesCase, off: float = 0.0) -> dict[str, Any]:
    seconds = {"whole_seconds": 8.0, "steps_seconds": 4.0} if case.name == "inductor" else {
        "whole_seconds": 2.0, "steps_seconds": 2.0}  # fmt: skip
    return {"way": case.name, **seconds, "bound": 2.5, "numbers": [2.0, 3.0 + off * (case.name != "inductor")]}


def test_ways_are_compared_with_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shapes, "_start", started)
    result = CliRunner().invoke(app, ["bench", "shapes", "--series", "wide", "--json"])
    assert result.exit_code == 0, result.output
    inductor, treefx, _ = json.loads(result.stdout)
    assert (inductor["whole"], inductor["steps"]) == (1.0, 1.0)
    assert (treefx["whole"], treefx["steps"], treefx["of_bound"]) == (4.0, 2.0, 0.8)
    assert "numbers" not in treefx


@pytest.mark.parametrize("off", [1e-2, float("nan")])
def test_no_time_for_a_wrong_gradient(monkeypatch: pytest.MonkeyPatch, off: float) -> None:
    monkeypatch.setattr(shapes, "_start", lambda case: started(case, off))
    with pytest.raises(ShapesError, match="no time is reported"):
        shapes.run(json_output=True)


def test_a_process_that_fails_is_named() -> None:
    """In an interpreter, as the command starts it; the tests of other benches fork."""
    with pytest.raises(ShapesError, match="(?s)'broken' failed.*no-such-backend"):
        shapes._start(replace(EAGER, name="broken", backend="no-such-backend"))
