"""Inspecting a graph for all sizes adds no guard."""

from pathlib import Path

import torch

import treefx
from tests.inspection.test_inspector import batch_of, step, tiny


def test_looking_at_a_graph_for_all_sizes_leaves_it_one_for_all(tmp_path: Path) -> None:
    """Reading the number of a symbol specialises it for good."""
    model = tiny(layers=1).double()
    compiled = torch.compile(model, backend="treefx", options={"inner": "eager"}, dynamic=True)
    for length in (14, 19, 11):
        step(compiled, batch_of(6, length))
        found = treefx.inspect(compiled)
        assert found.summary() and found.to_html(tmp_path / "page.html").exists()
        assert all(found.readable(stage) for stage in found.graphs)
        assert found.stats["compiles"] == 1
