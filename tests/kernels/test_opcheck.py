"""``torch.library.opcheck`` on the operators of kernels: what their fakes promise is what every implementation returns.

Compiled code takes the memory of an operator's result as its fake implementation says, so a result in another layout is
a crash under inductor, or worse. Cases are drawn by a fixed seed; ``TREEFX_OPCHECK_DRAWS`` sets their number.
"""

import os
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import treefx.kernels.recurrence.part_scan  # noqa: F401 - defines its operators
from treefx.kernels import ops, tree_attention
from treefx.kernels.score import Score

DRAWS = int(os.environ.get("TREEFX_OPCHECK_DRAWS", "10"))
_ops: Any = torch.ops.treefx


def fused(x: Tensor) -> Tensor:
    """One of three that lie side by side in the result of one projection."""
    batch, heads, tokens, width = x.shape
    wide = torch.randn(batch, tokens, 3 * heads * width).to(x.dtype)
    return wide[..., heads * width : 2 * heads * width].view(batch, tokens, heads, width).transpose(1, 2).copy_(x)


def unaligned(x: Tensor) -> Tensor:
    """Not at the beginning of its memory."""
    return torch.randn(x.numel() + 1).to(x.dtype)[1:].view(x.shape).copy_(x)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "heads outside": torch.clone,
    "heads inside": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "fused": fused,
    "expanded heads": lambda x: x[:, :1].expand_as(x),
    "one row for all": lambda x: x[:1].expand_as(x),
    "features outside": lambda x: x.transpose(2, 3).contiguous().transpose(2, 3),
    "every second feature": lambda x: torch.stack([x, x], dim=-1)[..., 0],
    "unaligned": unaligned,
}
FORESTS: dict[str, Callable[[int], list[int]]] = {
    "chain": lambda n: [n] * n,
    "comb": lambda n: [token + 1 if token % 2 else n for token in range(n)],
    "branch": lambda n: [(n + n // 3) // 2 if n // 3 <= token < (n + n // 3) // 2 else n for token in range(n)],
}


def draw_score(draw: random.Random, heads: int, tokens: int, dtype: torch.dtype) -> tuple[Score, list[Tensor]]:
    """Any of softcap, ALiBi, a table of biases (transposed in memory) and a window."""
    value: Any = ("mul", ("dot",), ("const", 0.3))
    distance, buffers = ("sub", ("q",), ("k",)), list[Tensor]()
    if draw.random() < 0.25:
        value = ("mul", ("const", 2.0), ("tanh", ("div", value, ("const", 2.0))))
    if draw.random() < 0.25:
        value = ("sub", value, ("mul", ("load", len(buffers), ("head",)), ("float", distance)))
        buffers.append(torch.rand(heads).to(dtype))
    if draw.random() < 0.25:
        value = ("add", value, ("load", len(buffers), ("head",), distance))
        buffers.append(torch.randn(tokens, heads).to(dtype).t())
    visible = ("lt", distance, ("const", max(2, tokens // 3))) if draw.random() < 0.25 else None
    return Score(value, visible), buffers


def draw_call(draw: random.Random, longest: int = 300) -> tuple[Any, ...]:
    """Arguments of the forward that need no gradient."""
    tokens = draw.choice([n for n in (1, 2, 5, 98, 300, 1500) if n <= longest])
    batch, kv_heads, group = draw.choice([1, 1, 2]), draw.choice([1, 2]), draw.choice([1, 2])
    width, dtype = draw.choice([3, 8, 16]), draw.choice([torch.float32, torch.float32, torch.float64, torch.bfloat16])
    value_width, outside = draw.choice([width, width, 5, 12]), draw.choice([0, 0, 0, 1, 7, 130])

    def values(heads: int, count: int, features: int) -> Tensor:
        return LAYOUTS[draw.choice(list(LAYOUTS))](torch.randn(batch, heads, count, features).to(dtype))

    q, k = values(kv_heads * group, tokens, width), values(kv_heads, tokens, width)
    v = values(kv_heads, tokens, value_width)
    ends = torch.tensor(FORESTS[draw.choice(list(FORESTS))](tokens), dtype=torch.int32)
    score, buffers = draw_score(draw, kv_heads * group, tokens + outside, dtype)
    sinks = torch.randn(kv_heads * group).to(dtype) if draw.random() < 0.25 else None
    impl = draw.choice(["auto", "cpu", "reference"])
    call = (q, k, v, ends, buffers, sinks, score.to_json(), impl)
    if not outside:
        return call
    lo = torch.randint(0, tokens, (outside,), dtype=torch.int32).sort().values * draw.choice([0, 1])
    hi = torch.full((outside,), tokens, dtype=torch.int32)
    return *call, values(kv_heads, outside, width), values(kv_heads, outside, value_width), lo, hi


def with_gradients(draw: random.Random, call: tuple[Any, ...]) -> tuple[Any, ...]:
    """The same arguments, some of which require gradients."""

    def some(x: Any) -> Any:
        if isinstance(x, list):
            return [some(item) for item in x]
        floating = isinstance(x, Tensor) and x.is_floating_point()
        return x.detach().requires_grad_(draw.random() < 0.6) if floating else x

    return tuple(some(x) for x in call)


def draw_gradient(draw: random.Random, out: Tensor) -> Tensor:
    """As sum().backward() gives it, or as what follows lays it out."""
    if draw.random() < 0.3:
        return torch.ones((), dtype=out.dtype).expand(out.shape)
    return LAYOUTS[draw.choice(list(LAYOUTS))](torch.randn(out.shape).to(out.dtype))


@pytest.mark.parametrize("seed", range(DRAWS))
def test_attention(seed: int) -> None:
    draw = random.Random(seed)
    torch.manual_seed(seed)
    call = draw_call(draw)
    torch.library.opcheck(_ops.tree_attention.default, with_gradients(draw, call))
    out, lse = _ops.tree_attention(*call)
    q, k, v, ends, buffers, sinks, score, impl, *outside = call
    marked = [draw.random() < 0.5 for _ in buffers]
    grad = draw_gradient(draw, out)
    torch.library.opcheck(
        _ops.tree_attention_backward.default,
        (grad, q, k, v, ends, buffers, sinks, out, lse, score, impl, marked, *outside),
    )


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("tokens", [98, 1500])
def test_every_layout_of_queries_gives_one_layout(tokens: int, layout: str) -> None:
    """One tile holds the smaller forest and its result is the operator's: it lay as its queries did."""
    q = LAYOUTS[layout](torch.randn(2, 4, tokens, 16))
    ends = torch.full((tokens,), tokens, dtype=torch.int32)
    score = Score(("mul", ("dot",), ("const", 0.25))).to_json()
    out, lse = _ops.tree_attention(q, q, q, ends, [], None, score, "auto")
    strides = (tokens * 64, 16, 64, 1)
    assert out.stride() == strides and lse.is_contiguous()
    assert tree_attention(q, q, q, ends).stride() == strides
    grads = _ops.tree_attention_backward(q, q, q, q, ends, [], None, out, lse, score, "auto", [])[:3]
    assert {grad.stride() for grad in grads} == {strides}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_result_that_lies_right_is_not_copied(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward of a model's usual layout, over one tile and over several."""
    kept: list[bool] = []

    def watch(settle: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        def watched(tensor: Tensor) -> Tensor:
            result = settle(tensor)
            kept.append(result.data_ptr() == tensor.data_ptr())
            return result

        return watched

    monkeypatch.setattr(ops, "heads_inside", watch(ops.heads_inside))
    score = Score(("mul", ("dot",), ("const", 0.25))).to_json()
    for tokens in (98, 700):
        q = LAYOUTS["heads inside"](torch.randn(2, 4, tokens, 16).to(dtype))
        ends = torch.tensor(FORESTS["branch"](tokens), dtype=torch.int32)
        out, lse = _ops.tree_attention(q, q, q, ends, [], None, score, "cpu")
        _ops.tree_attention_backward(out, q, q, q, ends, [], None, out, lse, score, "cpu", [])
    assert len(kept) == 8 and all(kept)


def test_gradients_of_a_boundary_share_no_memory() -> None:
    """Of one row, own and outside keys are neighbours: their gradients were two windows on one result."""
    q, bk = torch.randn(1, 2, 5, 3), torch.randn(1, 2, 7, 3)
    ends, score = torch.full((5,), 5, dtype=torch.int32), Score(("mul", ("const", 2.0), ("tanh", ("dot",))))
    lo, hi = torch.zeros(7, dtype=torch.int32), torch.full((7,), 5, dtype=torch.int32)
    call = (q, q, q, ends, [], None)
    out, lse = _ops.tree_attention(*call, score.to_json(), "cpu", bk, bk, lo, hi)
    dq, dk, dv, rest = _ops.tree_attention_backward(
        out, *call, out, lse, score.to_json(), "cpu", [], bk, bk, lo, hi
    )  # fmt: skip
    grads = [dq, dk, dv, *rest]
    assert len({grad.untyped_storage().data_ptr() for grad in grads}) == 5
    assert all(grad.storage_offset() == 0 for grad in grads)


@pytest.mark.parametrize("kind", ["ssd", "linear", "delta", "gated delta", "kimi delta"])
@pytest.mark.parametrize("tokens", [1, 5, 98])
def test_scan(kind: str, tokens: int) -> None:
    draw = random.Random(f"{kind} {tokens}")
    groups, heads = (4, 4) if "delta" in kind else (2, 4)

    def values(count: int, features: int) -> Tensor:
        x = torch.randn(tokens, count, features)
        return draw.choice([x, x.transpose(0, 2).contiguous().transpose(0, 2), x[:1].expand_as(x)])

    q, k, v = values(groups, 4), values(groups, 4), values(heads, 3)
    g = -torch.rand(heads, tokens).t() if kind in ("ssd", "gated delta") else None
    g = -values(heads, 4).abs() if kind == "kimi delta" else g
    w = values(groups, 4) * 0.1 if "delta" in kind else None
    ends = torch.tensor(FORESTS["branch"](tokens), dtype=torch.int32)
    torch.library.opcheck(_ops.tree_scan.default, (*with_gradients(draw, (q, k, v, g, w)), ends, 16))
    grad = torch.ones(()).expand(tokens, heads, 3)
    torch.library.opcheck(_ops.tree_scan_backward.default, (grad, q, k, v, g, w, ends, 16))
    states, left = torch.rand(2, heads, 4, 3), torch.ones(()).expand(3, heads, 4, 3)
    doors = states, torch.arange(tokens) % 3, torch.tensor([-1, 0, tokens - 1])
    call = (*with_gradients(draw, (q, k, v, g, w)), ends, 16, *with_gradients(draw, (states,)), *doors[1:])
    torch.library.opcheck(_ops.part_scan.default, call)
    torch.library.opcheck(_ops.part_scan_backward.default, (grad, left, q, k, v, g, w, ends, 16, *doors))
