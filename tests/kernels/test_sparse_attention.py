"""Attention to listed keys on the CPU: against its definition and tree attention, in float64; pairs that are read."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from treefx.errors import InputError, UnsupportedError
from treefx.kernels.ops import attend
from treefx.kernels.score import Score
from treefx.kernels.sparse import choose, chunks, reference
from treefx.kernels.sparse.ops import sparse_tree_attention
from treefx.kernels.sparse.problem import Listed

ENDS = torch.tensor([9, 9, 5, 5, 5, 9, 7, 9, 9], dtype=torch.int32)
"""A prompt of two tokens and two continuations, the second of which forks."""


def ancestors() -> Tensor:
    """Which tokens each query sees, [N, N]."""
    place = torch.arange(len(ENDS))
    return (place <= place[:, None]) & (place[:, None] < ENDS)


def drawn(listed: int = 3, kv_heads: int = 2, *, sinks: bool = False, width: int = 5) -> Listed:
    """As many ancestors of each query as a list holds, in any order; -1 where it has fewer."""
    torch.manual_seed(0)
    tokens = len(ENDS)
    scores = torch.rand(tokens, tokens).masked_fill(~ancestors(), -torch.inf)
    chosen = scores.topk(listed, -1)
    keys = chosen.indices.masked_fill(chosen.values.isneginf(), -1).int()
    q, k, v = (
        torch.randn(heads, tokens, size, dtype=torch.float64, requires_grad=True)
        for heads, size in ((4, width), (kv_heads, width), (kv_heads, 3))
    )
    logits = torch.randn(4, dtype=torch.float64, requires_grad=True) if sinks else None
    return Listed(q, k, v, keys, 0.7, logits)


def step(given: Listed, impl: str) -> list[Tensor]:
    leaves = [given.q, given.k, given.v, *([] if given.sinks is None else [given.sinks])]
    out, lse = sparse_tree_attention(given.q, given.k, given.v, given.keys, given.sinks, given.scale, impl)
    grad = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
    return [out.detach(), lse, *torch.autograd.grad(out, leaves, grad)]


def masked(given: Listed) -> list[Tensor]:
    """The same by tree attention under the mask of the lists."""
    leaves = [given.q, given.k, given.v, *([] if given.sinks is None else [given.sinks])]
    places = torch.where(given.keys < 0, len(ENDS), given.keys).long()
    mask = torch.zeros(len(ENDS), len(ENDS) + 1, dtype=torch.bool).scatter(1, places, True)[:, :-1].contiguous()
    score = Score(("mul", ("dot",), ("const", given.scale)), ("load", 0, ("q",), ("k",)))
    out = attend(given.q[None], given.k[None], given.v[None], ENDS, score, [mask], given.sinks)[0]
    grad = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def assert_equal(found: list[Tensor], expected: list[Tensor]) -> None:
    for got, wanted in zip(found, expected, strict=True):
        assert torch.allclose(got, wanted, rtol=0, atol=1e-13), float((got - wanted).abs().max())


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize(("listed", "kv_heads"), [(1, 1), (3, 2), (9, 4)])
@pytest.mark.parametrize("elements", [1, 60, 1 << 20])
def test_all_forms_are_one(
    listed: int, kv_heads: int, elements: int, sinks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lists of one key, of some, and longer than most paths; blocks of any size."""
    monkeypatch.setattr(chunks, "_BLOCK_ELEMENTS", elements)
    given = drawn(listed, kv_heads, sinks=sinks)
    expected, found = step(given, "reference"), step(given, "chunks")
    assert_equal(found, expected)
    assert_equal([expected[0], *expected[2:]], masked(given))
    assert_equal(step(given, "auto"), found)


def test_an_empty_list() -> None:
    """A query without a key gives 0 and no gradient, and is not read by others."""
    given = drawn()
    given = replace(given, keys=given.keys.index_fill(0, torch.tensor([4]), -1))
    for impl in ("reference", "chunks"):
        out, lse, dq, *others = step(given, impl)
        assert not out[:, 4].any() and lse[:, 4].isneginf().all() and not dq[:, 4].any()
        assert all(grad.isfinite().all() for grad in others)


def test_what_is_not_finite_stays_with_its_queries() -> None:
    given = drawn()
    v = given.v.detach().index_fill(1, torch.tensor([0]), torch.nan)
    out, _ = chunks.forward(replace(given, v=v))
    reads = (given.keys == 0).any(1)
    assert reads.any() and out[:, reads].isnan().all() and out[:, ~reads].isfinite().all()


@pytest.mark.parametrize("tokens", [64, 256])
def test_pairs_that_are_read(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """N * K keys and values in the forward, as many again in the backward; not the ancestors, (N + 1) / 2 a query."""
    read = []
    gathered = chunks._gathered

    def counted(x: Tensor, keys: Tensor) -> Tensor:
        found = gathered(x, keys)
        read.append(found.shape[1] * found.shape[2])
        return found

    monkeypatch.setattr(chunks, "_gathered", counted)
    q = torch.randn(2, tokens, 4)
    given = Listed(q, q, q, torch.randint(0, tokens, (tokens, 8)), 0.5)
    out, lse = chunks.forward(given)
    assert sum(read) == 2 * tokens * 8
    chunks.backward(out, given, out, lse)
    assert sum(read) == 4 * tokens * 8


def test_gathered_keys_are_bounded() -> None:
    """Whatever the number of tokens, a block holds so many elements."""
    q = torch.empty(2, 100_000, 64, device="meta")
    given = Listed(q, q, q, torch.empty(100_000, 2048, dtype=torch.int32, device="meta"), 1.0)
    sizes = {block.stop - block.start for block in chunks._blocks(given)}
    assert sizes == {chunks._BLOCK_ELEMENTS_OF_DEVICES // (2 * 2048 * 64)}


def test_gradients_of_many_queries_add_up_in_float32() -> None:
    """A key that 4096 queries list: in bfloat16 sums end at 256."""
    q = torch.zeros(1, 4096, 1, dtype=torch.bfloat16)
    v = torch.ones(1, 4096, 1, dtype=torch.bfloat16, requires_grad=True)
    out, _ = sparse_tree_attention(q, q, v, torch.zeros(4096, 1, dtype=torch.int32), None, 1.0)
    (grad,) = torch.autograd.grad(out.sum(), v)
    assert grad[0, 0].item() == 4096 and not grad[0, 1:].any()


def test_other_types_come_back() -> None:
    given = drawn()
    low: list[Any] = [x.detach().bfloat16() for x in (given.q, given.k, given.v)]
    with torch.autocast("cpu", torch.float16):
        out, lse = sparse_tree_attention(*low, given.keys, None, given.scale)
    right, _ = reference.forward(replace(given, q=low[0].double(), k=low[1].double(), v=low[2].double()))
    assert out.dtype == torch.bfloat16 and lse.dtype == torch.float32
    assert torch.allclose(out.double(), right, rtol=1e-2, atol=1e-2)


def test_no_token_and_no_listed_key() -> None:
    given = drawn()
    q, k, v = (x.detach().requires_grad_() for x in (given.q, given.k, given.v))
    out, _ = sparse_tree_attention(q[:, :0], k[:, :0], v[:, :0], given.keys[:0], None, 1.0)
    assert out.shape == (4, 0, 3)
    out, lse = sparse_tree_attention(q, k, v, given.keys[:, :0], None, 1.0)
    assert not out.any() and lse.isneginf().all()
    assert not any(grad.any() for grad in torch.autograd.grad(out.sum(), (q, k, v)))


def test_refusals() -> None:
    given = drawn()
    with pytest.raises(InputError, match="impl must be one of auto, reference, chunks, triton"):
        choose.choose_implementation("flash", given)
    with pytest.raises(UnsupportedError, match="impl='triton'"):
        choose.choose_implementation("triton", given)


def test_a_second_derivative_is_refused() -> None:
    given = drawn()
    out, _ = sparse_tree_attention(given.q, given.k, given.v, given.keys, None, given.scale)
    (grad,) = torch.autograd.grad(out.sum(), given.q, create_graph=True)
    with pytest.raises(RuntimeError):
        torch.autograd.grad(grad.sum(), given.k)


def test_cost_of_a_gathered_pair() -> None:
    """A gathered key serves all heads of its group."""
    for device in ("cpu", "cuda"):
        costs = [choose.dense_pairs(device, group) for group in (1, 4, 16)]
        assert costs == sorted(costs, reverse=True) and costs[-1] > 1
