"""The attention benchmark: its trees, its records, and its refusal to time wrong numbers."""

import importlib.util
import os
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.cli.validation import assert_measured
from treefx.errors import InputError, UnsupportedError
from treefx.kernels import tree_attention
from treefx.kernels.common import Inputs
from treefx.kernels.gpu import flex
from treefx.tools.bench.attention import apart as bench_attention_apart
from treefx.tools.bench.attention import cpu as bench_attention
from treefx.tools.bench.attention import cuda as bench_attention_cuda
from treefx.tools.bench.attention.apart import Task
from treefx.tools.bench.attention.cpu import CASES, Case, make_summary, run
from treefx.tools.bench.attention.rivals import Scores, dense, rows_alone
from treefx.tools.bench.attention.settings import FLASH, SETTINGS, Setting
from treefx.tools.bench.attention.trees import Tree
from treefx.tools.bench.job.processes import Note
from treefx.tools.bench.step import WrongResultError

SMALL = Tree("small", ((-1, 5), (0, 3), (0, 2), (2, 4)))


def test_tree_as_ends_and_rows() -> None:
    assert SMALL.subtree_end().tolist() == [14] * 5 + [8] * 3 + [14] * 6
    assert [row.tolist() for row in SMALL.rows()] == [[*range(8)], [*range(5), *range(8, 14)]]


def test_cases_are_forests_in_packed_order() -> None:
    for case in {case.tree for case in CASES}:
        ends = case.subtree_end()
        # In depth-first pre-order a subtree never reaches past that of an enclosing token.
        assert all(node > parent for node, (parent, _) in enumerate(case.nodes))
        open_ends: list[int] = []
        for token, end in enumerate(ends.tolist()):
            while open_ends and open_ends[-1] <= token:
                open_ends.pop()
            assert not open_ends or end <= open_ends[-1], case.name
            open_ends.append(end)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_records_hold_times_and_quotients(dtype: torch.dtype) -> None:
    before = (("tree", (2.0, 4.0)), ("dense", (3.0, 6.0)))
    (record,) = run(heads=2, head_dim=8, repeats=1, cases=[Case(SMALL, dtype, before=before)])
    assert_measured("attention", record)
    assert (record["case"], record["tokens"], record["raw_tokens"]) == ("small", 14, 19)
    methods = ("tree", "floor", "dense", "rows")
    times = [record[f"{name}_{way}_ms"] for name in methods for way in ("forward", "backward")]
    assert all(isinstance(time, float) and time >= 0 for time in times)
    assert {"dense_over_tree", "rows_over_tree", "tree_over_floor"} <= record.keys()
    assert record["before_dense_over_tree"] == 1.5 and "before_rows_over_tree" not in record
    table = make_summary([record])
    assert table.row_count == 1 and any("(2 / 4)" in str(cell) for column in table.columns for cell in column.cells)


SCORES = [case.scores for case in CASES if case.scores != Scores()]


@pytest.mark.parametrize("scores", SCORES, ids=[scores.name for scores in SCORES])
def test_rivals_compute_the_same(scores: Scores) -> None:
    """Rivals compute the same attention, under one mask and on every row."""
    torch.manual_seed(0)
    ends = SMALL.subtree_end()
    scores = replace(scores, window=scores.window and 3, softcap=scores.softcap and 1.0)
    given = scores.arguments(2)
    q, k, v = torch.randn(3, 1, 2, len(ends), 8)
    right = tree_attention(q, k, v, ends, impl="reference", **given)
    torch.testing.assert_close(dense(ends, scores, given, q.dtype)(q, k, v), right)
    assert (tree_attention(q, k, v, ends, impl="reference") - right).abs().max() > 1e-3, "the score does something"
    rows = SMALL.rows()
    for row, attend in zip(rows, rows_alone(rows, scores, given, q.dtype), strict=True):
        torch.testing.assert_close(attend(q[:, :, row], k[:, :, row], v[:, :, row]), right[:, :, row])


def test_scores_are_timed_against_their_rivals() -> None:
    (record,) = run(heads=2, head_dim=8, repeats=1, cases=[Case(SMALL, scores=SCORES[2])])
    assert record["score"] == "ALiBi, learned" and "tree_over_floor" not in record
    assert make_summary([record]).row_count == 1


def test_wrong_numbers_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    right = bench_attention.tree_attention

    def causal(q: Tensor, k: Tensor, v: Tensor, ends: Tensor, impl: str = "auto", **_: Any) -> Tensor:
        return right(q, k, v, ends if impl == "reference" else torch.full_like(ends, len(ends)), impl=impl)

    monkeypatch.setattr(bench_attention, "tree_attention", causal)
    for dtype, text in ((torch.float32, "output"), (torch.bfloat16, "out of tree must be off by at most 1.5 x")):
        with pytest.raises(WrongResultError, match=f"small: {text} .* no time is reported"):
            next(run(heads=2, head_dim=8, repeats=1, cases=[Case(SMALL, dtype)]))


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
    assert_measured("attention", record)
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


def scripted(task: Task, note: Note) -> tuple[dict[str, Any], bool]:
    """Stands for a device: the second setting crashes it, or spoils it, unless its kernels are plain."""
    if task.setting.head_dim == 32 and task.path is None:
        if task.setting.heads == 4:
            os._exit(1)
        return {"wrong": ["an illegal access"], "lost": True}, False
    return {"wrong": [], "tree_forward_ms": 1.0, "process": os.getpid()}, True


@pytest.mark.parametrize("heads", [4, 2], ids=["crash", "spoiled"])
def test_a_lost_device_costs_one_measurement(heads: int) -> None:
    """It is measured again in the plain form, and so are all that follow, in a fresh process."""
    settings = [replace(SETTING, head_dim=width, heads=heads) for width in (16, 32, 64)]
    records = list(bench_attention_apart.run(settings, device="cpu", work=scripted, method="fork"))
    names = [setting.name for setting in settings]
    assert [record["case"] for record in records] == [names[0], names[1], names[1], names[2]]
    assert [record.get("path") for record in records] == [None, None, "plain", "plain"]
    assert [bool(record["wrong"]) for record in records] == [False, True, False, False]
    assert records[0]["process"] != records[2]["process"] == records[3]["process"] != os.getpid()
    late = list(bench_attention_apart.run(settings, device="cpu", work=scripted, method="fork", minutes=-1.0))
    assert [record["case"] for record in late] == names and all("minutes are up" in r["wrong"][0] for r in late)


@pytest.mark.usefixtures("untuned")
def test_one_setting_as_a_process_measures_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_attention_cuda, "device_ms", lambda call: 2.0)
    steps: list[str] = []
    record, good = bench_attention_apart._work(Task(replace(SETTING, variants=()), "cpu", None), steps.append)
    assert good and record["wrong"] == [] and record["compiled"] == record["compiled_for_another_length"] == 0
    assert steps == [
        "the start of the device",
        "the first call of tree attention",
        "the check of tree attention",
        "the times of tree attention",
        "the rows",
    ]


def test_other_devices_are_refused() -> None:
    with pytest.raises(InputError, match="auto, cpu or cuda, got 'tpu'"):
        bench_attention.choose_device("tpu")
    if not torch.cuda.is_available():
        with pytest.raises(UnsupportedError, match="CUDA device, and there is none"):
            next(bench_attention_cuda.run())
        with pytest.raises(UnsupportedError, match="CUDA device, and there is none"):
            next(bench_attention_apart.run())


def test_settings_cover_trees_heads_and_lengths() -> None:
    settings = SETTINGS
    assert {setting.head_dim for setting in settings} == {64, 128, 256}
    assert {setting.heads // setting.kv_heads for setting in settings} >= {1, 4, 5, 7, 8}
    tokens = [sum(length for _, length in setting.tree.nodes) for setting in settings]
    assert min(tokens) < 4200 and max(tokens) > 128_000
    assert {setting.tree.name.split()[0].strip(",") for setting in settings} == {
        "prefix",
        "DualKV",
        "GRPO",
        "DPO",
        "groups",
        "agent",
        "tree",
    }


def test_shapes_of_dualkv() -> None:
    """28 responses of 2,048 tokens behind one prompt, 32:8 heads of 128: among the first ten that are timed."""
    found = [setting for setting in SETTINGS[:11] if setting.tree.name.startswith("DualKV")]
    assert [len(setting.tree.rows()[0]) - 2048 for setting in found] == [4096, 16384, 32768]
    for setting, prompt in zip(found, (4096, 16384, 32768), strict=True):
        assert (setting.head_dim, setting.heads, setting.kv_heads) == (128, 32, 8)
        rows, ends = setting.tree.rows(), setting.tree.subtree_end()
        tokens = prompt + 28 * 2048
        assert len(ends) == tokens and {len(row) for row in rows} == {prompt + 2048} and len(rows) == 28
        assert bool((ends[:prompt] == tokens).all())
        assert ends[prompt:].reshape(28, 2048).unique(dim=1)[:, 0].tolist() == [
            prompt + 2048 * (number + 1) for number in range(28)
        ]


class Flash:
    """Stands for flash-attn-4: tree attention, whose gradients are wrong from a call on."""

    def __init__(self, wrong_from: int | None) -> None:
        self.wrong_from, self.calls = wrong_from, 0

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, ends: Tensor) -> Tensor:
        self.calls += 1
        right = self.wrong_from is None or self.calls < self.wrong_from
        return bench_attention_cuda.tree_attention(q, k if right else k * 0.9 + k.detach() * 0.1, v, ends)


@pytest.fixture
def flash(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Flash:
    made = Flash(getattr(request, "param", None))

    def attend(case: Any, variant: str) -> Any:
        assert variant == FLASH
        return lambda q, k, v: made(q, k, v, case.ends)

    monkeypatch.setattr(bench_attention_cuda._Case, "flex", attend)
    monkeypatch.setattr(bench_attention_cuda, "_chosen", list)
    return made


def measure_flash() -> dict[str, Any]:
    setting = replace(SETTING, variants=(FLASH,))
    (record,) = bench_attention_cuda.run([setting], device="cpu", timer=lambda call: 3.0)
    return record


@pytest.mark.usefixtures("untuned")
def test_flash_attn_4_is_a_separate_baseline(flash: Flash) -> None:
    record = measure_flash()
    assert_measured("attention", record)
    assert record["wrong"] == [] and record["flex FLASH"] == [3.0, 3.0]
    assert record["flash_over_tree_forward"] == record["flash_over_tree_backward"] == 1.0
    assert not [key for key in record if key.startswith("flex_")], "it is no variant of the Triton kernels"
    headers = [column.header for column in bench_attention_cuda.make_summary([record]).columns]
    assert "fwd flash x" in headers and "bwd flash x" in headers
    assert "fwd flash x" not in [c.header for c in bench_attention_cuda.make_summary([measure()]).columns]


@pytest.mark.usefixtures("untuned")
@pytest.mark.parametrize("flash", [1, 4], indirect=True, ids=["always", "now and then"])
def test_wrong_gradients_of_flash_attn_4_get_no_time(flash: Flash) -> None:
    """Its record says so; what else was measured stays."""
    record = measure_flash()
    assert record["wrong"] == [] and record["tree_forward_ms"] == 3.0 and "rows_over_tree_backward" in record
    assert record["flex FLASH"].startswith("not measured: dk of flex FLASH must be off by at most 4 x")
    assert not [key for key in record if key.startswith("flash_")]


@pytest.mark.parametrize("found", [None, ImportError, object()], ids=["no module", "no package", "installed"])
def test_flash_runs_where_it_is_installed(found: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def find_spec(name: str) -> Any:
        assert name == "flash_attn.cute"
        if found is ImportError:
            raise ModuleNotFoundError("No module named 'flash_attn'")
        return found

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)
    chosen = bench_attention_cuda._chosen(("default", FLASH))
    assert chosen == (["default"] if found in (None, ImportError) else ["default", FLASH])


def test_what_flash_attn_4_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """The backend by name, numbers as sizes, and blocks of its tiles: on Blackwell twice as many queries."""
    given: dict[str, Any] = {}

    def compiled(function: Any, **options: Any) -> Any:
        given.update(options)
        return lambda *args, **kwargs: given.update(kwargs)

    monkeypatch.setattr(torch, "compile", compiled)
    case = bench_attention_cuda._Case(SETTING, torch.device("cpu"), torch.bfloat16, lambda call: 1.0, lambda step: None)
    case.flex(FLASH)(*case.leaves)
    assert given["kernel_options"] == {"BACKEND": "FLASH"} and given["dynamic"] is False
    assert given["block_mask"].BLOCK_SIZE == (128, 128)
    case.flex("default")(*case.leaves)
    assert given["kernel_options"] == {} and given["dynamic"] is None
    case.device = torch.device("cuda")
    for capability, block in (((9, 0), (128, 128)), ((10, 0), (256, 128)), ((12, 0), (256, 128))):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        assert case.flash_block == block


@pytest.mark.parametrize("block", [(32, 16), (16, 32), (16, 16)])
def test_blocks_of_a_mask_may_have_more_queries_than_keys(block: tuple[int, int]) -> None:
    ends = SETTING.tree.subtree_end()
    q = torch.zeros(1, 1, len(ends), 8)
    place = torch.arange(len(ends))
    dense = (place[None, :] <= place[:, None]) & (place[:, None] < ends[None, :])

    def visible(batch: Any, head: Any, q: Tensor, k: Tensor) -> Tensor:
        return dense[q, k]

    found = flex.block_mask(Inputs(q, q, q, ends), visible, block=block)
    rows, columns = (-(-len(ends) // side) for side in block)
    padded = torch.nn.functional.pad(dense, (0, columns * block[1] - len(ends), 0, rows * block[0] - len(ends)))
    tiles = padded.reshape(rows, block[0], columns, block[1]).transpose(1, 2)
    assert torch.equal(found.to_dense()[0, 0].bool(), tiles.any(-1).any(-1))
    full = torch.zeros(rows, columns, dtype=torch.bool)
    for row in range(rows):
        full[row, found.full_kv_indices[0, 0, row, : found.full_kv_num_blocks[0, 0, row]].long()] = True
    assert torch.equal(full, tiles.all(-1).all(-1))
