"""Proofs of constancy along a dimension of a view."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from treefx.passes.labels.uniformity import is_uniform


def viewed(shape: list[int], constant: int, view: list[int]) -> fx.Node:
    """The view of a tensor that is constant along one dimension."""

    def run(x: Tensor) -> Tensor:
        return x.expand(shape).clone(memory_format=torch.contiguous_format).view(view)

    drawn = [1 if dim == constant else size for dim, size in enumerate(shape)]
    gm = make_fx(run, tracing_mode="fake")(torch.randn(drawn))
    found: fx.Node = next(node for node in gm.graph.nodes if node.target is torch.ops.aten.view.default)
    return found


@pytest.mark.parametrize(
    ("shape", "constant", "view", "dim", "proved"),
    [
        ([2, 3, 4], 0, [2, 3, 4], 0, True),
        ([2, 3, 4], 0, [2, 12], 0, True),
        ([2, 3, 4], 1, [2, 3, 2, 2], 1, True),
        ([2, 3, 4], 0, [2, 12], 1, False),
        ([2, 3, 4], 0, [6, 4], 0, False),
        ([2, 3, 4], 1, [4, 3, 2], 1, False),  # a dimension of that size stands there, and is another one
        ([2, 3, 4], 0, [3, 2, 4], 0, False),
    ],
)
def test_leading_dimensions_of_views(shape: list[int], constant: int, view: list[int], dim: int, proved: bool) -> None:
    assert is_uniform(viewed(shape, constant, view), dim) == proved


def on_grid(x: Tensor) -> Tensor:
    return x[torch.arange(2)[:, None], torch.arange(3)]


@pytest.mark.parametrize(
    ("constant", "run", "dim", "proved"),
    [
        (0, on_grid, 0, True),
        (0, on_grid, 1, False),
        (1, on_grid, 1, True),
        (1, on_grid, 0, False),
        (0, lambda x: x[torch.arange(3) % 2, torch.arange(3)], 0, False),
        (1, lambda x: x[torch.arange(2)], 1, True),
        (0, lambda x: torch.nn.functional.pad(x, (1, 0)), 0, True),
        (0, lambda x: torch.nn.functional.pad(x, (0, 0, 0, 1)), 0, False),
        (1, lambda x: torch.nn.functional.pad(x, (1, 0)), 1, False),
    ],
)
def test_indices_and_padding(constant: int, run: Callable[[Tensor], Tensor], dim: int, proved: bool) -> None:
    """Of a value [2, 3] that is constant along one dimension; the values agree with the proof."""
    drawn = torch.randn([1, 3] if constant == 0 else [2, 1])
    gm = make_fx(lambda x: run(x.expand(2, 3)), tracing_mode="fake")(drawn)
    last: fx.Node = next(iter(gm.graph.find_nodes(op="output"))).args[0]
    result = run(drawn.expand(2, 3))
    assert is_uniform(last, dim) == proved
    assert torch.equal(result.narrow(dim, 0, 1).expand_as(result), result) == proved


def written(at: object, source: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Write into a part of a value in place, as rotary embeddings of several planes do."""

    def run(x: Tensor) -> Tensor:
        y = x.clone(memory_format=torch.contiguous_format)
        y[at] = source(x)  # type: ignore[index]
        return y

    return run


@pytest.mark.parametrize(
    ("constant", "run", "dim", "proved"),
    [
        (0, lambda x: x[:, 1], 0, True),
        (1, lambda x: x[:, 1], 0, False),
        (1, lambda x: x[1], 0, True),
        (0, lambda x: x[-1], 0, False),
        (0, lambda x: x.split([1, 2], 1)[1], 0, True),
        (1, lambda x: x.split([1, 1])[1], 0, True),  # one element is the same everywhere
        (0, lambda x: x.split([1, 2], 1)[1], 1, False),
        (0, written((slice(None), slice(1, 3)), lambda x: x[:, :2] * 2), 0, True),
        (0, written((slice(None), slice(1, 3)), lambda x: torch.ones(2, 1).cumsum(0)), 0, False),
        (1, written((slice(None), slice(1, 3)), lambda x: x[:, :2] * 2), 1, False),
        (1, written(slice(1), lambda x: x[1:] * 2), 1, True),
        (0, written((slice(None), 1), lambda x: x[:, 0] * 2), 0, True),
        (0, written((slice(None), 1), lambda x: torch.ones(2).cumsum(0)), 0, False),
        (1, written(1, lambda x: x[0] * 2), 1, True),
        (1, written(1, lambda x: torch.ones(3).cumsum(0)), 1, False),
    ],
)
def test_parts_and_writes(constant: int, run: Callable[[Tensor], Tensor], dim: int, proved: bool) -> None:
    """Of a value [2, 3] that is constant along one dimension; the values agree with the proof."""
    drawn = torch.randn([1, 3] if constant == 0 else [2, 1])
    gm = make_fx(torch.func.functionalize(lambda x: run(x.expand(2, 3))), tracing_mode="fake")(drawn)
    last: fx.Node = next(iter(gm.graph.find_nodes(op="output"))).args[0]
    result = run(drawn.expand(2, 3))
    assert is_uniform(last, dim) == proved
    assert torch.equal(result.narrow(dim, 0, 1).expand_as(result), result) == proved
