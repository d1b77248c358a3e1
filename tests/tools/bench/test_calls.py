"""A steady step walks through no more of treefx's Python than it did; the count is the same on every machine."""

import pytest
import torch

from tests.cli.validation import assert_measured
from treefx.tools.bench import calls
from treefx.tools.bench.calls import ENTRIES, Walk, walked

MOST = {
    "rows": (305, 20),
    "forest": (212, 28),
    "converted": (258, 28),
    "converted, head packed": (454, 33),
    "a plan of 7 parts": (3157, 46),
}
"""Calls and files of the forward of one block; of a plan, of the whole step."""


@pytest.mark.parametrize("entry", ENTRIES)
def test_a_steady_step_walks_no_further(entry: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "ENTRIES", {entry: ENTRIES[entry]})
    (record,) = calls.run(layers=1)
    assert_measured("calls", record)
    most_calls, most_files = MOST[entry]
    assert record["calls"] <= most_calls and record["files"] <= most_files, record
    assert record["labels"] == 0 and record["passes"] <= (2 if "plan" in entry else 0), "facts are precomputed"
    assert record["backward_calls"] is None or record["backward_calls"] < 150, record


def test_what_is_counted() -> None:
    from treefx.forests.forest import Forest

    with walked() as walk:
        torch.zeros(2).sum()
    assert walk == Walk()
    with walked() as walk:
        Forest.from_sequences([[1, 2], [1, 3]])
    assert walk.calls == sum(walk.modules.values()) > 5
    assert 0 < walk.within("treefx.forests.forest") < walk.within("treefx.forests") <= walk.calls
    assert 1 < len(walk.modules) <= walk.switches + 1 <= walk.calls + 1
