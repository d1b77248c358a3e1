"""NaN and infinity in one branch, in the generated kernels in Triton's interpreter.

Not collected by itself: test_triton_interpreter.py runs it in a process with TRITON_INTERPRET=1.
"""

from dataclasses import replace
from functools import partialmethod
from typing import Any

import numpy as np
import pytest
import torch
from triton.runtime.interpreter import InterpreterBuilder

from tests.kernels.gpu.interpreted_cases import SCORES, SMALL, draw
from tests.kernels.not_finite_cases import CASES, EVERYTHING, NotFinite, differs_from_paths
from treefx.kernels import reference
from treefx.kernels.common import Inputs
from treefx.kernels.gpu.triton_tree import attention, paths

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
_OPTIONS = {("k", "window"), ("v", "softcap"), ("grad", "alibi_slopes"), ("k", "sinks")}
_SMALL = [
    case
    for case in CASES
    if case.forest == "small"
    and case.dtype != torch.float64
    and {(case.where, name) for name in case.options} <= _OPTIONS
]
"""All tensors, values, places and options, and pairs of these; test_not_finite.py runs the whole table elsewhere."""


_TILED = NotFinite("v", place="inside a tile", forest="two tiles", options=EVERYTHING)


@pytest.mark.parametrize("case", [*_SMALL, _TILED], ids=str)
def test_two_passes(case: NotFinite) -> None:
    found = differs_from_paths(case, "triton")
    assert found is None, found


@pytest.mark.parametrize("where", ["q", "k", "v", "grad"])
def test_one_pass(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It adds dq up with keys that rows do not see; tiles in which these are not finite are computed again."""
    monkeypatch.setattr(paths, "ONE_PASS_KEYS", 0)
    torch.use_deterministic_algorithms(False)
    found = differs_from_paths(NotFinite(where, place="two leaves", forest="small"), "triton")
    assert found is None, found


def test_one_pass_alone_spreads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paths, "ONE_PASS_KEYS", 0)
    monkeypatch.setattr(attention, "_repair_queries", lambda *given: None)
    torch.use_deterministic_algorithms(False)
    found = differs_from_paths(NotFinite("v", place="two leaves", forest="small"), "triton")
    assert "dq is not finite elsewhere" in str(found)


@pytest.mark.parametrize("score", ["bias", "clamped", "chosen"])
def test_scores_keep_it(score: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Minima and maxima of a device leave NaN out where they are not told otherwise; those of the interpreter never."""
    for name, function in (("minnumf", np.fmin), ("maxnumf", np.fmax)):
        own = partialmethod(
            lambda builder, left, right, function: builder.binary_op(left, right, function), function=function
        )
        monkeypatch.setattr(InterpreterBuilder, f"create_{name}", own)
    case = draw(*SMALL, heads=(2, 1))
    case.narrow.q[:, :, 4, 3] = torch.nan
    for got, wanted in zip(
        _results(attention, case.narrow, case.grad, score),
        _results(reference, case.narrow, case.grad, score),
        strict=True,
    ):
        torch.testing.assert_close(got, wanted.to(got.dtype), rtol=1e-3, atol=1e-3, equal_nan=True)


@pytest.mark.parametrize(("where", "once"), [("k", False), ("v", True)])
def test_boundary(where: str, once: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A key from outside that only some see, and sinks: the second launch goes on from the first one's result."""
    monkeypatch.setattr(paths, "in_one_pass", lambda attention: once)
    case = draw(*SMALL, heads=(2, 1), outside=70, sinks=True)
    inputs, boundary = case.narrow, case.narrow.boundary
    assert boundary is not None
    k, v, hi = boundary.k.clone(), boundary.v.clone(), boundary.hi.clone()
    hi[65] = 3
    (k if where == "k" else v)[:, :, 65, 1] = torch.nan
    inputs = replace(inputs, boundary=replace(boundary, k=k, v=v, lo=torch.zeros_like(boundary.lo), hi=hi))
    for got, wanted in zip(_results(attention, inputs, case.grad), _results(reference, inputs, case.grad), strict=True):
        torch.testing.assert_close(got, wanted.to(got.dtype), rtol=1e-3, atol=1e-3, equal_nan=True)


def _results(implementation: Any, inputs: Inputs, grad: torch.Tensor, score: str = "plain") -> list[torch.Tensor]:
    out, lse = implementation.forward(inputs, SCORES[score])
    marked = [False] * len(inputs.buffers)
    dq, dk, dv, rest = implementation.backward(grad.to(out.dtype), inputs, out, lse, SCORES[score], marked)
    return [out, lse, dq, dk, dv, *rest[:2]]
