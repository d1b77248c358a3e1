"""Code that Dynamo puts into graphs unread: an ``autograd.Function`` in it keeps its own backward."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import treefx
from tests.backend.general.in_front import SHAPES, check_in_front
from treefx.passes.trace import trace


class Half(torch.autograd.Function):
    """Linear, and no derivative of its forward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:  # type: ignore[override]
        return 0.5 * g


class Squared(Half):
    """A sum of gradients gives something else than each of them."""

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:  # type: ignore[override]
        return g * g


class Kept(torch.autograd.Function):
    """Saves tensors in both ways, and a number; has a second output without a gradient, and a number among inputs."""

    @staticmethod
    def forward(x: Tensor, y: Tensor, times: float = 3.0) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return times * x * y, x.sign()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        x, ctx.y, ctx.times = inputs
        ctx.save_for_backward(x)
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx: Any, g: Tensor, _: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return ctx.times * g * ctx.y, 0.25 * g * x, None


class Held:
    value: Tensor


class Listed(Half):
    """Leaves tensors to its backward in a list and in a dictionary, and a number."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.listed, ctx.named = [x.sin(), 3.0], {"x": x}
        return 2 * x

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:  # type: ignore[override]
        found: Tensor = g * ctx.listed[0] * ctx.listed[1] + g * ctx.named["x"]
        return found


class Hidden(Half):
    """Leaves a tensor in an object; it has no dimension, and would fit any number of tokens."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.held = Held()
        ctx.held.value = x.detach().flatten()[0]
        return 2 * x

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:  # type: ignore[override]
        found: Tensor = g * ctx.held.value
        return found


class InPlace(Half):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)


def unread(function: Any, way: str) -> Callable[..., Any]:
    """The function, as one of three ways to hide it from Dynamo leaves it."""
    if way == "class":
        hidden = type(function.__name__, (function,), {})
        torch._dynamo.allow_in_graph(hidden)
        return hidden.apply  # type: ignore[no-any-return, attr-defined]
    hide = torch._dynamo.allow_in_graph if way == "function" else torch._dynamo.nonstrict_trace
    return hide(lambda *args: function.apply(*args))  # type: ignore[no-any-return]


class Acting(nn.Module):
    def __init__(self, act: Callable[..., Any]) -> None:
        super().__init__()
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.act(x)
        return result


def check(act: Callable[..., Any], **options: Any) -> dict[str, Any]:
    return check_in_front(lambda: Acting(act), **options)


@pytest.mark.parametrize("way", ["class", "function", "nonstrict"])
def test_a_linear_backward_runs_once_per_token(way: str) -> None:
    stats = check(unread(Half, way))
    assert stats["ran"] == "packed" and not stats["expansions"]


def test_functions_through_inductor_for_several_shapes() -> None:
    act = unread(Kept, "class")
    stats = check(lambda v: act(v, v.tanh())[0], inner="inductor", batches=SHAPES)
    assert stats["ran"] == "packed" and not stats["expansions"]


@pytest.fixture
def operator() -> Iterator[Callable[[Tensor], Tensor]]:
    """An operator of a library that is made of others, a function with its own backward among them."""
    with torch.library._scoped_library("unread", "FRAGMENT") as library:
        library.define("half(Tensor x) -> Tensor")
        library.impl("half", lambda x: Half.apply(x), "CompositeImplicitAutograd")
        yield torch.ops.unread.half.default


def test_an_operator_that_is_made_of_a_function(operator: Callable[[Tensor], Tensor]) -> None:
    stats = check(operator)
    assert stats["ran"] == "packed" and not stats["expansions"]


@pytest.mark.parametrize("way", ["class", "nonstrict"])
def test_a_backward_that_is_not_linear_runs_on_rows(way: str) -> None:
    stats = check(unread(Squared, way))
    assert "not linear in the gradient" in str(stats["expansions"])


@pytest.mark.parametrize("way", ["class", "function"])
def test_what_a_forward_leaves_to_its_backward(way: str) -> None:
    act = unread(Kept, way)
    stats = check(lambda v: act(v, v.tanh())[0])
    assert stats["ran"] == "packed" and not stats["expansions"]


def test_tensors_in_containers_are_saved() -> None:
    stats = check(unread(Listed, "class"))
    assert stats["ran"] == "packed" and not stats["expansions"]


def test_a_tensor_in_an_object_is_refused_by_name() -> None:
    stats = check(unread(Hidden, "class"))
    assert stats["ran"] == "ordinary" and "ctx.save_for_backward" in stats["fallback"]


def test_numbers_among_the_arguments() -> None:
    act = unread(Kept, "class")
    assert check(lambda v: act(v, v.tanh(), 5.0)[0])["ran"] == "packed"


def test_without_gradients_the_forward_is_all() -> None:
    act = unread(Half, "class")

    def without(v: Tensor) -> Tensor:
        with torch.no_grad():
            part: Tensor = act(v)
        return v + part

    assert check(without)["ran"] == "packed"


def test_a_nested_compile_region_is_traced_through() -> None:
    """Equal regions, one behind the other, are one graph to Dynamo; with a function of their own in them."""
    region = torch.compiler.nested_compile_region(lambda v: Half.apply(v.sin()) + 1)
    stats = check(lambda v: region(region(v)))
    assert stats["ran"] == "packed" and not stats["expansions"]


def test_a_changed_input_is_refused_by_name() -> None:
    act = unread(InPlace, "class")
    stats = check(lambda v: act(v + 1))
    assert stats["ran"] == "ordinary" and "marks an input dirty" in stats["fallback"]


def test_a_forward_that_is_traced_through_has_another_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    through = lambda self, function, *args: function.apply(*args)  # noqa: E731
    monkeypatch.setattr(trace._ForwardTracer, "_apply", through)
    with pytest.raises(AssertionError):
        check(unread(Half, "class"))


def test_other_code_keeps_its_functions() -> None:
    """Inside of a kept function, and after a trace, ``apply`` is PyTorch's."""
    check(unread(Half, "class"))
    x = torch.ones(2, requires_grad=True)
    Half.apply(x).sum().backward()  # type: ignore[no-untyped-call]
    assert x.grad is not None and torch.equal(x.grad, torch.full((2,), 0.5))
    assert treefx.__version__ and torch.autograd.Function.apply.__func__.__module__ == "torch.autograd.function"
