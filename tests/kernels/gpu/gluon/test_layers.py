"""Layers after the first of a forest in Gluon, by hand in float64: repeated launches have the layer's own numbers.

Scores read vectors of rows and keys there, some of them the forest's and some a layer's own.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from tests.kernels.gpu.gluon.by_hand import run_by_hand
from tests.kernels.gpu.interpreted_cases import (
    DEPTH_Q,
    SCALED,
    SCORES,
    SMALL,
    Case,
    assert_equal,
    const,
    draw,
    expected,
    forest,
    other_numbers,
)
from treefx.kernels.gpu.triton_tree import attention, paths
from treefx.kernels.gpu.triton_tree.configs import Config, Problem
from treefx.kernels.gpu.triton_tree.launch import Launch
from treefx.kernels.score import Score
from treefx.kernels.tiles import tree_blocks
from treefx.tools.kernels.stand_in import on_device

pytestmark = pytest.mark.usefixtures("fresh_caches")
GATED = Score(("add", SCALED, ("mul", ("load", 3, ("head",)), ("float", ("lt", DEPTH_Q, const(3))))))
ROUNDED = 1e-5
"""Numbers of rows, and what goes from launch to launch, have 32 bits."""


def _config(problem: Problem) -> Config:
    return Config(16, 32, 4, 2) if problem.kernel == "backward_keys" else Config(32, 16, 4, 2)


def _once(launch: Launch) -> Callable[..., object]:
    """Run one kernel by hand, and return what runs it again, as a launch on a device does."""
    name = launch.kernel.__name__
    assert launch.kernel.is_gluon() == (name not in ("prologue", "values", "sum_parts") and "repair" not in name)

    def again(*values: Any) -> None:
        run_by_hand(replace(launch, arguments=dict(zip(launch.kernel.arg_names, values, strict=True)), after=()))

    again(*(launch.arguments[name] for name in launch.kernel.arg_names))
    return again


@pytest.fixture(autouse=True)
def by_hand(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(Launch, "_once", _once)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(attention, "BestConfig", lambda ends, heads: _config)
    monkeypatch.setattr(paths, "_is_right", lambda form, *_: form == "Gluon")
    tree_blocks.forget_blocks()
    yield
    tree_blocks.forget_blocks()


def computed(case: Case, score: Score) -> list[Tensor]:
    out, lse = attention.forward(case.wide, score)
    *grads, _ = attention.backward(case.grad, case.wide, out, lse, score, [False] * 4)
    return [out, lse, *grads]


def check(case: Case, score: Score) -> None:
    got = computed(case, score)
    assert_equal(got, expected(case, score)[: len(got)], ROUNDED)


@pytest.mark.parametrize(("heads", "name"), [((7, 1), "alibi"), ((4, 2), "softcap"), ((2, 2), "window")])
def test_layers_after_the_first(heads: tuple[int, int], name: str, worked_out: list[int]) -> None:
    """They launch what the first one has launched: their own numbers count, and those of their own slopes and sinks."""
    first = draw(*SMALL, heads=heads, batch=2)
    for layer in range(2):
        check(other_numbers(first, layer), SCORES[name])
    assert len(worked_out) == 2, "once forward, once backward"
    check(draw(*forest([[*range(len(SMALL[0]))]]), heads=heads, batch=2), SCORES[name])
    assert len(worked_out) == 4, "another forest of as many tokens"


@pytest.mark.parametrize("name", ["window", "alibi"])
def test_depths_of_their_own(name: str) -> None:
    """Of one forest, in the condition and in the score: of each layer its own."""
    case = draw(*SMALL)
    for factor in (1, 2, 1, 3):
        buffers = [case.wide.buffers[0] * factor, *case.wide.buffers[1:]]
        check(replace(case, wide=replace(case.wide, buffers=buffers)), SCORES[name])


@pytest.mark.parametrize("failing", [1, 2, 3, 5])
def test_a_launch_that_fails_leaves_nothing_behind(failing: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the middle of the record; the next layer is computed, and right."""
    case, ran = draw(*SMALL), list[str]()

    def failed(launch: Launch) -> Callable[..., object]:
        ran.append(launch.kernel.__name__)
        if len(ran) == failing:
            raise torch.OutOfMemoryError("no room")
        return _once(launch)

    monkeypatch.setattr(Launch, "_once", failed)
    with pytest.raises(torch.OutOfMemoryError):
        computed(case, SCORES["alibi"])
    assert {"values", "forward"} & {*ran} and len(ran) == failing
    for layer in range(2):
        check(other_numbers(case, layer), SCORES["alibi"])


@pytest.mark.parametrize("score", [SCORES["alibi"], GATED], ids=["alibi", "gated by depth"])
def test_values_of_a_layer_are_never_kept(score: Score) -> None:
    """Slopes and depths that a program rewrites in the same memory, undetected, as compiled code does."""
    case = draw(*SMALL)
    with on_device():
        for layer in range(3):
            check(case, score)
            case.wide.buffers[3].data.mul_(-1.5 - layer)
            case.wide.buffers[0].data.add_(layer)


@pytest.mark.parametrize("seen", [False, True])
def test_a_boundary_that_nobody_sees_takes_no_launch(seen: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts without ancestors have two such keys: sizes of at least two serve all parts."""
    case, ran = draw(*SMALL, outside=2, sinks=True), list[str]()
    monkeypatch.setattr(Launch, "_once", lambda launch: (ran.append(launch.kernel.__name__), _once(launch))[1])
    assert case.wide.boundary is not None
    case.wide.boundary.lo.zero_()
    case.wide.boundary.hi.zero_()
    case.wide.boundary.hi[1] = int(seen)
    out, lse = attention.forward(case.wide, SCORES["plain"])
    dq, dk, dv, rest = attention.backward(case.grad, case.wide, out, lse, SCORES["plain"], [False] * 4)
    assert_equal([out, lse, dq, dk, dv, *rest[:2]], expected(case, SCORES["plain"])[:7], ROUNDED)
    each = 1 + seen
    forward, of_keys, of_queries = (
        [name, f"repair_{name}"] * each for name in ("forward", "backward_keys", "backward_queries")
    )
    assert ran == [*forward, "prologue", *of_keys, *of_queries]
