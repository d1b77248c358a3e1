"""The runner of passes: order, timings, the check of every graph, and what it writes down."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx

from treefx.passes.runner import Pass, run_passes


def graph() -> fx.GraphModule:
    return fx.symbolic_trace(lambda x: torch.sin(x) + 1)


def replace_sine(gm: fx.GraphModule, work: Any) -> fx.GraphModule:
    for node in gm.graph.find_nodes(op="call_function", target=torch.sin):
        node.target = torch.cos
    gm.recompile()
    return gm


def break_order(gm: fx.GraphModule, work: Any) -> fx.GraphModule:
    """Leaves a node that reads one that comes later."""
    sine, total = (node for node in gm.graph.nodes if node.op == "call_function")
    total.append(sine)
    return gm


def note(gm: fx.GraphModule, work: list[str]) -> fx.GraphModule:
    work.append(gm.code)
    return gm


def test_passes_run_in_order_on_one_graph(caplog: pytest.LogCaptureFixture) -> None:
    work: list[str] = []
    seconds = {"note": 1.0}
    passes = [Pass("note", note, "any"), Pass("replace_sine", replace_sine, "any"), Pass("note", note, "any")]
    with caplog.at_level(logging.DEBUG, "treefx.passes.runner"):
        result = run_passes(passes, graph(), work, seconds)
    assert ["torch.sin" in code for code in work] == [True, False]
    torch.testing.assert_close(result(torch.zeros(2)), torch.full((2,), 2.0))
    assert list(seconds) == ["note", "replace_sine"] and seconds["note"] > 1.0, "times add up by name"
    changes = [record.getMessage() for record in caplog.records if record.name == "treefx.passes.runner"]
    assert "cos" in changes[1] and "0 -> 1" in changes[1] and "the same operators" in changes[0]


def test_a_malformed_graph_is_put_down_to_its_pass() -> None:
    passes = [Pass("replace_sine", replace_sine, "any"), Pass("break_order", break_order, "any")]
    with pytest.raises(RuntimeError, match="'break_order' left a graph that is not well-formed"):
        run_passes(passes, graph(), None, {})


def test_dumps_hold_both_graphs_and_their_difference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_passes([Pass("replace_sine", replace_sine, "any")], graph(), None, {})
    monkeypatch.setenv("TREEFX_DUMP_DIR", str(tmp_path))
    run_passes([Pass("replace_sine", replace_sine, "any")], graph(), None, {})
    before, after, diff = (
        next((tmp_path / "passes").glob(f"*replace_sine{ending}")).read_text()
        for ending in (".before.py", ".after.py", ".diff")
    )
    assert "torch.sin" in before and "torch.cos" in after
    changed = [line for line in diff.splitlines() if line[0] in "+-"]
    assert any(line[0] == "-" and "torch.sin" in line for line in changed)
    assert any(line[0] == "+" and "torch.cos" in line for line in changed)
    assert len(list((tmp_path / "passes").iterdir())) == 3, "nothing was written before dumps were asked for"
