"""The generated kernels on a GPU, where there is one: both forms against float64, as right as SDPA on separate rows."""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

from treefx.kernels import reference, tree_attention
from treefx.kernels.common import Boundary, Inputs, relative_error
from treefx.kernels.ops import attend
from treefx.kernels.score import make_score
from treefx.tools.bench.attention.sample import Sample
from treefx.tools.bench.attention.trees import Tree, repeated_nodes, thought_nodes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

TREES = {
    "prefix": Tree("prefix", repeated_nodes(1, 1500, 5, 211)),
    "branch at 57": Tree("branch at 57", ((-1, 57), (0, 300), (0, 41), (2, 7), (2, 600))),
    "thought": Tree("thought", thought_nodes(depth=3)),
    "leaves": Tree("leaves", ((-1, 3), *((0, 1),) * 2000)),
    "long prefix": Tree("long prefix", ((-1, 20_000), (0, 9), (0, 70))),
}
SHAPES = {
    "128": (16, 4, 128, 128),
    "64": (8, 8, 64, 64),
    "group 7": (14, 2, 128, 128),
    "256": (8, 2, 256, 256),
    "80": (4, 2, 80, 80),
}
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
CASES = [
    *((name, "128", BF16) for name in TREES),
    *(("thought", name, BF16) for name in SHAPES if name != "128"),
    ("thought", "64", FP16),
]
FEATURES = [
    *((names, BF16) for names in (("window",), ("softcap",), ("alibi",), ("sinks",))),
    *((("window", "softcap", "sinks"), dtype) for dtype in (BF16, FP32)),
]


def paths() -> list[str]:
    hopper = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
    return ["plain", "gluon", "gluon_once"] if hopper else ["plain"]


def take(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let attention take a path; one pass in Gluon for short rows too."""
    monkeypatch.setenv("TREEFX_KERNEL_PATH", path)
    monkeypatch.setattr("treefx.kernels.gpu.triton_tree.paths.GLUON_ONE_PASS_KEYS", 0)


def heads(count: int, tokens: int, width: int, dtype: torch.dtype, seed: int) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    values = torch.randn(1, tokens, count, width, generator=generator, device="cuda")
    return values.to(dtype).transpose(1, 2).requires_grad_()


def draw(tree: Tree, shape: tuple[int, int, int, int], dtype: torch.dtype) -> tuple[Tensor, list[Tensor], Tensor]:
    ends = tree.subtree_end().cuda()
    q_heads, kv_heads, width, value_width = shape
    sizes = ((q_heads, width), (kv_heads, width), (kv_heads, value_width), (q_heads, value_width))
    q, k, v, grad = (heads(count, len(ends), size, dtype, seed) for seed, (count, size) in enumerate(sizes))
    return ends, [q, k, v], grad.detach()


@pytest.mark.parametrize("path", paths())
@pytest.mark.parametrize(("tree", "shape", "dtype"), CASES)
def test_no_further_off_than_separate_rows(
    tree: str, shape: str, dtype: torch.dtype, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if path != "plain" and shape == "256":
        pytest.skip("heads are too wide for the form in Gluon")
    take(path, monkeypatch)
    ends, leaves, grad = draw(TREES[tree], SHAPES[shape], dtype)
    sample = Sample(ends, [row.cuda() for row in TREES[tree].rows()], leaves, grad)
    attend = lambda q, k, v: tree_attention(q, k, v, ends, impl="triton")  # noqa: E731
    assert sample.judge("tree", attend, sample.errors_of_rows(), 1.5, {}) == []


@pytest.mark.parametrize("path", paths())
@pytest.mark.parametrize(("features", "dtype"), FEATURES)
def test_features(features: tuple[str, ...], path: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    if path != "plain" and dtype == FP32:
        pytest.skip("the form in Gluon has 16-bit types")
    take(path, monkeypatch)
    ends, leaves, grad = draw(TREES["thought"], SHAPES["128"], dtype)
    options: dict[str, Any] = {
        "window": 50,
        "softcap": 5.0,
        "alibi_slopes": torch.rand(16, device="cuda", requires_grad=True),
        "sinks": torch.randn(16, device="cuda", requires_grad=True),
    }
    chosen = {name: value for name, value in options.items() if name.removesuffix("_slopes") in features}
    wanted = [*leaves, *(value for value in chosen.values() if isinstance(value, Tensor))]
    results = []
    for impl in ("triton", "reference"):
        out = tree_attention(*leaves, ends, impl=impl, **chosen)
        results.append([out, *torch.autograd.grad(out, wanted, grad)])
    bound = 2e-2 if dtype == BF16 else 1e-4
    assert all(relative_error(*pair) < bound for pair in zip(*results, strict=True))


@pytest.mark.parametrize("path", paths())
@pytest.mark.parametrize("window", [None, 900])
@pytest.mark.parametrize("shape", ["128", "64", "group 7"])
def test_keys_from_outside(shape: str, window: int | None, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys of tokens above, some unseen: one launch goes on from another."""
    take(path, monkeypatch)
    ends, leaves, grad = draw(TREES["thought"], SHAPES[shape], BF16)
    tokens, outside, (_, kv_heads, width, _) = len(ends), 700, SHAPES[shape]
    lo, length = (torch.randint(0, tokens, (2, outside), generator=torch.Generator().manual_seed(9))).int().cuda()
    hi = (lo + length).clamp(max=tokens)
    hi[::7] = lo[::7] - 2
    above = [heads(kv_heads, outside, width, BF16, seed) for seed in (5, 6)]
    score = make_score(scale=width**-0.5, **({} if window is None else {"window": window, "depth": 0}))
    depth = torch.cat([torch.arange(outside), outside + torch.arange(tokens)]).cuda()
    results = []
    for impl in ("triton", "reference"):
        out = attend(*leaves, ends, score, [depth], impl=impl, boundary=Boundary(*above, lo, hi))
        results.append([out, *torch.autograd.grad(out, [*leaves, *above], grad)])
    assert all(relative_error(*pair) < 2e-2 for pair in zip(*results, strict=True))


@pytest.mark.parametrize("path", paths())
@pytest.mark.parametrize("shape", ["128", "64", "group 7"])
def test_layers_after_the_first(shape: str, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the first layer has launched is launched again: with the numbers of a layer's own, however they lie."""
    take(path, monkeypatch)
    ends, first, grad = draw(TREES["thought"], SHAPES[shape], BF16)
    for leaves in (first, *[[x.detach().roll(layer, 2).requires_grad_() for x in first] for layer in range(1, 4)]):
        results = []
        for impl in ("triton", "reference"):
            out = tree_attention(*leaves, ends, impl=impl)
            results.append([out, *torch.autograd.grad(out, leaves, grad)])
        assert all(relative_error(*pair) < 2e-2 for pair in zip(*results, strict=True))


@pytest.mark.parametrize("deterministic", [False, True])
def test_auto_takes_the_kernels_and_waits_for_nothing(deterministic: bool) -> None:
    """The second layer on a forest finds everything there: nothing in it waits for the device."""
    ends, leaves, grad = draw(TREES["prefix"], SHAPES["128"], BF16)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        first = torch.autograd.grad(tree_attention(*leaves, ends, deterministic=deterministic), leaves, grad)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        second = torch.autograd.grad(tree_attention(*leaves, ends, deterministic=deterministic), leaves, grad)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    # Where bits matter they are the same on every run; the first one is the plain form or has been compared with it.
    third = torch.autograd.grad(tree_attention(*leaves, ends, deterministic=deterministic), leaves, grad)
    if deterministic:
        assert all(torch.equal(*pair) for pair in zip(second, third, strict=True))
    assert all(relative_error(*pair) < 2e-2 for pair in zip(first, second, strict=True))


def test_an_overwritten_forest_is_seen() -> None:
    ends, leaves, grad = draw(TREES["thought"], SHAPES["128"], BF16)
    tree_attention(*leaves, ends)
    ends.copy_(torch.arange(1, len(ends) + 1, dtype=torch.int32))  # every token alone
    out = tree_attention(*leaves, ends)
    q, k, v = (tensor.detach() for tensor in leaves)
    right, _ = reference.forward(Inputs(q, k, v, ends), make_score(scale=128**-0.5))
    assert relative_error(out.detach(), right) < 2e-2
