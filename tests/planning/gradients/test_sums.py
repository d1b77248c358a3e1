"""Sums of gradients: those of one backward, whatever memory autograd shares between them."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from treefx.planning.execution import gradients as module
from treefx.planning.execution.gradients import Gradients


def two() -> tuple[nn.Parameter, nn.Parameter]:
    torch.manual_seed(0)
    return nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.randn(3, 4))


def stashed(p: Tensor, q: Tensor, stash: list[Tensor]) -> Tensor:
    """Autograd gives both leaves one tensor, which a hook on their sum keeps."""
    both = p + q
    both.register_hook(stash.append)
    return (both * both.detach()).sum()


@pytest.mark.parametrize("wrong", [False, True])
def test_gradients_that_share_memory_are_not_added_to_in_place(wrong: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if wrong:
        monkeypatch.setattr(module, "_is_alone", lambda tensor: True)
    (p, q), stash = two(), list[Tensor]()
    sums = Gradients()
    for _ in range(3):
        sums.backward([stashed(p, q, stash)], [None])
    sums.add()
    one = (p + q).detach()
    right = [torch.equal(x, one) for x in stash]
    right += [torch.allclose(x.grad, 3 * one) for x in (p, q) if x.grad is not None]
    assert len(right) == 5 and all(right) is not wrong


def test_a_sum_is_handed_over_uncopied_and_added_in_place() -> None:
    (p, q), sums = two(), Gradients()
    q.grad = held = torch.ones_like(q)
    for _ in range(3):
        sums.backward([(p * p).sum() + (q * 2).sum()], [None])
    (address,) = {total.data_ptr() for leaf, total in sums.totals.items() if leaf is p}
    sums.add()
    assert p.grad is not None and p.grad.data_ptr() == address and not sums.totals
    torch.testing.assert_close(p.grad, 6 * p.detach())
    assert q.grad is held and bool((held == 7).all())


def test_sparse_and_dense_gradients_of_one_weight() -> None:
    ids = torch.tensor([1, 2, 2])
    weights = [nn.Parameter(torch.ones(5, 3, dtype=torch.float64)) for _ in range(2)]

    def losses(weight: Tensor) -> list[Tensor]:
        sparse = nn.functional.embedding(ids, weight, sparse=True).sum()
        return [sparse, 2 * nn.functional.embedding(ids[:1], weight, sparse=True).sum(), (weight * weight).sum()]

    sums = Gradients()
    for loss in losses(weights[0]):
        sums.backward([loss], [None])
    sums.add()
    torch.stack(losses(weights[1])).sum().backward()  # type: ignore[no-untyped-call]
    for weight in weights:
        assert weight.grad is not None
    torch.testing.assert_close(weights[0].grad, weights[1].grad)


def test_leaves_of_the_caller_and_leaves_that_go_elsewhere() -> None:
    """`own` are returned, and those that ranks reduce stay in `totals`, in the dtype of the reduction."""
    (p, q), other = two(), torch.ones(3, 4, requires_grad=True)
    p.data = p.data.to(torch.bfloat16)
    sums = Gradients(lambda: {p: torch.float32})
    found: list[Any] = [sums.backward([(p * q * other).sum()], [None], [other]) for _ in range(2)]
    sums.add()
    assert all(torch.equal(x, (p * q).detach()) for (x,) in found)
    assert p.grad is None and other.grad is None and q.grad is not None
    assert list(sums.totals) == [p] and sums.totals[p].dtype == torch.float32
