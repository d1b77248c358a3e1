"""Tuning without a device: measured, kept and used configurations."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from treefx.kernels.common import Inputs
from treefx.kernels.gpu.triton_tree import tuning
from treefx.kernels.gpu.triton_tree.configs import Config, Problem, candidates
from treefx.kernels.gpu.triton_tree.launch import Attention, Launch
from treefx.kernels.gpu.triton_tree.tuning import (
    BestConfig,
    configs_of_forest,
    keep_rates,
    rates_key,
    tile_name,
    tuned,
)
from treefx.kernels.memory import Bounded
from treefx.kernels.score import make_score
from treefx.kernels.tiles.tree_blocks import find_node_length


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TREEFX_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TREEFX_TUNE", "1")
    tuning._findings.cache_clear()
    tuning._rates.cache_clear()
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
    choose = BestConfig(inputs.subtree_end, kv_heads)
    return Attention(inputs, make_score(scale=0.1, depth=0, **options), choose=choose, node_length=node_length)


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
    assert attention().config("forward") == choices[1]
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
    monkeypatch.setattr(tuning, "_without_room", Bounded(8))
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


GUESSED_WRONG = {"128x64 w8 s3": [1.0, 5.0, 5.0], "64x64 w4 s3": [1.0, 1.0, 9.0], "128x32 w8 s3": [1.0, 9.0, 0.5]}
"""Microseconds of a program, a full tile and a partial one: the first is never the fastest."""


def in_a_row(count: int) -> torch.Tensor:
    return torch.full((count,), count, dtype=torch.int32)


def alone(count: int) -> torch.Tensor:
    return torch.arange(1, count + 1, dtype=torch.int32)


def short_nodes() -> Problem:
    return attention(node_length=64).problem("forward")


def test_the_tiles_of_a_forest_choose_where_a_device_has_rates(own_folder: Path) -> None:
    """Long rows are full tiles, which the second makes fast; lone tokens are partial ones, which the third does."""
    row, lone = BestConfig(in_a_row(4096), 2), BestConfig(alone(4096), 2)
    first = candidates(short_nodes())[0]
    assert row(short_nodes()) == first, "without rates it is the first guess"
    keep_rates({rates_key(short_nodes()): GUESSED_WRONG})
    assert tile_name(first) == next(iter(GUESSED_WRONG))
    assert [tile_name(choose(short_nodes())) for choose in (row, lone)] == ["64x64 w4 s3", "128x32 w8 s3"]
    for other in (attention(window=9).problem("forward"), attention().problem("backward_queries")):
        assert row(other) == candidates(other)[0], "the rates are of another score, or another kernel"


def test_what_was_measured_comes_before_what_is_foretold(measured: list[Config]) -> None:
    keep_rates({rates_key(short_nodes()): GUESSED_WRONG})
    best = launch(attention(node_length=64)).config
    assert best == candidates(short_nodes())[1] and BestConfig(alone(4096), 2)(short_nodes()) == best


def test_a_form_is_judged_in_every_configuration_that_forests_choose(own_folder: Path) -> None:
    ends = {"row": in_a_row(4096), "alone": alone(4096)}
    given = {name: replace(attention(node_length=64), choose=BestConfig(tensor, 2)) for name, tensor in ends.items()}
    assert {configs_of_forest(one, ["forward"]) for one in given.values()} == {()}
    keep_rates({rates_key(short_nodes()): GUESSED_WRONG})
    assert len({configs_of_forest(one, ["forward"]) for one in given.values()}) == 2


def test_rates_that_come_with_treefx_are_of_devices_by_name() -> None:
    shipped = json.loads((Path(tuning.__file__).parent / "rates.json").read_text())
    for kinds in shipped.values():
        for found in kinds.values():
            assert all(len(numbers) == 3 and min(numbers) >= 0 for numbers in found.values())
