"""The attention benchmark: its trees, its records, and its refusal to time wrong numbers."""

import pytest
import torch
from torch import Tensor

from treefx.cli import bench_attention
from treefx.cli.bench_attention import CASES, Tree, run
from treefx.cli.bench_step import WrongResultError

SMALL = Tree("small", ((-1, 5), (0, 3), (0, 2), (2, 4)))


def test_tree_as_ends_and_rows() -> None:
    assert SMALL.subtree_end().tolist() == [14] * 5 + [8] * 3 + [14] * 6
    assert [row.tolist() for row in SMALL.rows()] == [[*range(8)], [*range(5), *range(8, 14)]]


def test_cases_are_forests_in_packed_order() -> None:
    for case in CASES:
        ends = case.subtree_end()
        # In depth-first pre-order a subtree never reaches past that of an enclosing token.
        assert all(node > parent for node, (parent, _) in enumerate(case.nodes))
        open_ends: list[int] = []
        for token, end in enumerate(ends.tolist()):
            while open_ends and open_ends[-1] <= token:
                open_ends.pop()
            assert not open_ends or end <= open_ends[-1], case.name
            open_ends.append(end)


def test_records_hold_times_and_quotients() -> None:
    (record,) = run(heads=2, head_dim=8, repeats=1, cases=[SMALL])
    assert (record["case"], record["tokens"], record["raw_tokens"]) == ("small", 14, 19)
    methods = ("tree", "dense", "rows")
    times = [record[f"{name}_{way}_ms"] for name in methods for way in ("forward", "backward")]
    assert all(isinstance(time, float) and time >= 0 for time in times)
    assert {"dense_over_tree", "rows_over_tree"} <= record.keys()


def test_wrong_numbers_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    right = bench_attention.tree_attention

    def causal(q: Tensor, k: Tensor, v: Tensor, ends: Tensor, impl: str = "auto") -> Tensor:
        return right(q, k, v, ends if impl == "reference" else torch.full_like(ends, len(ends)), impl=impl)

    monkeypatch.setattr(bench_attention, "tree_attention", causal)
    with pytest.raises(WrongResultError, match="small: output .* no time is reported"):
        run(heads=2, head_dim=8, repeats=1, cases=[SMALL])
