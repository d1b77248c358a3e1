"""Tuning without a device: what is measured, what is kept, what is used."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from treefx.kernels.common import Inputs
from treefx.kernels.gpu.triton_tree import tuning
from treefx.kernels.gpu.triton_tree.configs import Config, candidates
from treefx.kernels.gpu.triton_tree.launch import Attention, Launch
from treefx.kernels.gpu.triton_tree.tuning import best_config, tuned
from treefx.kernels.score import make_score
from treefx.kernels.tiles.tree_blocks import find_node_length


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TREEFX_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TREEFX_TUNE", "1")
    tuning._findings.cache_clear()
    return tmp_path / "tuning.json"


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[Config]:
    """The second configuration is the fastest, the first cannot run."""
    seen: list[Config] = []

    def milliseconds(launch: Launch) -> float:
        seen.append(launch.config)
        return {1: float("inf"), 2: 1.0}.get(len(seen), 2.0)

    monkeypatch.setattr(tuning, "_milliseconds", milliseconds)
    return seen


def attention(
    node_length: int = 256,
    dtype: torch.dtype = torch.bfloat16,
    widths: tuple[int, int] = (64, 64),
    kv_heads: int = 2,
    **options: Any,
) -> Attention:
    q, k = (torch.empty(1, count, 64, widths[0], dtype=dtype) for count in (2, kv_heads))
    v = torch.empty(1, kv_heads, 64, widths[1], dtype=dtype)
    inputs = Inputs(q, k, v, torch.full((64,), 64, dtype=torch.int32), [torch.arange(64)])
    return Attention(inputs, make_score(scale=0.1, depth=0, **options), choose=best_config, node_length=node_length)


def launch(given: Attention) -> Launch:
    q, v = given.inputs.q, given.inputs.v
    out = torch.empty(*q.shape[:-1], v.shape[-1], dtype=q.dtype)
    return tuned(given, "forward", lambda chosen: chosen.forward(chosen.own_keys(), out, torch.empty(q.shape[:-1])))


def test_the_fastest_is_kept_and_found_again(measured: list[Config], own_folder: Path) -> None:
    choices = candidates(attention().problem("forward"))
    assert launch(attention()).config == choices[1]
    assert measured == list(choices)
    assert launch(attention()).config == choices[1] and len(measured) == len(choices), "measured once"
    tuning._findings.cache_clear()  # another process
    assert best_config(attention().problem("forward")) == choices[1]
    assert len(json.loads(own_folder.read_text())) == 1


@pytest.mark.parametrize(
    "change",
    [
        {"node_length": 16},
        {"dtype": torch.float16},
        {"widths": (128, 64)},
        {"widths": (64, 128)},
        {"kv_heads": 1},
        {"softcap": 5.0},
        {"window": 9},
    ],
    ids=str,
)
def test_every_kind_of_attention_is_measured_apart(change: dict[str, Any], measured: list[Config]) -> None:
    launch(attention())
    before = len(measured)
    launch(attention(**change))
    assert len(measured) > before
    launch(attention(**change))
    assert len(measured) == before + len(candidates(attention(**change).problem("forward")))


def test_numbers_of_a_score_are_no_kind_of_their_own(measured: list[Config]) -> None:
    launch(attention(window=9, softcap=5.0))
    before = len(measured)
    launch(attention(window=1000, softcap=30.0))
    assert len(measured) == before


def test_nothing_is_measured_unasked(measured: list[Config], own_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TREEFX_TUNE", "0")
    assert launch(attention()).config == candidates(attention().problem("forward"))[0]
    assert not measured and not own_folder.exists()


def test_without_room_to_measure_nothing_is_kept(own_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that is short of memory says nothing of others: no file, the first guess, and not tried at every layer."""
    tried: list[int] = []

    def bench(run: Any, **_: Any) -> float:
        tried.append(1)
        raise torch.OutOfMemoryError

    monkeypatch.setattr("triton.testing.do_bench", bench)
    monkeypatch.setattr(tuning, "_without_room", set())
    choices = candidates(attention().problem("forward"))
    assert launch(attention()).config == launch(attention()).config == choices[0]
    assert len(tried) == len(choices) and not own_folder.exists()


@pytest.mark.parametrize("content", ["", "[1]", "{broken"])
def test_a_damaged_file_counts_as_empty(content: str, own_folder: Path, measured: list[Config]) -> None:
    own_folder.write_text(content)
    launch(attention())
    assert measured and json.loads(own_folder.read_text())


def test_findings_of_other_processes_stay(measured: list[Config], own_folder: Path) -> None:
    tuning._findings()
    own_folder.write_text('{"of another": [64, 64, 4, 2]}')
    launch(attention())
    assert len(json.loads(own_folder.read_text())) == 2


def test_mean_length_of_nodes() -> None:
    """A trunk of 40 tokens, two branches of 10 and 14 tokens, then another tree of one token."""
    ends = torch.tensor([64] * 40 + [50] * 10 + [64] * 14 + [65], dtype=torch.int32)
    assert find_node_length(ends) == 16  # 65 / 4, rounded down
    assert find_node_length(torch.arange(1, 9, dtype=torch.int32)) == 1
