"""Layers after the first of a forest, in all that may differ from it, in Triton's interpreter against float64.

Not collected by itself: test_triton_interpreter.py runs it in a process with TRITON_INTERPRET=1.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tests.kernels.gpu.interpreted_cases import (
    DEPTH_Q,
    SCALED,
    SCORES,
    SMALL,
    Case,
    as_type,
    assert_equal,
    check,
    computed,
    const,
    draw,
    expected,
    forest,
    other_numbers,
)
from treefx.kernels import reference
from treefx.kernels.gpu.triton_tree import attention, paths
from treefx.kernels.gpu.triton_tree.launch import Launch
from treefx.kernels.ops import attend
from treefx.kernels.score import Score
from treefx.kernels.tiles import tree_blocks
from treefx.tools.kernels.stand_in import on_device


@pytest.fixture(autouse=True)
def nothing_is_known() -> Iterator[None]:
    tree_blocks.forget_blocks()
    yield
    tree_blocks.forget_blocks()


def test_layers_of_several_kinds_in_turn(worked_out: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows in every other layer, sinks in some, halves of precision, other heads; in one pass and in two."""
    monkeypatch.setattr(paths, "ONE_PASS_KEYS", 0)
    kinds = {
        "window": draw(*SMALL, heads=(4, 2)),
        "plain": draw(*SMALL, heads=(4, 2)),
        "softcap": draw(*SMALL, heads=(4, 2), sinks=True),
        "alibi": draw(*SMALL, heads=(2, 2), widths=(8, 24)),
    }
    for layer in range(2):
        for name, case in kinds.items():
            for deterministic in (True, False):
                torch.use_deterministic_algorithms(deterministic, warn_only=True)
                check(other_numbers(case, layer), SCORES[name])
        torch.use_deterministic_algorithms(True, warn_only=True)
        half = other_numbers(kinds["plain"], layer)
        half.narrow = as_type(half.wide, torch.float16)
        check(half, SCORES["plain"], 3e-3)
    assert len(worked_out) == 2 * (2 * 4 + 1), "each kind once, forward and backward"


def test_depths_of_their_own() -> None:
    """Of one forest, in the condition and in the score: of each layer its own."""
    case = draw(*SMALL)
    for name in ("window", "alibi"):
        for factor in (1, 2, 1, 3):
            buffers = [case.wide.buffers[0] * factor, *case.wide.buffers[1:]]
            wide = replace(case.wide, buffers=buffers)
            check(replace(case, wide=wide, narrow=as_type(wide, torch.float32)), SCORES[name])


def fused(tensors: list[Tensor]) -> list[Tensor]:
    """As views of one piece of memory, side by side in every token, from a place that is not its first."""
    whole = torch.cat([x.transpose(1, 2).flatten(2) for x in (tensors[0][:, :1], *tensors)], dim=2)
    parts = whole.split([x.shape[1] * x.shape[3] for x in (tensors[0][:, :1], *tensors)], dim=2)[1:]
    return [part.unflatten(2, (x.shape[1], -1)).transpose(1, 2) for part, x in zip(parts, tensors, strict=True)]


def shared_heads(tensors: list[Tensor]) -> list[Tensor]:
    return [tensors[0], *(x[:, :1].expand(x.shape) for x in tensors[1:])]


def shared_batch(tensors: list[Tensor]) -> list[Tensor]:
    return [x[:1].expand(x.shape) for x in tensors]


LAYOUTS: dict[str, Callable[[list[Tensor]], list[Tensor]]] = {
    "as they are": list,
    "one projection": fused,
    "keys of one head": shared_heads,
    "one element": shared_batch,
    "values are keys": lambda tensors: [tensors[0], tensors[1], tensors[1]],
    "values lie in the keys": lambda tensors: [tensors[0], tensors[1], tensors[1][..., :]],
}


def test_layouts_in_turn() -> None:
    """Views with offsets, steps of 0 and tensors in two places, each after each."""
    case = draw(*SMALL, batch=2)
    for layer in range(2):
        for lay in LAYOUTS.values():
            one = other_numbers(case, layer)
            q, k, v = lay([one.narrow.q, one.narrow.k, one.narrow.v])
            narrow = replace(one.narrow, q=q, k=k, v=v)
            wide = replace(one.wide, q=q.double(), k=k.double(), v=v.double())
            check(replace(one, wide=wide, narrow=narrow), SCORES["plain"])


def test_a_gradient_that_is_the_output() -> None:
    """One tensor in two places of the backward, before and after layers where it is none."""
    case = draw(*SMALL)
    for layer in range(4):
        one = other_numbers(case, layer)
        out, lse = attention.forward(one.narrow, SCORES["plain"])
        grad = out if layer % 2 == 0 else out.clone()
        *grads, _ = attention.backward(grad, one.narrow, out, lse, SCORES["plain"], [False] * 4)
        assert_equal([out, lse, *grads], expected(replace(one, grad=out.double()), SCORES["plain"])[:5])


def of_operator(case: Case, score: Score, impl: str, wrap: str, frozen: bool) -> list[Tensor]:
    """Output and gradients of the operator itself."""
    inputs = case.wide if impl == "reference" else case.narrow
    leaves = [x.detach().clone().requires_grad_() for x in (inputs.q, inputs.k, inputs.v, inputs.buffers[3])]
    leaves[1].requires_grad_(not frozen)

    def run(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor) -> Tensor:
        return attend(q, k, v, inputs.subtree_end, score, [*inputs.buffers[:3], slopes], impl=impl)

    again = {"reentrant": True, "checkpoint": False}
    out: Tensor = checkpoint(run, *leaves, use_reentrant=again[wrap]) if wrap in again else run(*leaves)
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    for _ in range(2 if wrap == "twice" else 1):
        for leaf in wanted:
            leaf.grad = None
        out.backward(case.grad.to(out.dtype), retain_graph=wrap == "twice")
    return [out.detach(), *(leaf.grad for leaf in wanted if leaf.grad is not None)]


def test_ways_to_run_a_layer() -> None:
    """Differentiated twice over, made again in the backward, with frozen keys: one after the other."""
    case = draw(*SMALL)
    for layer, wrap in enumerate(("", "twice", "checkpoint", "reentrant", "twice")):
        one = other_numbers(case, layer)
        frozen = layer % 2 == 1
        got = of_operator(one, SCORES["alibi"], "triton", wrap, frozen)
        assert len(got) == 5 - frozen
        assert_equal(got, of_operator(one, SCORES["alibi"], "reference", "", frozen))


@pytest.mark.parametrize("first", [True, False])
def test_inference_before_or_after_training(first: bool) -> None:
    """What the one leaves serves the other."""
    case = draw(*SMALL)
    for layer in range(4):
        one = other_numbers(case, layer)
        if (layer % 2 == 0) == first:
            with torch.inference_mode():
                got = attention.forward(one.narrow, SCORES["alibi"])
            assert_equal(list(got), list(reference.forward(one.wide, SCORES["alibi"])))
        else:
            assert_equal(
                of_operator(one, SCORES["alibi"], "triton", "", False),
                of_operator(one, SCORES["alibi"], "reference", "", False),
            )


@pytest.mark.parametrize("failing", [1, 2, 3, 4])
def test_a_launch_that_fails_leaves_nothing_behind(failing: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the middle of the record; the next layer is computed, and one in another form right."""
    case, ran, run = draw(*SMALL), [], Launch.run

    def failed(launch: Launch) -> None:
        ran.append(launch.kernel.__name__)
        if len(ran) == failing:
            raise torch.OutOfMemoryError("no room")
        run(launch)

    monkeypatch.setattr(Launch, "run", failed)
    with pytest.raises(torch.OutOfMemoryError):
        computed(case, SCORES["alibi"])
    for layer in range(2):
        check(other_numbers(case, layer), SCORES["alibi"])


def test_memory_that_is_used_anew(worked_out: list[int]) -> None:
    """Another forest where one lay that is gone is another; so is one that was written over."""
    other = forest([[*range(len(SMALL[0]))]])[0]
    memory = SMALL[0].numpy().copy()
    case = draw(*SMALL)
    with on_device():
        for content in (SMALL[0], other):
            memory[:] = content.numpy()
            ends = torch.frombuffer(memory, dtype=torch.int32)
            one = replace(case, wide=replace(case.wide, subtree_end=ends))
            check(replace(one, narrow=as_type(one.wide, torch.float32)), SCORES["plain"])
            check(replace(one, narrow=as_type(one.wide, torch.float32)), SCORES["plain"])
            del one, ends
        assert len(worked_out) == 4, "each forest once, forward and backward"
        ends = other.clone()
        one = replace(case, wide=replace(case.wide, subtree_end=ends))
        one.narrow = as_type(one.wide, torch.float32)
        check(one, SCORES["plain"])
        ends.copy_(SMALL[0])
        check(one, SCORES["plain"])
        ends.data.copy_(other)  # behind autograd's back
        with pytest.raises(RuntimeError, match="overwritten without a new version"):
            computed(one, SCORES["plain"])


@pytest.mark.parametrize("name", ["alibi", "gated by depth"])
def test_values_of_a_layer_are_never_kept(name: str) -> None:
    """Slopes and depths that a program rewrites in the same memory, undetected, as compiled code does."""
    gate = ("add", SCALED, ("mul", ("load", 3, ("head",)), ("float", ("lt", DEPTH_Q, const(3)))))
    score, case = {**SCORES, "gated by depth": Score(gate)}[name], draw(*SMALL)
    with on_device():
        for layer in range(3):
            check(case, score)
            for inputs in (case.wide, case.narrow):
                inputs.buffers[3].data.mul_(-1.5 - layer)
            case.narrow.buffers[0].data.add_(layer)  # the wide one's too
    assert case.wide.buffers[0] is case.narrow.buffers[0]
