"""A token that is not finite reaches what sees it: on the reference and on the CPU, forward and backward."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.kernels.not_finite_cases import CASES, FORESTS, NotFinite, differs_from_paths
from treefx.kernels.common import Boundary
from treefx.kernels.ops import attend
from treefx.kernels.score import make_score


@pytest.mark.parametrize("impl", ["reference", "cpu"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_only_what_sees_it(case: NotFinite, impl: str) -> None:
    found = differs_from_paths(case, impl)
    assert found is None, found


@pytest.mark.parametrize("where", ["v", "grad"])
def test_a_plain_product_is_noticed(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights of 0 times NaN, as a dense product has them, fail in the table."""
    monkeypatch.setattr("treefx.kernels.masked_products.are_finite", lambda *tensors: True)
    assert "is not finite elsewhere" in str(differs_from_paths(NotFinite(where), "reference"))


@pytest.mark.parametrize("where", ["k", "v", "grad"])
def test_boundary(where: str, ends_of: Callable[[list[int]], Tensor]) -> None:
    """Keys from outside that some own tokens see: what a part of a plan does is what the whole forest does."""
    torch.manual_seed(0)
    parents = FORESTS["small"]
    ends = ends_of(parents)
    q, k, v, grad = (torch.randn(1, 2, len(parents), 8) for _ in range(4))
    {"k": k, "v": v, "grad": grad}[where][:, :, 5] = torch.nan
    whole = [x.clone().requires_grad_() for x in (q, k, v)]
    wanted = attend(whole[0], whole[1], whole[2], ends, make_score(scale=0.3))
    wanted_grads = torch.autograd.grad(wanted, whole, grad)
    cut = 4  # tokens of the first node, which all of the others up to the second tree see
    lo = torch.zeros(cut, dtype=torch.int32)
    hi = ends[:cut] - cut
    parts = [q[:, :, cut:], k[:, :, cut:], v[:, :, cut:], k[:, :, :cut], v[:, :, :cut]]
    leaves = [x.clone().requires_grad_() for x in parts]
    boundary = Boundary(leaves[3], leaves[4], lo, hi)
    own_ends = ends[cut:] - cut
    got = attend(leaves[0], leaves[1], leaves[2], own_ends, make_score(scale=0.3), boundary=boundary)
    torch.testing.assert_close(got, wanted[:, :, cut:], equal_nan=True)
    own = torch.autograd.grad(got, leaves, grad[:, :, cut:])
    for first, second in zip(own[:3], wanted_grads, strict=True):
        torch.testing.assert_close(first, second[:, :, cut:], equal_nan=True)
