"""What is proved constant along a dimension of a view."""

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
