"""The operator as a torch citizen: opcheck, fake tensors, symbolic sizes, checkpointing, autocast."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from treefx.errors import UnsupportedError
from treefx.kernels import reference, tree_attention
from treefx.kernels.common import Inputs
from treefx.kernels.ops import attend
from treefx.kernels.score import Score, make_score

SCORE = Score(("add", ("mul", ("dot",), ("const", 0.3)), ("load", 0, ("head",), ("sub", ("q",), ("k",)))))


def draw(tokens: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    sizes = [(4, 8), (2, 8), (2, 5)]
    return [torch.randn(1, h, tokens, d, dtype=dtype, requires_grad=True) for h, d in sizes]


def comb(tokens: int) -> Tensor:
    """Return ``subtree_end`` of a trunk on the even tokens with a leaf on every odd one."""
    index = torch.arange(tokens, dtype=torch.int32)
    return torch.where(index % 2 == 1, index + 1, tokens)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("sinks", [False, True])
def test_opcheck(dtype: torch.dtype, sinks: bool) -> None:
    q, k, v = draw(7, dtype)
    sink = torch.randn(4, dtype=dtype, requires_grad=True) if sinks else None
    table = torch.randn(4, 10, dtype=dtype, requires_grad=dtype != torch.bfloat16)
    arguments = (q, k, v, comb(7), [table], sink, SCORE.to_json(), "auto")
    torch.library.opcheck(torch.ops.treefx.tree_attention, arguments, {"deterministic": True} if sinks else {})


@pytest.mark.parametrize("impl", ["cpu", "reference"])
def test_opcheck_backward(impl: str) -> None:
    q, k, v = (tensor.detach() for tensor in draw(7))
    table, sink = torch.randn(4, 10), torch.randn(4)
    text = SCORE.to_json()
    out, lse = torch.ops.treefx.tree_attention(q, k, v, comb(7), [table], sink, text, impl)
    arguments = (torch.randn_like(out), q, k, v, comb(7), [table], sink, out, lse, text, impl, [True])
    torch.library.opcheck(
        torch.ops.treefx.tree_attention_backward, arguments, test_utils=("test_schema", "test_faketensor")
    )


def test_fake_output_has_the_real_layout() -> None:
    real = torch.ops.treefx.tree_attention(*draw(9), comb(9), [], None, make_score(scale=1.0).to_json(), "auto")
    with FakeTensorMode() as mode:
        inputs = [mode.from_tensor(tensor) for tensor in (*draw(9), comb(9))]
        fake = torch.ops.treefx.tree_attention(*inputs, [], None, make_score(scale=1.0).to_json(), "auto")
    for first, second in zip(real, fake, strict=True):
        assert first.shape == second.shape and first.stride() == second.stride() and first.dtype == second.dtype
    assert real[0].transpose(1, 2).is_contiguous()


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_one_compile_serves_every_number_of_tokens(backend: str) -> None:
    def model(q: Tensor, k: Tensor, v: Tensor, ends: Tensor, table: Tensor, sinks: Tensor) -> Tensor:
        out = attend(q * 2, k, v, ends, SCORE, [table], sinks)
        return out.transpose(1, 2).reshape(1, -1, 20) * 3

    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(model, backend=counter, dynamic=True, fullgraph=True)
    sinks = torch.randn(4, requires_grad=True)
    table = torch.randn(4, 40, requires_grad=True)
    for tokens in (7, 9, 20, 33):
        leaves = [*draw(tokens), table, sinks]
        arguments = (*leaves[:3], comb(tokens), table, sinks)
        expected, actual = model(*arguments), compiled(*arguments)
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)
        expected_grads = torch.autograd.grad(expected.sum(), leaves)
        for got, want in zip(torch.autograd.grad(actual.sum(), leaves), expected_grads, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    assert counter.frame_count == 1


def test_public_function_compiles_whole() -> None:
    slopes = torch.rand(4)

    def model(q: Tensor, k: Tensor, v: Tensor, ends: Tensor) -> Tensor:
        return tree_attention(q, k, v, ends, window=3, softcap=20.0, alibi_slopes=slopes, scale=0.25)

    torch._dynamo.reset()
    arguments = (*draw(12), comb(12))
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(*arguments), model(*arguments))


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("deterministic", [False, True])
def test_the_backward_knows_whether_bits_matter(
    compiled: bool, deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []
    backward = reference.backward

    def watched(grad_out: Tensor, inputs: Inputs, *others: Any) -> Any:
        asked.append(inputs.deterministic)
        return backward(grad_out, inputs, *others)

    monkeypatch.setattr(reference, "backward", watched)

    def model(q: Tensor, k: Tensor, v: Tensor, ends: Tensor) -> Tensor:
        return tree_attention(q, k, v, ends, impl="reference", deterministic=deterministic)

    leaves = draw(9)
    run = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
    torch.autograd.grad(run(*leaves, comb(9)).sum(), leaves)
    assert asked == [deterministic]


def test_checkpoint_gives_the_same_gradients() -> None:
    leaves = draw(12)
    grads = []
    for again in (False, True):
        run: Any = lambda *x: tree_attention(*x, comb(12), window=4)  # noqa: E731
        out = checkpoint(run, *leaves, use_reentrant=False) if again else run(*leaves)
        grads.append(torch.autograd.grad(out.square().sum(), leaves))
    for first, second in zip(*grads, strict=True):
        torch.testing.assert_close(first, second)


def test_autocast_does_not_reach_inside() -> None:
    q, k, v = draw(12)
    plain = tree_attention(q, k, v, comb(12), softcap=3.0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = tree_attention(q, k, v, comb(12), softcap=3.0)
    torch.testing.assert_close(cast, plain)


def test_no_grad_and_partial_gradients() -> None:
    q, k, v = draw(12)
    with torch.no_grad():
        assert not tree_attention(q, k, v, comb(12)).requires_grad
    out = tree_attention(q.detach(), k, v.detach(), comb(12))
    (only,) = torch.autograd.grad(out.square().sum(), k)
    full = torch.autograd.grad(tree_attention(q, k, v, comb(12)).square().sum(), [q, k, v])[1]
    torch.testing.assert_close(only, full)


def test_second_derivatives_are_refused_by_name() -> None:
    q, k, v = draw(12)
    (first,) = torch.autograd.grad(tree_attention(q, k, v, comb(12)).square().sum(), q, create_graph=True)
    with pytest.raises(UnsupportedError, match="differentiated once, got a second derivative"):
        first.sum().backward()


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_forward_matches_reference() -> None:
    q, k, v = (tensor.detach() for tensor in draw(300))
    chosen = {"window": 40, "softcap": 2.0, "alibi_slopes": torch.rand(4), "sinks": torch.randn(4)}
    for options in ({}, chosen):
        flex = tree_attention(q, k, v, comb(300), impl="flex", **options)
        reference = tree_attention(q, k, v, comb(300), impl="reference", **options)
        torch.testing.assert_close(flex, reference, rtol=1e-5, atol=1e-5)


def test_flex_block_lists_hold_exactly_the_visible_blocks() -> None:
    from treefx.kernels.gpu import flex

    ends = torch.cat([comb(301), torch.full((400,), 701, dtype=torch.int32)])
    index = torch.arange(701)
    dense = (index[None] <= index[:, None]) & (index[:, None] < ends[None])
    inputs = Inputs(*torch.empty(3, 1, 1, 701, 1), ends)
    mask = flex.block_mask(inputs, lambda b, h, q, k: (k <= q) & (q < ends[k]), exact=True)
    blocks = torch.nn.functional.pad(dense, (0, 67, 0, 67)).view(6, 128, 6, 128).transpose(1, 2)
    whole = blocks.flatten(2).all(dim=2)
    assert torch.equal(mask.to_dense()[0, 0].bool(), blocks.flatten(2).any(dim=2))
    assert torch.equal(mask.full_kv_num_blocks[0, 0], whole.sum(dim=1, dtype=torch.int32))


def test_triton_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedError, match="impl='triton'.*CUDA device, got the CPU: use impl='auto'"):
        tree_attention(*draw(3), comb(3), impl="triton")
