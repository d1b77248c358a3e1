"""NaN and infinity in one branch, in the generated kernels in Triton's interpreter.

Not collected by itself: test_triton_interpreter.py runs it in a process with TRITON_INTERPRET=1.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.kernels.gpu.interpreted_cases import SCORES, SMALL, draw
from tests.kernels.not_finite_cases import CASES, EVERYTHING, NotFinite, differs_from_paths
from treefx.kernels import reference
from treefx.kernels.common import Inputs
from treefx.kernels.gpu.triton_tree import attention, paths

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
_SMALL = [case for case in CASES if case.forest == "small" and case.dtype != torch.float64]


@pytest.mark.parametrize("case", [*_SMALL, NotFinite("v", place="inside a tile", options=EVERYTHING)], ids=str)
def test_two_passes(case: NotFinite) -> None:
    found = differs_from_paths(case, "triton")
    assert found is None, found


@pytest.mark.parametrize("where", ["q", "grad"])
def test_one_pass(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that are not finite. Keys that are not still reach dq of the rows in their tile."""
    monkeypatch.setattr(paths, "ONE_PASS_KEYS", 0)
    torch.use_deterministic_algorithms(False)
    found = differs_from_paths(NotFinite(where, place="two leaves", forest="small"), "triton")
    assert found is None, found


@pytest.mark.parametrize("where", ["k", "v"])
def test_boundary(where: str) -> None:
    """A key from outside that only some see, and sinks: the second launch goes on from the first one's result."""
    case = draw(*SMALL, heads=(2, 1), outside=70, sinks=True)
    inputs, boundary = case.narrow, case.narrow.boundary
    assert boundary is not None
    k, v, hi = boundary.k.clone(), boundary.v.clone(), boundary.hi.clone()
    hi[65] = 3
    (k if where == "k" else v)[:, :, 65, 1] = torch.nan
    inputs = replace(inputs, boundary=replace(boundary, k=k, v=v, lo=torch.zeros_like(boundary.lo), hi=hi))
    for got, wanted in zip(_results(attention, inputs, case.grad), _results(reference, inputs, case.grad), strict=True):
        torch.testing.assert_close(got, wanted.to(got.dtype), rtol=1e-3, atol=1e-3, equal_nan=True)


def _results(implementation: Any, inputs: Inputs, grad: torch.Tensor) -> list[torch.Tensor]:
    out, lse = implementation.forward(inputs, SCORES["plain"])
    marked = [False] * len(inputs.buffers)
    dq, dk, dv, rest = implementation.backward(grad.to(out.dtype), inputs, out, lse, SCORES["plain"], marked)
    return [out, lse, dq, dk, dv, *rest[:2]]
