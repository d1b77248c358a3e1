"""Questions about the number of tokens: which are recorded, and that one compilation serves every number."""

import itertools

import pytest
import sympy
import torch
from torch import fx
from torch._inductor.codegen.cpp import CppKernel
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._sympy.functions import FloorDiv, Max, Mod, ModularIndexing, PythonMod

from treefx.inputs.token_count import _ADVICE, TokenCount, _advice_code, _Condition, add_count_input


def symbol_of(count: TokenCount) -> sympy.Symbol:
    count.vectors([torch.int64], torch.device("cpu"), FakeTensorMode(shape_env=count))
    return count.count.node.expr


def test_answers_that_suit_every_size_are_not_recorded() -> None:
    count = TokenCount(80)
    symbol = symbol_of(count)
    assert not count.evaluate_expr(sympy.Gt(symbol, 4096), fallback_value=False)
    assert not count.evaluate_expr(sympy.Eq(symbol, 64), fallback_value=False)
    assert count.evaluate_expr(sympy.Ne(symbol, 64), fallback_value=True)
    assert count.guards == []
    assert all(count.admits(tokens) for tokens in (2, 64, 80, 4097))


def test_answers_for_some_sizes_are_conditions() -> None:
    count = TokenCount(80)
    symbol = symbol_of(count)
    assert count.evaluate_expr(sympy.Lt(2 * symbol, 32767), fallback_value=False)
    assert count.admits(16383) and not count.admits(16384)
    assert count.evaluate_expr(sympy.Gt(symbol, 9)), "a plain question is always recorded"
    assert count.admits(10) and not count.admits(9)


def test_hint_is_like_no_other_size() -> None:
    for largest in (1, 2, 64, 4096, 5120):
        count = TokenCount(largest)
        assert count.hint > max(1, largest) and sympy.isprime(count.hint)
        symbol = symbol_of(count)
        for size in (largest, 8, 16):
            assert not count.evaluate_expr(sympy.Eq(symbol % size, 0), fallback_value=False) or size == 1
        assert count.admits(max(2, largest))


def test_heuristic_of_rounding_is_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked from inductor's own function, whose first lines ask about the size of a sum."""
    count = TokenCount(8192)
    symbol = symbol_of(count)

    class Sizes:
        def guard_or_false(self, question: sympy.Basic) -> bool:
            return bool(count.evaluate_expr(question, fallback_value=False))

    class Kernel:
        call_ranges, reduction_depth = [symbol, 64], 0

    monkeypatch.setattr("torch._inductor.codegen.cpp.V", type("V", (), {"graph": type("G", (), {"sizevars": Sizes()})}))
    assert CppKernel.need_use_acc_helper(Kernel(), "sum", torch.float, False)
    assert count.guards == [] and count.admits(2)
    assert count.evaluate_expr(sympy.Gt(symbol, 4096), fallback_value=False)
    assert not count.admits(2), "the same question from elsewhere is a condition"


def test_named_heuristics_exist_in_this_torch() -> None:
    assert len(_advice_code()) == len(_ADVICE)


def test_count_is_the_last_input() -> None:
    gm = fx.symbolic_trace(torch.nn.Linear(2, 2))
    count = TokenCount(4)
    symbol_of(count)
    add_count_input(gm, count.count)
    *_, last = gm.graph.find_nodes(op="placeholder")
    assert last.name == "tokens" and last.meta["val"] is count.count


N, M = (sympy.Symbol(name, positive=True, integer=True) for name in ("s0", "s1"))


@pytest.mark.parametrize(
    "expr",
    [
        sympy.Eq(Mod(N, 8), 0), sympy.Lt(2048 * N, 2**31), sympy.Ne(FloorDiv(3 * N, 7), M), (Max(N, M) > 3) & (N < 70),
        sympy.Or(sympy.Eq(N, M), N >= 5), sympy.Eq(PythonMod(N, 7), 1), sympy.Eq(ModularIndexing(N, 4, 8), 2),
        sympy.Le(N**2, 5 * M), sympy.Not(sympy.Eq(N, M)), sympy.Eq(sympy.Mod(N, 3), 0), sympy.true,
        sympy.Eq(sympy.Function("unknown")(N), 3),
    ],
    ids=str,
)  # fmt: skip
def test_conditions_in_python_are_those_of_sympy(expr: sympy.Basic) -> None:
    condition = _Condition(expr)
    for n, m in itertools.product((1, 2, 3, 8, 36, 64, 71, 2**21), (1, 3, 64)):
        wanted = expr.xreplace({N: sympy.Integer(n), M: sympy.Integer(m)})
        if wanted.is_Boolean and wanted in (sympy.true, sympy.false):
            assert condition.holds({"s0": n, "s1": m}) == bool(wanted), (n, m)
        else:
            with pytest.raises(TypeError):  # SymPy cannot tell, so nothing may
                condition.holds({"s0": n, "s1": m})
