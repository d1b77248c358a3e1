"""The attention benchmark: its trees, its records, and its refusal to time wrong numbers."""

from typing import Any

import pytest
import torch
from torch import Tensor

from treefx.cli import bench_attention, bench_attention_cuda
from treefx.cli.bench_attention import CASES, Tree, run
from treefx.cli.bench_attention_cuda import Setting
from treefx.cli.bench_step import WrongResultError
from treefx.errors import InputError, UnsupportedError

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


@pytest.fixture
def untuned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TREEFX_TUNE", "0")


SETTING = Setting(Tree("small", ((-1, 50), (0, 30), (0, 20), (2, 44))), head_dim=16, heads=4, kv_heads=2)


def measure(**options: Any) -> dict[str, Any]:
    (record,) = bench_attention_cuda.run([SETTING], device="cpu", timer=lambda call: 2.0, with_flex=False, **options)
    return record


@pytest.mark.usefixtures("untuned")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_record_of_a_device(dtype: torch.dtype) -> None:
    record = measure(dtype=dtype)
    assert record["wrong"] == [] and record["warnings"] == []
    assert (record["tokens"], record["raw_tokens"]) == (144, 194)
    assert record["visible_pairs"] == 50 * 51 // 2 + 50 * 94 + 30 * 31 // 2 + 64 * 65 // 2
    assert record["rows_over_tree_forward"] == record["rows_over_tree_backward"] == 1.0
    assert record["tree_backward_tflops"] == pytest.approx(2.5 * record["tree_forward_tflops"], abs=0.1)
    bound = {torch.bfloat16: 0.01, torch.float32: 1e-6}[dtype]
    assert all(0 < error < bound for part in ("tree", "rows") for error in record[f"{part}_errors"].values())


@pytest.mark.usefixtures("untuned")
@pytest.mark.parametrize("damage", ["mask", "gradient"])
def test_a_wrong_attention_gets_no_time_on_a_device(damage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = bench_attention_cuda.tree_attention

    def wrong(q: Tensor, k: Tensor, v: Tensor, ends: Tensor, impl: str) -> Tensor:
        if damage == "mask":
            return right(q, k, v, torch.full_like(ends, len(ends)), impl=impl)
        return right(q, k * 0.9 + k.detach() * 0.1, v, ends, impl=impl)

    monkeypatch.setattr(bench_attention_cuda, "tree_attention", wrong)
    record = measure()
    assert record["wrong"] and not [key for key in record if key.endswith(("_ms", "_tflops")) and record[key]]
    assert not [key for key in record if "_over_" in key]
    assert any("dk of tree must be off by at most 1.5 x" in text for text in record["wrong"])


@pytest.mark.usefixtures("untuned")
def test_a_failure_and_the_clock_leave_the_other_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: Any, **options: Any) -> Tensor:
        raise RuntimeError("no room")

    monkeypatch.setattr(bench_attention_cuda, "tree_attention", broken)
    assert measure()["wrong"] == ["RuntimeError: no room"]
    late = measure(minutes=-1.0)
    assert "minutes are up" in late["wrong"][0]
    assert bench_attention_cuda.make_summary([late]).row_count == 1


def test_other_devices_are_refused() -> None:
    with pytest.raises(InputError, match="auto, cpu or cuda, got 'tpu'"):
        bench_attention.choose_device("tpu")
    if not torch.cuda.is_available():
        with pytest.raises(UnsupportedError, match="CUDA device, and there is none"):
            next(bench_attention_cuda.run())


def test_settings_cover_trees_heads_and_lengths() -> None:
    settings = bench_attention_cuda.SETTINGS
    assert {setting.head_dim for setting in settings} == {64, 128, 256}
    assert {setting.heads // setting.kv_heads for setting in settings} >= {1, 4, 7, 8}
    tokens = [sum(length for _, length in setting.tree.nodes) for setting in settings]
    assert min(tokens) < 4200 and max(tokens) > 128_000
    assert {setting.tree.name.split()[0].strip(",") for setting in settings} == {
        "prefix",
        "GRPO",
        "DPO",
        "agent",
        "tree",
    }
