"""The kernels of attention to listed keys in Triton's interpreter against the definition in float64.

Not collected by itself: tests/kernels/gpu/test_triton_interpreter.py runs it in a process with TRITON_INTERPRET=1.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from treefx.kernels.gpu.triton_tree.small_launches import Launch
from treefx.kernels.sparse import choose, fused, reference
from treefx.kernels.sparse.ops import sparse_tree_attention
from treefx.kernels.sparse.problem import Listed

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")  # of Triton 3.6
F16, F32 = torch.float16, torch.float32
CLOSE = {F32: 1e-5, F16: 4e-3}


@dataclass(frozen=True)
class Sizes:
    """Of an attention; ``tokens`` are those of a path."""

    heads: int = 4
    kv_heads: int = 2
    tokens: int = 21
    width: int = 12
    values: int = 7
    listed: int = 5
    sinks: bool = False


def drawn(sizes: Sizes, dtype: torch.dtype = F32) -> Listed:
    """Distinct earlier tokens in any order, fewer than the list holds for the first queries; token 3 sees none."""
    torch.manual_seed(0)
    shape = sizes.tokens, sizes.width
    q, k = torch.randn(sizes.heads, *shape), torch.randn(sizes.kv_heads, *shape)
    v = torch.randn(sizes.kv_heads, sizes.tokens, sizes.values)
    order = torch.stack([torch.randperm(sizes.tokens) for _ in range(sizes.tokens)])
    keys = order.masked_fill(order > torch.arange(sizes.tokens)[:, None], -1)[:, : sizes.listed]
    if sizes.tokens > 3:
        keys[3] = -1
    sinks = torch.linspace(-1, 3, sizes.heads).to(dtype) if sizes.sinks else None
    return Listed(q.to(dtype), k.to(dtype), v.to(dtype), keys.int(), 0.6, sinks)


def results(given: Listed, module: Any, grad: Tensor) -> list[Tensor]:
    out, lse = module.forward(given)
    return [out, lse, *module.backward(grad.to(out.dtype), given, out, lse)]


def check(given: Listed) -> None:
    sinks = None if given.sinks is None else given.sinks.double()
    wide = replace(given, q=given.q.double(), k=given.k.double(), v=given.v.double(), sinks=sinks)
    grad = torch.randn(*given.q.shape[:2], given.v.shape[-1]).to(given.q.dtype)
    expected, found = results(wide, reference, grad), results(given, fused, grad)
    for got, wanted in zip(found, expected, strict=True):
        close = CLOSE[given.q.dtype]
        size = float(wanted[wanted.isfinite()].abs().max())
        torch.testing.assert_close(got.double(), wanted, rtol=close, atol=close * size)


@pytest.mark.parametrize("dtype", CLOSE, ids=str)
@pytest.mark.parametrize(
    "sizes",
    [
        Sizes(),
        Sizes(sinks=True),
        Sizes(heads=2, kv_heads=2, width=16, values=16),
        Sizes(heads=18, kv_heads=1, listed=21),
        Sizes(heads=140, kv_heads=2, listed=3, tokens=6),
        Sizes(heads=1, kv_heads=1, tokens=1, width=1, values=1, listed=1),
        Sizes(heads=3, kv_heads=1, tokens=70, listed=67),
        Sizes(width=40, values=24, tokens=9, listed=9),
    ],
    ids=str,
)
def test_sizes(sizes: Sizes, dtype: torch.dtype) -> None:
    """Groups of one head and of more than a program takes, one token, lists of several blocks."""
    check(drawn(sizes, dtype))


@pytest.mark.parametrize("dtype", CLOSE, ids=str)
def test_many_heads_of_one_key_in_a_fixed_order(dtype: torch.dtype) -> None:
    """Deterministic algorithms sort; otherwise a query adds its part."""
    torch.use_deterministic_algorithms(True)
    try:
        check(drawn(Sizes(heads=18, kv_heads=1, listed=21), dtype))
    finally:
        torch.use_deterministic_algorithms(False)


def test_layouts() -> None:
    """Heads inside, as models have them; rows that are not dense; lists in int64."""
    given = drawn(Sizes())
    inside = (x.transpose(0, 1).contiguous().transpose(0, 1) for x in (given.q, given.k, given.v))
    check(Listed(*inside, given.keys.long(), given.scale))
    apart = (torch.stack([x, x], -1)[..., 0] for x in (given.q, given.k, given.v))
    check(Listed(*apart, given.keys.t().contiguous().t(), given.scale))


def test_the_operator_runs_them() -> None:
    given = drawn(Sizes(sinks=True))
    assert given.sinks is not None
    q, k, v, sinks = (x.requires_grad_() for x in (given.q, given.k, given.v, given.sinks))
    grad = torch.randn(4, 21, 7)
    out, _ = sparse_tree_attention(q, k, v, given.keys, sinks, given.scale, "triton")
    found = [out.detach(), *torch.autograd.grad(out, (q, k, v, sinks), grad)]
    right = results(drawn(Sizes(sinks=True)), reference, grad)
    torch.testing.assert_close(found, [right[0], *right[2:]], rtol=1e-5, atol=1e-5)


def test_a_key_that_is_not_finite_stays_with_its_queries() -> None:
    given = drawn(Sizes())
    given.k[:, 5], given.v[:, 5] = torch.nan, torch.inf
    reads = (given.keys == 5).any(1)
    out, lse = fused.forward(given)
    assert reads.any() and out[:, reads].isnan().all()
    assert out[:, ~reads].isfinite().all()
    grads = fused.backward(torch.ones_like(out), given, out, lse)
    assert grads[0][:, ~reads].isfinite().all()


# Planted mistakes -----------------------------------------------------------------------------------------------------


def _changed(name: str, change: Callable[[Launch], dict[str, Any]]) -> Callable[[pytest.MonkeyPatch], None]:
    def plant(patch: pytest.MonkeyPatch) -> None:
        run = Launch.run

        def changed(launch: Launch) -> None:
            more = change(launch) if launch.kernel.__name__ == name else {}
            run(replace(launch, arguments={**launch.arguments, **more}))

        patch.setattr(Launch, "run", changed)

    return plant


MISTAKES: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "missing keys are token 0": _changed(
        "attend_listed", lambda launch: {"Keys": launch.arguments["Keys"].clamp(min=0)}
    ),
    "the last key of a list": _changed("attend_listed", lambda launch: {"listed": launch.arguments["listed"] - 1}),
    "missing keys in dq": _changed(
        "restore_queries", lambda launch: {"Keys": launch.arguments["Keys"].clamp(min=0)}
    ),
    "queries of the next key": _changed(
        "restore_keys", lambda launch: {"Bounds": launch.arguments["Bounds"].roll(-1).contiguous()}
    ),
    "lists that are not inverted": _changed(
        "restore_keys", lambda launch: {"Queries": launch.arguments["Queries"].sort().values}
    ),
    "no delta": _changed(
        "restore_keys", lambda launch: {"Delta": torch.zeros_like(launch.arguments["Delta"])}
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given = drawn(Sizes())
    check(given)
    MISTAKES[name](monkeypatch)
    with pytest.raises(AssertionError, match="not close"):
        check(given)


def test_the_first_use_compares_both_forms(monkeypatch: pytest.MonkeyPatch) -> None:
    given = drawn(Sizes(), F16)
    assert choose._judge(given.first_tokens(16, 4))
    MISTAKES["the last key of a list"](monkeypatch)
    with pytest.warns(RuntimeWarning, match="instead of a Triton kernel: its results differ"):
        assert not choose._judge(given)
