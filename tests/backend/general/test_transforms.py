"""Models that derive inside of their forward: ``torch.func`` gives the values and the gradients of eager."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import grad, jacrev, jvp, vjp, vmap
from torch.utils.checkpoint import checkpoint

from tests.backend.general.in_front import SHAPES, check_in_front
from treefx.passes.trace import trace

WIDTH = 32


class Cubed(torch.autograd.Function):
    """Its backward is half of the derivative."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:  # type: ignore[override]
        return x**3

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return 1.5 * g * x**2


class Deriving(nn.Module):
    """``way`` of (a layer, x) [B, T, D] -> [B, T, D]."""

    def __init__(self, way: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.way, self.layer = way, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + 0.1 * self.way(self.layer, x)


def energy(layer: nn.Module) -> Callable[[Tensor], Tensor]:
    return lambda y: (layer(y).sin() ** 2).sum()


def without_gradients(layer: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        return grad(energy(layer))(x)  # type: ignore[no-any-return]


def tangents_without_gradients(layer: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        return jvp(lambda y: layer(y).sin(), (x,), (x,))[1]  # type: ignore[no-any-return]


def constant(layer: nn.Module, y: Tensor) -> Tensor:
    with torch.no_grad():
        return layer(y).sin()  # type: ignore[no-any-return]


def attended(y: Tensor) -> Tensor:
    """Attention as products, since no library derives its kernels twice."""
    weights = (y @ y.mT).masked_fill(~torch.ones(2 * [y.shape[1]]).tril().bool(), -torch.inf).softmax(-1)
    return (weights @ y).sin().sum()


PACKED: dict[str, Callable[[Any, Tensor], Any]] = {
    "grad": lambda layer, x: grad(energy(layer))(x),
    "grad of grad": lambda layer, x: grad(lambda z: grad(energy(layer))(z).cos().sum())(x),
    "vjp": lambda layer, x: vjp(lambda y: layer(y).sin(), x)[1](x)[0],
    "jvp": lambda layer, x: jvp(lambda y: layer(y).sin(), (x,), (x,))[1],
    "grad of each token": lambda layer, x: vmap(vmap(grad(energy(layer))))(x),
    "grad of all tokens, one by one": lambda layer, x: grad(lambda z: vmap(vmap(energy(layer)))(z).sum())(x),
    "without gradients": without_gradients,
    "behind it": lambda layer, x: layer(grad(energy(layer))(x)) * x,
}
ELSE: dict[str, Callable[[Any, Tensor], Any]] = {
    "tangents without gradients": tangents_without_gradients,
    "part of it without gradients": lambda layer, x: grad(lambda y: (constant(layer, y) * layer(y)).sum())(x),
    "of a weight of all tokens": lambda layer, x: x * jacrev(lambda w: (layer(x) * w).sum())(torch.ones(WIDTH).to(x)),
    "of attention": lambda layer, x: grad(attended)(layer(x)),
}


def check(way: Callable[[Any, Tensor], Any], **options: Any) -> dict[str, Any]:
    return check_in_front(lambda: Deriving(way), **options)


@pytest.mark.parametrize("name", PACKED)
def test_derivatives_of_tokens_stay_packed(name: str) -> None:
    stats = check(PACKED[name])
    assert stats["ran"] == "packed" and not stats["expansions"]


def test_derivatives_through_inductor_for_several_shapes() -> None:
    stats = check(PACKED["grad of each token"], inner="inductor", batches=SHAPES)
    assert stats["ran"] == "packed" and not stats["expansions"]


@pytest.mark.parametrize("name", ELSE)
def test_other_derivatives_are_exact(name: str) -> None:
    check(ELSE[name])


def test_derivatives_of_functions_are_refused() -> None:
    """torch.compile alone loses terms of their own derivative, in silence."""
    with pytest.raises(Exception, match="(?s)torch.func derives an autograd.Function.*TFX210"):
        check(lambda layer, x: grad(lambda y: Cubed.apply(layer(y)).sum())(x))  # type: ignore[no-untyped-call]
    check_that_transforms_work()


@pytest.mark.parametrize("name", ["grad of each token", "vjp", "jvp"])
def test_a_failing_trace_leaves_no_transform_behind(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """What fails between the ends of transforms runs on rows, and PyTorch's own derivatives go on."""

    def failing(target: Any) -> bool:
        if target is torch._C._nn.linear and torch._C._functorch.maybe_current_level() is not None:
            raise NotImplementedError("no such thing")
        return False

    monkeypatch.setattr(trace, "is_flash", failing)
    stats = check(PACKED[name])
    assert "no such thing" in stats["fallback"] and torch._C._functorch.maybe_current_level() is None
    check_that_transforms_work()


def check_that_transforms_work() -> None:
    """Checkpoints, which hook saved tensors; tangents; and tensors that begin to require gradients in place."""
    x = torch.ones(3, requires_grad=True)
    checkpoint(torch.sin, x, use_reentrant=False).sum().backward()
    assert x.grad is not None and torch.allclose(x.grad, torch.ones(3).cos())
    assert torch.equal(jvp(torch.sin, (torch.ones(3),), (torch.ones(3),))[1], torch.ones(3).cos())
    with forward_ad.dual_level():  # the first, so none was left
        dual = forward_ad.make_dual(torch.ones(3), torch.ones(3))
        assert forward_ad.unpack_dual(dual.sin()).tangent is not None


def test_derivatives_that_are_not_recorded_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace, "_RECORDING", None)
    with pytest.raises(AssertionError):
        check(PACKED["grad"])
