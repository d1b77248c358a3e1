"""Operators whose sizes depend on values: Dynamo cuts the graph there, for treefx as for any backend."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

OPERATORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sections": lambda x, n: torch.cat([2 * part for part in torch.tensor_split(x, n)]),
    "indices": lambda x, n: torch.tensor_split(x, torch.stack([n, n + 1]))[1].sum() * x,
    "a slice": lambda x, n: x[: int(n)].sum() * x,
    "nonzero": lambda x, n: x[x > n / 4],
}


@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
@pytest.mark.parametrize("name", OPERATORS)
def test_they_give_what_eager_gives(name: str, inner: str) -> None:
    compiled = torch.compile(OPERATORS[name], backend="treefx", options={"inner": inner})
    for rows, sections in ((6, 2), (6, 3), (8, 4)):
        x = torch.linspace(0, 2, rows, dtype=torch.float64, requires_grad=True)
        y = x.detach().clone().requires_grad_()
        found, wanted = compiled(x, torch.tensor(sections)), OPERATORS[name](y, torch.tensor(sections))
        torch.autograd.backward([found.square().sum(), wanted.square().sum()])
        assert torch.equal(found, wanted) and torch.equal(x.grad, y.grad)  # type: ignore[arg-type]
