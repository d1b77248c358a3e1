"""NaN and infinity in one branch, in Gluon by hand: they reach the tokens that see them, and no other one.

The truth is the dense reference, whose masked pairs add nothing.
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from tests.kernels.gpu.gluon.by_hand import run_by_hand
from tests.kernels.gpu.interpreted_cases import SCORES, Case, draw, expected, forest
from treefx.kernels.gpu.triton_tree import attention
from treefx.kernels.gpu.triton_tree.configs import Config
from treefx.kernels.gpu.triton_tree.launch import Attention, Launch
from treefx.kernels.gpu.triton_tree.small_launches import ROW_VECTORS
from treefx.kernels.tiles import key_programs

pytestmark = pytest.mark.usefixtures("fresh_caches")
ROWS = forest([[*range(20), *range(100, 118)], [*range(20), *range(200, 211)], [*range(3), 300, 301], [500, 501]])
"""Tiles with a fork inside, some with rows of several trees."""
LEAF, COUSIN, PREFIX = 37, 45, 2


def results(
    case: Case,
    score: str,
    monkeypatch: pytest.MonkeyPatch,
    *,
    repairs: bool = True,
    launches: list[Launch] | None = None,
) -> list[Tensor]:
    """Return the output, the log-sum-exp, and gradients of q, k, v and of the boundary."""
    monkeypatch.setattr("treefx.kernels.gpu.triton_tree.launch.processors", lambda device: 3)

    def carry_out(launch: Launch) -> None:
        for name in ROW_VECTORS:
            if isinstance(numbers := launch.arguments.get(name), Tensor):
                numbers.data = numbers.double()
        run_by_hand(launch, repairs=repairs)
        if launches is not None:
            launches.append(launch)

    monkeypatch.setattr(Launch, "run", carry_out)
    chosen = Attention(case.wide, SCORES[score], "gluon", choose=lambda problem: Config(16, 32, 4, 2))
    out, lse = attention.forward_from(chosen, chosen.sources())
    grad = case.grad
    dq, pairs, _ = attention.backward_from(chosen, chosen.sources(), grad, out.contiguous(), lse.contiguous())
    return [out, lse, dq, *(tensor for pair in reversed(pairs) for tensor in pair)]


def wrong(got: Sequence[Tensor], wanted: Sequence[Tensor]) -> list[str]:
    """Return the names of the results that differ."""
    names = ("out", "lse", "dq", "dk", "dv", "dk of the boundary", "dv of the boundary")
    close = partial(torch.allclose, rtol=1e-6, atol=1e-6, equal_nan=True)
    pairs = zip(names, got, wanted[: len(got)], strict=False)
    return [name for name, first, second in pairs if not close(*map(without_infinities, (first, second)))]


def without_infinities(x: Tensor) -> Tensor:
    return x.double().where(x.isfinite(), torch.nan)


def spoiled(*places: tuple[str, float, int], outside: int = 0) -> Case:
    """Return a case with values at a feature of tokens of the last head."""
    case = draw(*ROWS, heads=(3, 1), sinks=bool(outside), outside=outside)
    given = {"q": case.wide.q, "k": case.wide.k, "v": case.wide.v, "grad": case.grad}
    if case.wide.boundary is not None:
        case.wide.boundary.hi[7:] = len(ROWS[0]) - 2  # seen, but not by the last tokens
        given |= {"k outside": case.wide.boundary.k, "v outside": case.wide.boundary.v}
    for where, value, token in places:
        given[where][:, -1, token, 3] = value
    return case


@pytest.mark.parametrize(
    ("score", "places"),
    [
        ("plain", [("q", math.nan, LEAF)]),
        ("softcap", [("k", math.inf, LEAF)]),
        ("window", [("v", math.nan, LEAF)]),
        ("alibi", [("grad", math.inf, LEAF)]),
        ("plain", [("v", math.nan, PREFIX)]),
        ("plain", [("v", math.nan, LEAF), ("grad", math.nan, COUSIN)]),
    ],
)
def test_only_what_sees_it(score: str, places: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    case = spoiled(*places)
    assert wrong(results(case, score, monkeypatch), expected(case, SCORES[score])) == []


@pytest.mark.parametrize(
    ("where", "names"),
    [("q", ["dk", "dv"]), ("k", ["dq", "dk", "dv"]), ("v", ["out", "dq", "dk"]), ("grad", ["dk", "dv"])],
)
def test_gluon_alone_spreads_it(where: str, names: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """So the test above can fail: by 0 times NaN, and by weights and deltas of rows that are NaN themselves."""
    case = spoiled((where, math.nan, LEAF))
    assert wrong(results(case, "plain", monkeypatch, repairs=False), expected(case, SCORES["plain"])) == names


def test_products_that_overflow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a gradient and a value that it does not see, each of them finite: one row, and one key, of a tile."""
    case = spoiled(("grad", 1e200, LEAF), ("v", 1e200, COUSIN))
    wanted = expected(case, SCORES["plain"])
    got = results(case, "plain", monkeypatch)
    assert [torch.equal(x.isfinite(), y.isfinite()) for x, y in zip(got, wanted, strict=False)] == [True] * 5
    alone = results(case, "plain", monkeypatch, repairs=False)
    assert not alone[2].isfinite().all() and not alone[3].isfinite().all()


@pytest.mark.parametrize("where", ["k outside", "v outside"])
def test_keys_from_outside(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second launch goes on from a result that was repaired."""
    case = spoiled((where, math.nan, 33), outside=40)
    assert wrong(results(case, "plain", monkeypatch), expected(case, SCORES["plain"])) == []


def test_lists_that_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts are repaired before they are added."""
    monkeypatch.setattr(key_programs, "_SHORTEST", 1)
    monkeypatch.setattr(key_programs, "_EVEN", 1 << 20)
    case = spoiled(("grad", math.nan, LEAF))
    launches: list[Launch] = []
    assert wrong(results(case, "plain", monkeypatch, launches=launches), expected(case, SCORES["plain"])) == []
    after = [[one.kernel.__name__ for one in launch.after] for launch in launches]
    assert ["repair_backward_keys", "sum_parts"] in after


def test_finite_results_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    case = draw(*ROWS, heads=(3, 1))
    both = [results(case, "plain", monkeypatch, repairs=repairs) for repairs in (True, False)]
    assert all(torch.equal(*pair) for pair in zip(*both, strict=True))
