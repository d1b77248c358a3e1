"""NaN and infinity in recurrences: they reach the tokens that come after them on a row, and gradients of those before.

The truth is the definition on every row alone, one token after the other.
"""

import math

import pytest
import torch
from torch import Tensor

from tests.kernels.recurrence.test_tree_mixers import recurrence_inputs, sequential
from treefx import Forest
from treefx.kernels.recurrence import tree_scan as scans

ROWS = [[*range(12)], [*range(20)], [*range(9), *range(30, 41)], [*range(9), *range(30, 34), 50], [60, 61, 62]]
"""The first row ends within the chunk of the second one's tail."""
NAMES = ("q", "k", "v", "g", "beta")
CHUNK = 16
VALUES = [*((name, math.nan) for name in ("q", "k", "v", "g", "grad")), ("k", math.inf), ("g", -math.inf)]
CASES = [("beta", math.nan, True), *((*one, delta) for one in VALUES for delta in (False, True))]


def compare(where: str, value: float, token: int, delta: bool) -> list[str]:
    """Return the names of what differs from every row alone."""
    forest = Forest.from_sequences(ROWS)
    inputs = recurrence_inputs(forest.num_tokens)
    inputs[3] = (-inputs[3].detach().exp()).requires_grad_()
    weights = [torch.linspace(0.5, 2.0, 2 * 2 * len(row), dtype=torch.float64).view(-1, 2, 2) for row in ROWS]
    place = int(forest.token_of[1][token])
    if where == "grad":
        weights[1][token, 1, 1] = value
    else:
        chosen = inputs[NAMES.index(where)].data[place]
        chosen.view(-1)[-1] = value
    given = inputs if delta else inputs[:4]
    tree = scans.tree_delta_rule if delta else scans.tree_ssd
    packed = tree(*given, forest.subtree_end, CHUNK)
    index = [torch.as_tensor(row) for row in forest.token_of]
    alone = [sequential(*(x[row] for x in inputs[:4]), inputs[4][row] if delta else None) for row in index]
    got = torch.autograd.grad(sum_of([packed[row] for row in index], weights), given)
    wanted = torch.autograd.grad(sum_of(alone, weights), given)
    pairs = [*((packed[row], out) for row, out in zip(index, alone, strict=True)), *zip(got, wanted, strict=True)]
    names = ("out",) * len(ROWS) + NAMES
    return [name for name, pair in zip(names, pairs, strict=False) if not alike(*pair)]


def sum_of(outs: list[Tensor], weights: list[Tensor]) -> Tensor:
    return torch.stack([(out * weight).sum() for out, weight in zip(outs, weights, strict=True)]).sum()


def alike(got: Tensor, wanted: Tensor) -> bool:
    finite = wanted.isfinite()
    return torch.equal(got.isfinite(), finite) and torch.allclose(got[finite], wanted[finite], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("token", [3, 14, 19])
@pytest.mark.parametrize(("where", "value", "delta"), CASES)
def test_only_what_comes_after_it(where: str, value: float, delta: bool, token: int) -> None:
    assert compare(where, value, token, delta) == []


@pytest.mark.parametrize("where", ["k", "v", "grad"])
def test_a_chunk_spreads_it(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scans, "are_finite", lambda *tensors: True)
    assert compare(where, math.nan, 14, delta=False) != []


def test_products_that_overflow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a query and a later key, each of them finite."""
    forest = Forest.from_sequences(ROWS)
    q, k, v, g, _ = (x.detach().float() for x in recurrence_inputs(forest.num_tokens))
    q[10], k[14] = 1e25, 1e25
    q[14:] = 0.0
    out = scans.tree_ssd(q, k, v, -g.abs(), forest.subtree_end, CHUNK)
    assert out[:20].isfinite().all()
    monkeypatch.setattr(scans, "_LARGE", math.inf)
    assert not scans.tree_ssd(q, k, v, -g.abs(), forest.subtree_end, CHUNK)[:20].isfinite().all()
