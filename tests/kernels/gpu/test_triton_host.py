"""What the host does on a GPU, without one: Triton's own dispatch on a driver that launches nothing.

Triton binds arguments, specialises them and looks its kernels up as on a device; only the compiler and the launch are
stand-ins. So a wrong argument, or a kernel compiled for one length, shows here.
"""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton")

from triton.runtime import _allocation  # noqa: E402

from treefx.errors import UnsupportedError  # noqa: E402
from treefx.kernels import tree_attention  # noqa: E402
from treefx.kernels.common import Boundary, Inputs  # noqa: E402
from treefx.kernels.gpu import dispatch as cuda  # noqa: E402
from treefx.kernels.gpu.triton_tree import attention, paths  # noqa: E402
from treefx.kernels.gpu.triton_tree.launch import Attention, Launch  # noqa: E402
from treefx.kernels.score import make_score  # noqa: E402
from treefx.tools.kernels.stand_in import HOPPER, standing_in  # noqa: E402


@pytest.fixture
def compiled(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[str]]:
    """Names of the kernels that were compiled; those launched are in ``LAUNCHED``. For a Hopper, or another device."""
    names: list[str] = []
    LAUNCHED.clear()
    monkeypatch.setenv("TREEFX_CACHE_DIR", str(tmp_path))
    with standing_in(names.append, LAUNCHED.append, getattr(request, "param", HOPPER)):
        yield names


LAUNCHED: list[str] = []
BACKWARD = ["prologue", "backward_keys", "backward_queries"]
ONCE = ["prologue", "backward_once", "finish_queries", "repair_backward_queries"]
GLUON_FORWARD = ["forward", "repair_forward"]
GLUON_ONCE = ["prologue", "backward_once", "repair_backward_keys", *ONCE[2:]]
GLUON_BACKWARD = [BACKWARD[0], *(name for kernel in BACKWARD[1:] for name in (kernel, f"repair_{kernel}"))]


def attend(tokens: int, impl: str = "triton", width: int = 64, **options: Any) -> None:
    shapes = [(1, tokens, heads, width) for heads in (4, 2, 2)]
    q, k, v = (torch.zeros(shape, dtype=torch.bfloat16).transpose(1, 2).requires_grad_() for shape in shapes)
    out = tree_attention(q, k, v, torch.full((tokens,), tokens), impl=impl, **options)
    torch.autograd.grad(out, [q, k, v], torch.zeros_like(out))


def test_both_forms_are_compared_once_and_the_fast_one_stays(compiled: list[str]) -> None:
    attend(200)
    both = ["forward", *GLUON_FORWARD * 3, *BACKWARD, *GLUON_BACKWARD * 3]
    assert LAUNCHED == both, "plain and in Gluon on the first tokens, in Gluon on all, then the call"
    LAUNCHED.clear()
    attend(200)
    assert LAUNCHED == [*GLUON_FORWARD, *GLUON_BACKWARD]
    assert len(compiled) == 11 and list(paths._verdicts.values()) == [True, True]


@pytest.mark.parametrize("options", [{}, {"window": 50, "softcap": 5.0}], ids=["plain", "window, softcap"])
def test_a_new_length_compiles_nothing(options: dict[str, Any], compiled: list[str]) -> None:
    options = {**options, "deterministic": True}
    attend(300, **options)
    found = len(compiled)
    for tokens in (333, 1008, 4100):
        LAUNCHED.clear()
        attend(tokens, **options)
        assert LAUNCHED.count("backward_keys") in (1, 4)
    assert len([name for name in compiled if name != "sum_parts"]) == found


def test_long_forests_take_one_pass(compiled: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """It is compared with the plain kernels once for a length; neither another length nor a new forest compiles it."""
    monkeypatch.setenv("TREEFX_KERNEL_PATH", "plain")
    attend(400)
    assert "backward_once" not in LAUNCHED
    LAUNCHED.clear()
    attend(1008)
    both = ["forward", *BACKWARD, *ONCE * 3]
    assert LAUNCHED == both, "the forward, the forms of the backward, one of them on all tokens, and what was called"
    found = len(compiled)
    LAUNCHED.clear()
    attend(999)
    attend(1400)
    assert LAUNCHED == ["forward", *ONCE, *both] and len(compiled) == found
    LAUNCHED.clear()
    attend(999, deterministic=True)
    assert "backward_once" not in LAUNCHED


def test_long_forests_take_gluon_where_it_runs(compiled: list[str]) -> None:
    """Two passes of it cost less than one of the plain form, which is not even tried."""
    for tokens in (1008, 999):
        LAUNCHED.clear()
        attend(tokens)
    assert LAUNCHED == [*GLUON_FORWARD, *GLUON_BACKWARD] and "backward_once" not in compiled


def test_gluon_takes_one_pass_where_that_is_asked_for(compiled: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of long rows, and heads that fit; it is compared with the plain kernels first. Nothing else takes it."""
    attend(1300, width=128)
    assert "backward_once" not in LAUNCHED
    monkeypatch.setenv("TREEFX_KERNEL_PATH", paths.GLUON_ONCE)
    LAUNCHED.clear()
    attend(1300, width=128)
    assert LAUNCHED == [*GLUON_FORWARD, *BACKWARD, *GLUON_ONCE * 3]
    for tokens, width, deterministic in ((1300, 64, False), (200, 128, False), (1300, 128, True)):
        attend(tokens, width=width, deterministic=deterministic)
        LAUNCHED.clear()
        attend(tokens, width=width, deterministic=deterministic)
        assert LAUNCHED == [*GLUON_FORWARD, *GLUON_BACKWARD]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("damage", ["wrong", "a crash"])
@pytest.mark.parametrize("form", ["Gluon", "one-pass"])
def test_a_backward_that_is_wrong_is_switched_off(
    form: str, damage: str, compiled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Instead of Gluon long forests take one pass, instead of that two of the plain form."""
    run, wrong, checked = Launch.run, [0], paths.checked
    monkeypatch.setenv("TREEFX_KERNEL_PATH", "plain" if form == "one-pass" else "")

    def damaged(launch: Launch) -> None:
        in_gluon = "packed_keys" in launch.arguments
        if launch.kernel.__name__ == ("backward_keys" if form == "Gluon" else "backward_once"):
            if damage == "a crash" and in_gluon == (form == "Gluon"):
                raise RuntimeError("PassManager::run failed")
        run(launch)

    def errors_of_backward(name: str, *given: Any) -> Any:
        wrong[0] = 4 if name == "backward" and damage == "wrong" else 0
        return checked(name, *given)

    def largest_error(got: torch.Tensor, wanted: torch.Tensor) -> float:
        wrong[0] -= 1
        return float("nan") if wrong[0] >= 0 else 0.0

    with monkeypatch.context() as patch:
        patch.setattr(Launch, "run", damaged)
        patch.setattr(attention, "checked", errors_of_backward)
        patch.setattr(paths, "largest_error", largest_error)
        with pytest.warns(RuntimeWarning, match=f"{form} backward kernel is switched off") as caught:
            attend(1008)
    assert sum("is switched off" in str(warning.message) for warning in caught) == 1
    LAUNCHED.clear()
    attend(1008)
    assert LAUNCHED == [*GLUON_FORWARD, *ONCE] if form == "Gluon" else ["forward", *BACKWARD]


def test_one_token_that_steps_oddly_is_read_in_the_plain_form(compiled: list[str]) -> None:
    """No descriptor has a step that is no multiple of 16 bytes, of one row either."""
    score, ends = make_score(scale=1.0), torch.ones(1, dtype=torch.int32)
    even = torch.zeros(1, 4, 1, 64, dtype=torch.bfloat16)
    odd = torch.zeros(1000, dtype=torch.bfloat16).as_strided((1, 4, 1, 64), (256, 64, 3, 1))
    assert paths.gluon_refusal(Attention(Inputs(even, even, even, ends), score)) is None
    assert "does not step by multiples" in str(paths.gluon_refusal(Attention(Inputs(odd, even, even, ends), score)))


def test_keys_from_outside_that_start_oddly_are_read_in_the_plain_form(compiled: list[str]) -> None:
    score, ends = make_score(scale=1.0), torch.ones(1, dtype=torch.int32)
    even = torch.zeros(1, 4, 8, 64, dtype=torch.bfloat16)
    places = torch.zeros(12, dtype=torch.int32)
    refusals = []
    for first in (0, 1):
        outside = Boundary(even, even, places[first : first + 8], places[:8])
        refusals.append(paths.gluon_refusal(Attention(Inputs(even, even, even, ends, boundary=outside), score)))
    outside = replace(outside, lo=places[:8], k=even.transpose(2, 3).contiguous().transpose(2, 3)[:, :, ::2])
    refusals.append(paths.gluon_refusal(Attention(Inputs(even, even, even, ends, boundary=outside), score)))
    assert refusals[0] is None and "does not start at a multiple of 16" in str(refusals[1])
    assert "does not step by multiples" in str(refusals[2])


def test_more_heads_than_a_device_counts_are_refused(compiled: list[str]) -> None:
    q = torch.zeros(65_536, 1, 1, 16, dtype=torch.float32)
    with pytest.raises(UnsupportedError, match="at most 65535, got 65536"), torch.no_grad():
        tree_attention(q, q, q, torch.ones(1, dtype=torch.int32), impl="triton")
    assert not LAUNCHED


def test_the_program_keeps_its_own_allocator(compiled: list[str]) -> None:
    """Descriptors take their memory from the allocator that is set; only where there is none from ours."""
    taken: list[int] = []

    def own(size: int, alignment: int, stream: int | None) -> torch.Tensor:
        taken.append(size)
        return torch.empty(size, dtype=torch.int8)

    token = _allocation._allocator.set(own)
    q = torch.zeros(1, 4, 200, 64, dtype=torch.bfloat16)
    with torch.no_grad():
        tree_attention(q, q, q, torch.full((200,), 200), impl="triton")
        assert len(taken) == 3 and min(taken) > 0, "Gluon, tried twice and taken"
        _allocation._allocator.reset(token)
        tree_attention(q, q, q, torch.full((200,), 200), impl="triton")
    assert len(taken) == 3 and LAUNCHED[-2:] == GLUON_FORWARD


def test_lists_that_are_cut_take_one_kernel_more(compiled: list[str]) -> None:
    q = torch.zeros(1, 2, 20_000, 64, dtype=torch.bfloat16, requires_grad=True)
    ends = torch.arange(1, 20_001)
    ends[:128] = 20_000
    torch.autograd.grad(tree_attention(q, q, q, ends, impl="triton"), q, torch.zeros_like(q))
    assert compiled.count("sum_parts") == 1 and LAUNCHED.count("sum_parts") == 2, "the first tokens have short lists"


def test_tuning_measures_every_configuration_once(
    compiled: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TREEFX_TUNE", "1")
    attend(200)
    measured = len(compiled)
    findings = json.loads((tmp_path / "tuning.json").read_text())
    assert len(findings) == 3 and all("gluon" in key and "Hopper that is not there" in key for key in findings)
    attend(200)
    attend(211)
    assert len(compiled) == measured > 7


def test_auto_checks_the_kernels_and_takes_them(compiled: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "_problems", {})
    monkeypatch.setattr(cuda, "relative_error", lambda got, wanted: 0.0)
    monkeypatch.setattr(cuda.flex, "forward", None)
    monkeypatch.setattr("treefx.kernels.ops.cpu", cuda)  # the tensors are on the CPU
    attend(300, impl="auto", softcap=3.0)
    assert list(cuda._problems.values()) == [None] and LAUNCHED[:2] == ["forward", "prologue"]
