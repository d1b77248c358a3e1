"""Small forests and chains in one call of torch's attention: when, and that it is the same attention."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from tests.kernels.forests import FORESTS, chain_forest
from treefx.kernels import tree_attention
from treefx.kernels.cpu import one_call
from treefx.kernels.cpu import rectangles as tiles
from treefx.kernels.ops import attend
from treefx.kernels.score import Score, make_score

EndsOf = Callable[[list[int]], Tensor]
CHAIN = chain_forest((-1, 300))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each call of torch's attention was causal."""
    seen: list[bool] = []
    original = one_call.scaled_dot_product_attention

    def counted(*args: Any, **kwargs: Any) -> Tensor:
        seen.append(kwargs["is_causal"])
        return original(*args, **kwargs)

    monkeypatch.setattr(one_call, "scaled_dot_product_attention", counted)
    return seen


def draw(tokens: int, dtype: torch.dtype, heads: tuple[int, int] = (4, 2), width: int = 16) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(2, tokens, h, width).to(dtype).transpose(1, 2).requires_grad_() for h in (*heads, heads[1])]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(
    ("forest", "causal"),
    [(FORESTS["comb"], False), (FORESTS["one"], True), (CHAIN, True)],
    ids=["comb", "one", "chain"],
)
def test_one_call_is_right(
    forest: list[int], causal: bool, dtype: torch.dtype, calls: list[bool], ends_of: EndsOf
) -> None:
    leaves, ends = draw(len(forest), dtype), ends_of(forest)
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    got = tree_attention(*leaves, ends, impl="cpu", scale=0.3)
    assert calls == [causal]
    assert got.dtype == dtype and got.transpose(1, 2).is_contiguous()
    wanted = tree_attention(*wide, ends, impl="reference", scale=0.3)
    grad = torch.randn_like(wanted).to(dtype)
    pairs = zip(
        [got, *torch.autograd.grad(got, leaves, grad)],
        [wanted, *torch.autograd.grad(wanted, wide, grad.double())],
        strict=True,
    )
    tolerance = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    for first, second in pairs:
        torch.testing.assert_close(first.double(), second, rtol=0, atol=tolerance * max(1.0, second.abs().max().item()))


def test_the_operator_runs_everything_else(calls: list[bool], ends_of: EndsOf) -> None:
    """Several tiles, other scores, other widths, autocast, float64 by itself, tensors that are watched."""
    ends = ends_of(FORESTS["comb"])
    q, k, v = (tensor.detach() for tensor in draw(len(ends), torch.float32))
    score = make_score(scale=0.3)
    attend(q, k, v[..., :8], ends, score)
    attend(q, k, v, ends, score, sinks=torch.zeros(4))
    attend(q, k, v, ends, score, impl="reference")
    attend(q.double(), k.double(), v.double(), ends, score)
    attend(q, k, v, ends, Score(("add", ("dot",), ("k",))))
    attend(q, k, v, ends, Score(("dot",), ("ne", ("k",), ("const", 3))))
    attend(q.transpose(2, 3).contiguous().transpose(2, 3), k, v, ends, score)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        attend(q, k, v, ends, score)
    with FlopCounterMode(display=False):
        attend(q, k, v, ends, score)
    several = ends_of(FORESTS["prefix"])
    attend(*(tensor.detach() for tensor in draw(len(several), torch.float32)), several, score)
    torch.compile(lambda q: attend(q, k, v, ends, score), backend="eager", fullgraph=True)(q)
    assert calls == []
    attend(q, k, v, ends, score)
    assert calls == [False]


def test_a_kept_mask_belongs_to_its_forest(ends_of: EndsOf, monkeypatch: pytest.MonkeyPatch) -> None:
    ends = ends_of(FORESTS["comb"])
    q, k, v = (tensor.detach() for tensor in draw(len(ends), torch.float32))
    before = tree_attention(q, k, v, ends)
    ends[1:50:2] = 50
    after = tree_attention(q, k, v, ends)
    assert (after - before).abs().max() > 0.01
    torch.testing.assert_close(after, tree_attention(q, k, v, ends, impl="reference"), rtol=1e-5, atol=1e-5)
    made: list[Any] = []
    monkeypatch.setattr(tiles, "_make_plain_tiles", lambda *args: made.append(args))
    tree_attention(q, k, v, ends.clone())
    assert not made
