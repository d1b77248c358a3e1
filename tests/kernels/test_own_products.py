"""Products with a list of keys per token: against the definition, in blocks of any size."""

import pytest
import torch
from torch import Tensor

from treefx.kernels import own_products as own_module
from treefx.kernels.own_products import own_products


def by_definition(q: Tensor, k: Tensor, own: Tensor) -> Tensor:
    return torch.stack([q[n] @ k[own[n]].t() for n in range(len(q))])


def drawn(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    q, k = (torch.randn(shape, dtype=dtype, requires_grad=True) for shape in ((7, 2, 3), (9, 3)))
    return q, k, torch.randint(0, 9, (7, 5))


@pytest.mark.parametrize("elements", [1, 32, 1 << 25])
def test_products_and_gradients(elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_module, "_BLOCK_ELEMENTS", elements)
    q, k, own = drawn()
    grad = torch.randn(7, 2, 5, dtype=torch.float64)
    found = torch.autograd.grad(own_products(q, k, own), (q, k), grad)
    wanted = torch.autograd.grad(by_definition(q, k, own), (q, k), grad)
    assert torch.allclose(own_products(q, k, own), by_definition(q, k, own), rtol=0, atol=1e-14)
    for first, second in zip(found, wanted, strict=True):
        assert torch.allclose(first, second, rtol=0, atol=1e-13)


def test_gradients_of_many_tokens_add_up_in_float32() -> None:
    """A key that 4096 tokens meet: in bfloat16 sums end at 256."""
    q, k = torch.ones(4096, 1, 1, dtype=torch.bfloat16), torch.ones(1, 1, dtype=torch.bfloat16, requires_grad=True)
    own_products(q, k, torch.zeros(4096, 1, dtype=torch.int64)).sum().backward()
    assert k.grad is not None and k.grad.item() == 4096


def test_no_token_and_no_column() -> None:
    q, k, own = drawn()
    assert own_products(q[:0], k, own[:0]).shape == (0, 2, 5)
    assert own_products(q, k, own[:, :0]).shape == (7, 2, 0)
