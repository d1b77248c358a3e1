"""When Gluon runs, without a device: refusals by name, comparisons at first use, and fallbacks."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from tests.kernels.gpu.gluon.test_gluon import FAR
from tests.kernels.gpu.interpreted_cases import SCORES, SMALL, draw
from treefx.errors import UnsupportedError
from treefx.kernels.gpu import dispatch
from treefx.kernels.gpu.triton_tree import paths
from treefx.kernels.gpu.triton_tree.configs import Config, default_config
from treefx.kernels.gpu.triton_tree.launch import Attention

pytestmark = pytest.mark.usefixtures("fresh_caches")


@pytest.fixture(autouse=True)
def right_on_all_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-ins of this file compute no attention; test_own_lists.py compares with the reference."""
    monkeypatch.setattr(paths, "own_list_errors", lambda *_: {"the output": 0.0})


def test_who_may_run_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused by name where it does not fit; else compared with the plain form, which follows where it is wrong."""
    monkeypatch.setenv("TREEFX_KERNEL_PATH", "gluon")
    monkeypatch.setattr(paths, "_verdicts", {})
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    half = draw(*SMALL, heads=(2, 2), dtype=torch.bfloat16).narrow
    chosen = Attention(half, SCORES["plain"], choose=lambda problem: Config(32, 16, 4, 2))
    taken: list[str] = []

    def answer(used: Attention, _: Sequence[Tensor]) -> list[Tensor]:
        taken.append(used.path)
        return [half.q * (factor if used.path == "gluon" else 1.0)]

    def refused(text: str, used: Attention = chosen) -> None:
        with pytest.raises(UnsupportedError, match=f"TREEFX_KERNEL_PATH=gluon must meet an attention.*{text}"):
            paths.checked("forward", used, [], answer)

    factor = 1.0
    refused("needs compute capability 9.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    refused("needs a 16-bit type", replace(chosen, inputs=draw(*SMALL).narrow))
    refused("loads by query and key", replace(chosen, score=SCORES["bias"]))
    for far in FAR.values():
        refused("keeps 32 bits", replace(chosen, score=far))
    wide = draw(*SMALL, widths=(256, 256), dtype=torch.bfloat16).narrow
    refused("more than 192 features", replace(chosen, inputs=wide))
    paths.checked("forward", chosen, [], answer)
    assert taken == ["plain", "gluon", "gluon"], "both, then what was called"
    taken.clear()
    factor = 1.5
    monkeypatch.setattr(paths, "_verdicts", {})
    with pytest.warns(RuntimeWarning, match="the Gluon forward kernel is switched off"):
        paths.checked("forward", chosen, [], answer)
    assert taken == ["plain", "gluon", "plain"]
    monkeypatch.setattr(paths, "interpreted", lambda: True)
    refused("interpreter runs no Gluon")


def test_keys_from_outside_are_judged_where_they_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first part of a plan has two unseen keys: it proves nothing about later launches."""
    monkeypatch.setattr(paths, "_verdicts", {})
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    half, taken = draw(*SMALL, outside=2, dtype=torch.bfloat16).narrow, list[str]()
    assert half.boundary is not None

    def answer(used: Attention, _: Sequence[Tensor]) -> list[Tensor]:
        taken.append(used.path)
        return [half.q]

    for seen in (0, 1, 1, 0):
        ends = [torch.tensor([0, last], dtype=torch.int32) for last in (0, seen)]
        outside = replace(half.boundary, lo=ends[0], hi=ends[1])
        paths.checked("forward", Attention(replace(half, boundary=outside), SCORES["plain"]), [], answer)
    assert taken == [*["plain", "gluon", "gluon"] * 2, "gluon", "gluon"]


@pytest.mark.parametrize("last", [2**31 - 1, 2**31])
def test_numbers_at_hand_have_32_bits(last: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of all tokens: the first ones, on which results are compared, may be small."""
    monkeypatch.setattr(paths, "_verdicts", {})
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    half, taken = draw(*SMALL, dtype=torch.bfloat16).narrow, list[str]()
    numbers = half.buffers[0].long()
    numbers[-1] = last
    chosen = Attention(replace(half, buffers=[numbers]), SCORES["chunked"])

    def answer(used: Attention, _: Sequence[Tensor]) -> list[Tensor]:
        taken.append(used.path)
        return [half.q]

    with nullcontext() if last < 2**31 else pytest.warns(RuntimeWarning, match="need more than the 32 bits"):
        paths.checked("forward", chosen, [], answer)
    assert taken == ["plain", "gluon", "gluon" if last < 2**31 else "plain"]


def test_it_runs_unasked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward, wherever it can; the plain form alone where that is asked for."""
    monkeypatch.delenv("TREEFX_KERNEL_PATH", raising=False)
    monkeypatch.setattr(paths, "_verdicts", {})
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    half = draw(*SMALL, heads=(2, 2), dtype=torch.bfloat16).narrow
    chosen = Attention(half, SCORES["plain"])
    taken: list[str] = []

    def answer(used: Attention, _: Sequence[Tensor]) -> list[Tensor]:
        taken.append(used.path)
        return [half.q]

    def run(used: Attention = chosen) -> list[str]:
        taken.clear()
        for name, given in (("forward", []), ("backward", [half.q, torch.zeros(half.q.shape[:3])])):
            paths.checked(name, used, given, answer)
        return taken

    assert run() == ["plain", "gluon", "gluon"] * 2, "both, then what was called"
    assert run() == ["gluon", "gluon"]
    assert {*run(replace(chosen, inputs=draw(*SMALL).narrow))} == {"plain"}, "float32"
    assert {*run(replace(chosen, score=SCORES["bias"]))} == {"plain"}
    monkeypatch.setenv("TREEFX_KERNEL_PATH", "plain")
    assert {*run()} == {"plain"}
    monkeypatch.delenv("TREEFX_KERNEL_PATH")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    assert {*run()} == {"plain"}


@pytest.mark.parametrize("path", ["", "gluon"])
def test_backward(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compared with the plain form; a gradient that no box reads takes another, in silence, asked for or not."""
    monkeypatch.setenv("TREEFX_KERNEL_PATH", path)
    monkeypatch.setattr(paths, "_verdicts", {})
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    half = draw(*SMALL, heads=(2, 2), dtype=torch.bfloat16).narrow
    chosen, taken = Attention(half, SCORES["plain"]), list[str]()
    wrong = ""

    def answer(used: Attention, _: Sequence[Tensor]) -> list[Tensor]:
        taken.append("one pass" if used.once else used.path)
        return [half.q * (1.5 if used.path == wrong else 1.0)]

    lse = torch.zeros(half.q.shape[:3])
    paths.checked("backward", chosen, [half.q, lse], answer)
    assert taken == ["plain", "gluon", "gluon"], "both, then what was called"
    taken.clear()
    shifted = torch.empty(half.q.numel() + 1, dtype=half.q.dtype)[1:].view_as(half.q)
    paths.checked("backward", chosen, [shifted, lse], answer)
    assert taken == (in_one_pass := ["plain", "one pass", "one pass"]), "its rows are long enough; no Gluon is tried"
    taken.clear()
    wrong = "gluon"
    monkeypatch.setattr(paths, "_verdicts", {})
    with pytest.warns(RuntimeWarning, match="the Gluon backward kernel is switched off"):
        paths.checked("backward", chosen, [half.q, lse], answer)
    assert taken == ["plain", "gluon", *in_one_pass]


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_gradients_that_are_laid_anew_may_lie_anyhow(kv_heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a group are: boxes read the copies."""
    monkeypatch.setattr(paths, "_verdicts", {})
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    half = draw(*SMALL, heads=(2, kv_heads), dtype=torch.bfloat16).narrow
    chosen, taken = Attention(half, SCORES["plain"]), list[str]()

    def answer(used: Attention, _: Sequence[Tensor]) -> list[Tensor]:
        taken.append(used.path)
        return [half.q]

    shifted = torch.empty(half.q.numel() + 1, dtype=half.q.dtype)[1:].view_as(half.q)
    paths.checked(
        "backward", replace(chosen, inputs=replace(half, deterministic=True)), [shifted, half.q[..., 0]], answer
    )
    assert taken[-1] == ("gluon" if kv_heads == 1 else "plain")


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("wrong", [False, True])
@pytest.mark.parametrize("first", [0.0, 1.0, torch.inf])
def test_the_gradient_at_hand_decides_nothing(first: float, wrong: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a long prompt it is zero in the last layer, and any kernel right; a scaled loss spreads infinities."""
    monkeypatch.setattr(paths, "_verdicts", {})
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    half = draw(*SMALL, heads=(2, 2), dtype=torch.bfloat16).narrow
    lse = torch.zeros(half.q.shape[:3])
    lse[0, 0, 1] = -1e38

    def answer(used: Attention, tensors: Sequence[Tensor]) -> list[Tensor]:
        if used.path == "gluon":  # as tiles of another size do
            return [tensors[0] * (1.5 if wrong else 1.0) + 0 * tensors[0].sum()]
        assert tensors[0][0, 0, 1].abs().max() == 0 or tensors[0] is grad, "what saw masking constants alone"
        return [tensors[0]]

    grad = torch.full_like(half.q, first)
    with pytest.warns(RuntimeWarning, match="the Gluon backward") if wrong else nullcontext():
        paths.checked("backward", Attention(half, SCORES["plain"]), [grad, lse], answer)
    assert [verdict for key, verdict in paths._verdicts.items() if key[0] == "Gluon"] == [not wrong]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("tried", [["plain"], ["plain", "gluon"]])
def test_a_step_without_room_says_nothing_of_a_form(tried: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes the plain form, and the next one compares them."""
    monkeypatch.setattr(paths, "_verdicts", {})
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    chosen = Attention(draw(*SMALL, heads=(2, 2), dtype=torch.bfloat16).narrow, SCORES["plain"])
    taken = list[str]()

    def answer(used: Attention, _: Sequence[Tensor]) -> list[Tensor]:
        taken.append(used.path)
        if taken == tried:
            raise torch.OutOfMemoryError
        return [chosen.inputs.q]

    for _ in range(2):
        paths.checked("forward", chosen, [], answer)
    assert taken == [*tried, "plain", "plain", "gluon", "gluon"]


def test_nothing_is_compared_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waits are errors there, which would count as those of a kernel for good."""
    capturing = True
    monkeypatch.setattr(paths, "_verdicts", {})
    monkeypatch.setattr(dispatch, "_problems", {})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(name="no Hopper"))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    half = draw(*SMALL, heads=(2, 2), dtype=torch.bfloat16).narrow
    chosen = Attention(half, SCORES["plain"], choose=default_config)
    with pytest.raises(UnsupportedError, match="run the step once before the capture"):
        dispatch.forward(half, SCORES["plain"])
    for capturing in (True, False, True):
        with pytest.raises(UnsupportedError) if capturing and not paths._verdicts else nullcontext():
            paths.checked("forward", chosen, [], lambda used, _: [half.q])
    assert list(paths._verdicts.values()) == [True] and not dispatch._problems
