"""Gradients of what a score loads: of slopes over long distances, whose terms are large and of either sign."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.kernels.gpu.interpreted_cases import BRANCH_AT_57, SCORES, Case, draw, expected
from treefx.kernels.gpu.triton_tree import buffer_gradients as module

FIRST_BUFFER_FROM_THE_END = -3
"""Of three that are marked: a bias, a table of distances, slopes."""


def far(*, outside: int = 0, sinks: bool = False) -> Case:
    return draw(*BRANCH_AT_57, heads=(4, 1), widths=(24, 16), outside=outside, sinks=sinks)


def errors(case: Case, name: str) -> list[float]:
    """Relative errors of the gradients of all marked buffers in float32, in units of the tolerance.

    That is 1e-5, or thrice the error of the dense reference in float32: both are noise from rounding large logits.
    """
    got = module.buffer_gradients(case.grad.float(), case.narrow, SCORES[name], case.wanted_grads)
    wanted, dense = (
        expected(one, SCORES[name])[FIRST_BUFFER_FROM_THE_END:]
        for one in (case, Case(case.narrow, case.narrow, case.grad.float()))
    )

    def error(found: Tensor, truth: Tensor) -> float:
        return float((found.double() - truth).norm() / truth.norm().clamp(min=1.0))

    return [error(g, w) / max(1e-5, 3 * error(d, w)) for g, d, w in zip(got, dense, wanted, strict=True)]


@pytest.mark.parametrize("name", ["alibi", "relative", "bias", "clamped"])
@pytest.mark.parametrize(("outside", "sinks"), [(0, False), (200, True)])
def test_equal_to_the_reference_in_float64(name: str, outside: int, sinks: bool) -> None:
    assert max(errors(far(outside=outside, sinks=sinks), name)) <= 1


def test_block_by_block(monkeypatch: pytest.MonkeyPatch) -> None:
    case = far(outside=20)
    whole = errors(case, "alibi")
    monkeypatch.setattr(module, "_BLOCK_ELEMENTS", 4 * (len(case.wide.subtree_end) + 20) * 7)
    assert max(errors(case, "alibi")) <= 1 and errors(case, "alibi") != whole


def test_rows_that_see_nothing() -> None:
    """As where a part's own tokens see keys from outside only."""
    case = far(outside=20)
    ends = torch.zeros_like(case.wide.subtree_end)
    case = replace(case, wide=replace(case.wide, subtree_end=ends), narrow=replace(case.narrow, subtree_end=ends))
    assert max(errors(case, "alibi")) <= 1


def test_weights_of_a_kept_sum_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rounding for a row is an error of all its keys, which distances multiply."""

    def kept(logits: Tensor, sinks: Tensor | None) -> Tensor:
        return torch.exp(logits - torch.logsumexp(logits, -1, keepdim=True).to(torch.float32))

    case = far()
    assert max(errors(case, "alibi")) <= 1
    monkeypatch.setattr(module, "_weights", kept)
    assert max(errors(case, "alibi")) > 1
