"""Inputs that a graph changes in place, while its sizes are symbols: gradients, strides, and inductor's caches."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from tests.backend.support import fresh_cache
from treefx.inputs.fakes import strided_fake
from treefx.passes.packing import compile_inner
from treefx.runtime.ways import free_sizes

Step = Callable[[Any], list[Tensor | None]]


def put(h: Tensor, v: Tensor) -> Tensor:
    h[:, :2] = v.view(h.shape[0], 2, -1)
    return h


def put_by_mask(h: Tensor, v: Tensor) -> Tensor:
    mask = torch.arange(h.shape[1]) < 2
    h[mask.expand(h.shape[:2])] = v
    return h


def scaled(h: Tensor, v: Tensor) -> Tensor:
    h.mul_(2.5).add_(v.sum().sin())
    return h.square()


def rest(h: Tensor, v: Tensor) -> Tensor:
    """The caller reads the changed input, which is not returned."""
    h.select(1, 0).copy_(v[: h.shape[0]])
    return v.sum()


def through_a_view(h: Tensor, v: Tensor) -> Tensor:
    h.transpose(0, 1)[1:].neg_()
    return h + v.mean()


CHANGES = [put, put_by_mask, scaled, rest, through_a_view]


def made(base: Tensor) -> Tensor:
    return base * 2


def view(base: Tensor) -> Tensor:
    return (base * 2).transpose(0, 1).contiguous().transpose(0, 1)[:, 1:]


def step(run: Callable[[Tensor, Tensor], Tensor], make: Callable[[Tensor], Tensor]) -> list[Tensor | None]:
    """Gradients of what the changed input was made of, and of what was put in."""
    generator = torch.Generator().manual_seed(0)
    base = torch.randn(4, 7, 3, generator=generator, dtype=torch.float64, requires_grad=True)
    v = torch.randn(8, 3, generator=generator, dtype=torch.float64, requires_grad=True)
    h = make(base)
    result = run(h, v)
    (result.square().sum() + h.sin().sum()).backward()  # type: ignore[no-untyped-call]
    return [base.grad, v.grad, h.detach()]


def assert_equal(got: list[Tensor | None], want: list[Tensor | None]) -> None:
    for found, expected in zip(got, want, strict=True):
        assert (found is None) == (expected is None)
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("make", "inner"), [(made, "aot_eager"), (view, "eager"), (view, "aot_eager")])
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_an_input_that_is_no_leaf_passes_gradients(change: Any, make: Any, inner: str) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(change, backend="treefx", options={"inner": inner}, dynamic=True)
    assert_equal(step(compiled, make), step(change, make))


def leaves_alone(x: Tensor, sizes: Any, strides: Any, offset: Any, mode: Any) -> Tensor:
    """The mistake: every input a leaf."""
    with mode:
        fake = torch.empty(1 + sum((n - 1) * s for n, s in zip(sizes, strides, strict=True)), dtype=x.dtype)
        return fake.as_strided(sizes, strides, offset).detach().requires_grad_(x.requires_grad)


def test_a_leaf_in_its_place_loses_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(free_sizes, "strided_fake", leaves_alone)
    torch._dynamo.reset()
    compiled = torch.compile(put, backend="treefx", options={"inner": "aot_eager"}, dynamic=True)
    with pytest.raises(AssertionError):
        assert_equal(step(compiled, made), step(put, made))


@pytest.mark.parametrize(
    "x",
    [
        torch.randn(3, 4),
        torch.randn(3, 4, requires_grad=True),
        torch.randn(3, 4, requires_grad=True) * 2,
        (torch.randn(6, 8, requires_grad=True) * 2).t()[1:, ::2],
        torch.randn(3, 4, dtype=torch.complex64).conj(),
        torch.randn(3, 4, dtype=torch.complex64).conj().imag,
        (torch.randn(3, 4, dtype=torch.complex64, requires_grad=True) * 2).conj(),
        (torch.randn(3, 4, dtype=torch.complex64, requires_grad=True) * 2).conj().imag,
        torch.zeros(0, 4),
        torch.zeros(5, 4)[5:],
        torch.randn(1, 4).expand(3, 4),
    ],
    ids=[
        "plain",
        "leaf",
        "made",
        "view",
        "conjugate",
        "negative",
        "made conjugate",
        "made negative",
        "empty",
        "empty view",
        "expanded",
    ],
)
def test_a_fake_is_like_its_input(x: Tensor) -> None:
    def seen(x: Tensor) -> tuple[Any, ...]:
        numbers = [tuple(x.shape), x.stride(), x.storage_offset()]
        return (*numbers, x.dtype, x.device, x.requires_grad, x.is_leaf, x.is_conj(), x.is_neg())

    fake = strided_fake(x, x.shape, x.stride(), x.storage_offset(), FakeTensorMode(shape_env=ShapeEnv()))
    assert seen(fake) == seen(x)


@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
def test_empty_inputs_have_fakes(inner: str) -> None:
    compiled = torch.compile(torch.zeros_like, backend="treefx", options={"inner": inner}, dynamic=True)
    for shape in ((0, 5), (3, 0), (3, 5), (0, 0)):
        assert torch.equal(compiled(torch.ones(shape)), torch.zeros(shape))


@pytest.fixture
def new_cache() -> Iterator[None]:
    with fresh_cache():
        yield


def on_inductor() -> tuple[list[Tensor | None], int]:
    """The gradients, and how many graphs came from the cache."""
    counters.clear()
    torch._dynamo.reset()
    found = step(torch.compile(put, backend="treefx", dynamic=True), made)
    return found, int(counters["aot_autograd"]["autograd_cache_hit"])


def test_entries_of_inputs_taken_for_leaves_are_not_found_again(
    new_cache: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder that is filled by a build whose key and fakes know nothing of leaves; sources are the same."""
    want = step(put, made)
    with monkeypatch.context() as old:
        old.setattr(free_sizes, "strided_fake", leaves_alone)
        old.setattr(compile_inner, "autograd_key", lambda x: ())
        wrong, _ = on_inductor()
    with pytest.raises(AssertionError):
        assert_equal(wrong, want)
    with monkeypatch.context() as key_alone:  # the mistake: the fakes are mended, the key is the old one
        key_alone.setattr(compile_inner, "autograd_key", lambda x: ())
        stale, hits = on_inductor()
        assert hits
    with pytest.raises(AssertionError):
        assert_equal(stale, want)
    for expected_hits in (0, 1):
        found, hits = on_inductor()
        assert_equal(found, want)
        assert hits == expected_hits


def test_keys_tell_a_leaf_from_a_result() -> None:
    leaf = torch.zeros(2, requires_grad=True)
    assert compile_inner.autograd_key(leaf) != compile_inner.autograd_key(leaf * 2)
