"""Every argument of ``tree_attention`` on every implementation: right, or refused by name."""

import pytest
import torch

from tests.kernels.interface_cases import CASES, EVERYTHING, Case, differs_from_float64
from treefx.errors import TreefxError


@pytest.mark.parametrize("impl", ["reference", "cpu"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_right(case: Case, impl: str) -> None:
    """test_triton_interpreter.py runs the same table on ``triton``."""
    found = differs_from_float64(case, impl)
    assert found is None, found


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("impl", ["flex", "triton"])
@pytest.mark.parametrize("case", [CASES[0], *(case for case in CASES if case.tokens == 0)][:3], ids=str)
def test_refused_by_name(case: Case, impl: str) -> None:
    """These are never differentiated on the CPU."""
    found = differs_from_float64(case, impl)
    if case.tokens == 0:
        assert found is None
    else:
        assert isinstance(found, TreefxError) and f"impl='{impl}' must" in str(found)


@pytest.mark.parametrize("option", EVERYTHING)
def test_an_ignored_argument_is_noticed(option: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The table would fail for an implementation that leaves an argument out."""
    from tests.kernels import interface_cases

    right = interface_cases.tree_attention

    def forgetful(*tensors: torch.Tensor, impl: str, **given: object) -> torch.Tensor:
        if impl == "cpu":
            given[option] = None
        return right(*tensors, impl=impl, **given)  # type: ignore[arg-type]

    monkeypatch.setattr(interface_cases, "tree_attention", forgetful)
    with pytest.raises((AssertionError, RuntimeError), match="off by|not have been used"):
        found = differs_from_float64(Case(torch.float64, options=EVERYTHING), "cpu")
        assert found is None, found
