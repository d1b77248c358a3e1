"""The CPU implementation against the reference, on random forests, shapes and scores."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from tests.kernels.forests import FORESTS, chain_forest, random_parents
from treefx.kernels import tree_attention
from treefx.kernels.cpu import rectangles as tiles
from treefx.kernels.ops import attend
from treefx.kernels.score import Score, make_score

EndsOf = Callable[[list[int]], Tensor]
FEATURES = ("window", "softcap", "alibi_slopes", "sinks")
COMBINATIONS = list(itertools.chain.from_iterable(itertools.combinations(FEATURES, n) for n in range(5)))


def draw_inputs(tokens: int, heads: tuple[int, int], widths: tuple[int, int], dtype: torch.dtype) -> list[Tensor]:
    sizes = [(heads[0], widths[0]), (heads[1], widths[0]), (heads[1], widths[1])]
    # Laid out as models do: heads inside tokens.
    return [torch.randn(1, tokens, h, d, dtype=dtype).transpose(1, 2).requires_grad_() for h, d in sizes]


def draw_options(names: tuple[str, ...], heads: int, dtype: torch.dtype) -> dict[str, Any]:
    values: dict[str, Any] = {"window": 7, "softcap": 2.0}
    values["alibi_slopes"] = torch.rand(heads, dtype=dtype)
    values["sinks"] = torch.randn(heads, dtype=dtype, requires_grad=True)
    return {name: values[name] for name in names}


def assert_same(run: Callable[[str], Tensor], leaves: list[Tensor], tolerance: float) -> None:
    """Compare output and gradients of impl="cpu" with the reference, relative to the largest of each."""
    expected, actual = run("reference"), run("cpu")
    grad = torch.randn_like(expected)
    wanted = [expected, *torch.autograd.grad(expected, leaves, grad)]
    got = [actual, *torch.autograd.grad(actual, leaves, grad)]
    scale = max(1.0, *[tensor.abs().max().item() for tensor in wanted if tensor.numel()], 1.0)
    for first, second in zip(got, wanted, strict=True):
        assert first.shape == second.shape and first.dtype == second.dtype
        torch.testing.assert_close(first, second, rtol=tolerance, atol=tolerance * scale)


@pytest.mark.parametrize("names", COMBINATIONS, ids=["+".join(names) or "plain" for names in COMBINATIONS])
@pytest.mark.parametrize("forest", FORESTS.values(), ids=FORESTS.keys())
@pytest.mark.usefixtures("poisoned_memory")
def test_cpu_matches_reference(forest: list[int], names: tuple[str, ...], ends_of: EndsOf) -> None:
    torch.manual_seed(0)
    heads, widths = [((4, 4), (16, 16)), ((4, 1), (16, 8)), ((7, 1), (8, 16))][len(names) % 3]
    q, k, v = draw_inputs(len(forest), heads, widths, torch.float32)
    chosen = draw_options(names, heads[0], torch.float32)
    leaves = [q, k, v, *([chosen["sinks"]] if "sinks" in chosen else [])]
    ends = ends_of(forest)
    assert_same(lambda impl: tree_attention(q, k, v, ends, impl=impl, **chosen), leaves, 1e-5)


@given(random_parents(), st.sampled_from(COMBINATIONS), st.sampled_from([4, 60, 1000]))
@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
def test_cpu_matches_reference_in_float64(ends_of: EndsOf, parents: list[int], names: Any, rows: int) -> None:
    q, k, v = draw_inputs(len(parents), (4, 2), (8, 8), torch.float64)
    chosen = draw_options(names, 4, torch.float64)
    leaves = [q, k, v, *([chosen["sinks"]] if "sinks" in chosen else [])]
    ends = ends_of(parents)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiles, "MIN_ROWS", rows)
        patch.setattr(tiles, "MIN_COLUMN_KEYS", 8)
        patch.setattr(tiles, "UNSPLIT_KEYS", 8)
        assert_same(lambda impl: tree_attention(q, k, v, ends, impl=impl, **chosen), leaves, 1e-10)


@pytest.mark.parametrize("forest", [FORESTS["prefix"], FORESTS["comb"]], ids=["prefix", "comb"])
def test_key_mask_bias_and_buffer_gradients(forest: list[int], ends_of: EndsOf) -> None:
    torch.manual_seed(0)
    q, k, v = draw_inputs(len(forest), (4, 2), (8, 8), torch.float32)
    real = torch.rand(len(forest)) < 0.7
    real[:5] = False  # the first queries see nothing at all
    table = torch.randn(4, 512, requires_grad=True)
    distance = ("sub", ("q",), ("k",))
    value = ("add", ("mul", ("dot",), ("const", 0.3)), ("load", 1, ("head",), distance))
    score = Score(value, ("load", 0, ("k",)))
    ends = ends_of(forest)

    def run(impl: str) -> Tensor:
        return attend(q, k, v, ends, score, [real, table], impl=impl)

    assert_same(run, [q, k, v, table], 1e-5)
    table.requires_grad_(False)
    assert_same(run, [q, k, v], 1e-5)
    assert (run("cpu")[:, :, :5] == 0).all()


def test_several_batches_share_the_forest(ends_of: EndsOf) -> None:
    forest = FORESTS["prefix"]
    q, k, v = (torch.randn(3, 2, len(forest), 8, requires_grad=True) for _ in range(3))
    real = torch.rand(3, len(forest)) < 0.8
    score = Score(("mul", ("dot",), ("const", 0.5)), ("load", 0, ("batch",), ("k",)))
    ends = ends_of(forest)
    assert_same(lambda impl: attend(q, k, v, ends, score, [real], impl=impl), [q, k, v], 1e-5)
    assert_same(lambda impl: tree_attention(q, k, v, ends, impl=impl), [q, k, v], 1e-5)


def test_masked_logits_count_as_a_bias(ends_of: EndsOf) -> None:
    forest = FORESTS["two_trees"]
    q, k, v = draw_inputs(len(forest), (2, 2), (8, 8), torch.float32)
    keep = ("or", ("eq", ("q",), ("k",)), ("load", 0, ("k",)))
    lowest = torch.finfo(torch.float32).min
    score = Score(("where", keep, ("mul", ("dot",), ("const", 0.5)), ("const", lowest)))
    real, ends = torch.rand(len(forest)) < 0.6, ends_of(forest)
    assert_same(lambda impl: attend(q, k, v, ends, score, [real], impl=impl), [q, k, v], 1e-5)


def test_overwritten_forest_is_not_taken_from_the_cache(ends_of: EndsOf) -> None:
    ends = ends_of(FORESTS["prefix"])
    q, k, v = draw_inputs(len(ends), (2, 2), (8, 8), torch.float32)
    before = tree_attention(q, k, v, ends)
    ends.fill_(len(ends))
    after = tree_attention(q, k, v, ends)
    assert (after - before).abs().max() > 0.01
    torch.testing.assert_close(after, tree_attention(q, k, v, ends, impl="reference"), rtol=1e-5, atol=1e-5)


def test_expanded_gradient_and_strided_inputs(ends_of: EndsOf) -> None:
    ends = ends_of(FORESTS["prefix"])
    q = torch.randn(1, len(ends), 8, 4).permute(0, 3, 1, 2).requires_grad_()
    results = [
        torch.autograd.grad(tree_attention(q, q, q, ends, impl=impl).sum(), q)[0] for impl in ("cpu", "reference")
    ]
    torch.testing.assert_close(results[0], results[1], rtol=1e-5, atol=1e-5)


def separate_rows(q: Tensor, k: Tensor, v: Tensor, grad: Tensor, prefix: int, leaf: int) -> list[Tensor]:
    """Run SDPA on each row (prefix + leaf) alone; the prefix's loss terms stand in the first row only."""
    tokens, results = q.shape[2], [torch.zeros_like(q, dtype=torch.float32) for _ in range(4)]
    for start in range(prefix, tokens, leaf):
        index = torch.cat([torch.arange(prefix), torch.arange(start, start + leaf)])
        rows = [tensor.detach()[:, :, index].requires_grad_() for tensor in (q, k, v)]
        out = scaled_dot_product_attention(*rows, is_causal=True)
        row_grad = grad[:, :, index].clone()
        row_grad[:, :, :prefix] *= start == prefix
        results[0][:, :, index] = out.detach().float()
        for total, part in zip(results[1:], torch.autograd.grad(out, rows, row_grad), strict=True):
            total[:, :, index] += part.float()
    return results


@pytest.mark.parametrize("leaf", [16, 200])
def test_bfloat16_error_is_that_of_separate_rows(leaf: int, ends_of: EndsOf) -> None:
    torch.manual_seed(0)
    prefix = 150
    ends = ends_of(chain_forest((-1, prefix), *[(0, leaf)] * 4))
    q, k, v, grad = torch.randn(4, 1, 4, len(ends), 32).to(torch.bfloat16)
    exact = [tensor.double().requires_grad_() for tensor in (q, k, v)]
    out = tree_attention(*exact, ends)
    truth = [out, *torch.autograd.grad(out, exact, grad.double())]
    inputs = [tensor.clone().requires_grad_() for tensor in (q, k, v)]
    tree_out = tree_attention(*inputs, ends)
    tree = [tree_out, *torch.autograd.grad(tree_out, inputs, grad)]
    rows = separate_rows(q, k, v, grad, prefix, leaf)
    for name, got, baseline, want in zip(("out", "dq", "dk", "dv"), tree, rows, truth, strict=True):
        error, allowed = (got.double() - want).norm(), (baseline.double() - want).norm()
        assert error <= 1.5 * allowed, f"{name}: {error:.3e} against {allowed:.3e}"


def test_bfloat16_slopes_lose_no_digits(ends_of: EndsOf) -> None:
    """In bfloat16 a slope of 0.7 times a distance of 300 is off by half a unit, and with it the logit."""
    torch.manual_seed(0)
    ends = ends_of(chain_forest((-1, 300), (0, 40), (0, 50)))
    q, k, v = (tensor.detach() for tensor in draw_inputs(len(ends), (2, 2), (8, 8), torch.bfloat16))
    slopes, depth = torch.tensor([-0.7, -0.3]).to(torch.bfloat16), torch.arange(len(ends))  # far keys weigh most
    depth[340:] -= 40
    exact = tree_attention(q.double(), k.double(), v.double(), ends, depth, alibi_slopes=slopes.double())
    for impl in ("cpu", "reference"):
        out = tree_attention(q, k, v, ends, depth, alibi_slopes=slopes, impl=impl)
        assert (out.double() - exact).abs().max() < 0.02 * exact.abs().max()


def test_float16_runs(ends_of: EndsOf) -> None:
    ends = ends_of(FORESTS["prefix"])
    q, k, v = draw_inputs(len(ends), (2, 2), (8, 8), torch.float16)
    assert_same(lambda impl: tree_attention(q, k, v, ends, impl=impl), [q, k, v], 5e-3)


def test_many_leaves_take_little_memory(ends_of: EndsOf, monkeypatch: pytest.MonkeyPatch) -> None:
    ends = ends_of(chain_forest((-1, 200), *[(0, 1)] * 10_000))
    q, k, v = draw_inputs(len(ends), (1, 1), (8, 8), torch.float32)
    largest = 0
    original = torch.where

    def watched(*args: Any, **kwargs: Any) -> Tensor:
        nonlocal largest
        result = original(*args, **kwargs)
        largest = max(largest, result.numel())
        return result

    monkeypatch.setattr(torch, "where", watched)
    out = tree_attention(q, k, v, ends)
    torch.autograd.grad(out.sum(), (q, k, v))
    assert 0 < largest < len(ends) ** 2 / 100
    score = make_score(scale=8**-0.5)
    torch.testing.assert_close(
        out[:, :, -1:],
        attend(*(x[:, :, [*range(200), -1]] for x in (q, k, v)), torch.full((201,), 201), score)[:, :, -1:],
        rtol=1e-5,
        atol=1e-5,
    )
