"""Test the one-pass backward in Gluon: by hand in float64, its barriers, its machine code."""

import itertools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from tests.kernels.gpu.gluon.by_hand import ORDERS, run_by_hand
from tests.kernels.gpu.interpreted_cases import (
    BRANCH_AT_57,
    ODD_ROWS,
    SCORES,
    Case,
    assert_equal,
    draw,
    expected,
    forest,
)
from tests.kernels.gpu.test_barriers import changed, find
from treefx.kernels.gpu.triton_tree import attention
from treefx.kernels.gpu.triton_tree.configs import Config
from treefx.kernels.gpu.triton_tree.launch import Attention, Launch
from treefx.kernels.gpu.triton_tree.small_launches import ROW_VECTORS, scratch_bytes
from treefx.kernels.score import Score
from treefx.tools.bench.attention import kernel as bench_kernel
from treefx.tools.kernels import ahead_of_time
from treefx.tools.kernels.ahead_of_time import CompileReport
from treefx.tools.kernels.barriers import races, unmet_releases, unmet_stores
from treefx.tools.kernels.instructions import disassembled, names_in_loops

pytestmark = pytest.mark.usefixtures("fresh_caches")
TILES = Config(64, 128, 4, 3)
"""The only tiles of the kernel: each group of warps multiplies 64 rows with 64 features of 64 keys."""
EXACT = 1e-10


def by_hand(
    case: Case,
    score: Score,
    monkeypatch: pytest.MonkeyPatch,
    *,
    order: Sequence[int] = ORDERS[0],
    change: tuple[str, str] | None = None,
    early: bool = False,
) -> tuple[list[Tensor], list[Tensor]]:
    """Return computed and expected gradients of a case: q, k, v, and the boundary."""

    def carry_out(launch: Launch) -> None:
        if launch.kernel.__name__.startswith("repair"):  # it would hide mistakes
            return
        text = None
        if launch.kernel.__name__ == "backward_once" and change is not None:
            text = Path(str(sys.modules[launch.kernel.fn.__module__].__file__)).read_text(encoding="utf-8")
            if change[0] not in text:
                raise ValueError(f"the kernel must hold {change[0]!r}")
            text = text.replace(*change)
        for name in (*ROW_VECTORS, "SumsQ"):
            if isinstance(numbers := launch.arguments.get(name), Tensor):
                numbers.data = numbers.double()  # in full, as everything here: a device has 32 bits
        run_by_hand(launch, order=order, text=text, early=early)

    monkeypatch.setattr(Launch, "run", carry_out)
    out, lse, *wanted = expected(case, score)
    chosen = Attention(case.wide, score, "gluon", once=True, choose=lambda problem: TILES)
    dq, pairs, _ = attention.backward_from(chosen, chosen.sources(), case.grad, out.contiguous(), lse.contiguous())
    got = [dq, *(tensor for pair in reversed(pairs) for tensor in pair)]
    return got, wanted[: len(got)]


@pytest.mark.parametrize(
    ("heads", "value_width", "outside", "score", "order", "early"),
    [
        ((1, 1), 128, 0, "plain", ORDERS[0], False),
        ((8, 1), 64, 0, "plain", ORDERS[1], True),
        ((4, 2), 128, 70, "plain", ORDERS[2], False),
        ((7, 1), 128, 70, "window", ORDERS[0], True),
        ((3, 1), 128, 0, "alibi", ORDERS[1], False),
    ],
)
def test_gradients(
    heads: tuple[int, int],
    value_width: int,
    outside: int,
    score: str,
    order: tuple[int, int, int],
    early: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Cover groups of 1 to 8 heads, boundary keys, and scores that read queries and keys.

    Boundary keys add to the same sums.
    """
    case = draw(*BRANCH_AT_57, heads=heads, widths=(128, value_width), outside=outside, sinks=score == "plain")
    assert_equal(*by_hand(case, SCORES[score], monkeypatch, order=order, early=early), EXACT)


@pytest.mark.parametrize("name", ODD_ROWS)
def test_odd_forests(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = draw(*forest(ODD_ROWS[name]), heads=(2, 2), widths=(128, 128))
    assert_equal(*by_hand(case, SCORES["plain"], monkeypatch), EXACT)


STORED = "mbarrier.arrive(slopes_full.index(side), count=1)"
MISTAKES = {
    "slopes of the other group are not waited for": (
        "mbarrier.wait(slopes_full.index(side), (turn // 2) & 1)",
        "pass",
    ),
    "slopes are waited for by the wrong phase": ("(turn // 2) & 1)", "(turn // 2 + 1) & 1)"),
    "slopes have one buffer": ("side = turn % 2", "side = 0 * turn"),
    "one group speaks for both": (
        "init(slopes_full.index(number), count=2)",
        "init(slopes_full.index(number), count=1)",
    ),
    "no fence makes slopes seen": (f"fence_async_shared()\n        {STORED}", STORED),
    "products are added before they are there": ("dq = warpgroup_mma_wait(1, deps=[dq])", "pass"),
    "both groups have the first features": ("first_k_0.slice(WHO * 64", "first_k_0.slice(0"),
    "both groups add to the first features": ("dq, WHO * 64, 128", "dq, 0, 128"),
    "the keys of the second group are left out": ("slopes_s.index(side * 2 + 1)", "slopes_s.index(side * 2)"),
    "all heads add to the sums of the first": ("tl.program_id(1).to(tl.int64) * packed_rows * 128", "0"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_seen(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Detect each mistake by a wrong result or a deadlock, in at least one order."""
    case = draw(*BRANCH_AT_57, heads=(2, 2), widths=(128, 128))
    for order, early in itertools.product(ORDERS, (True, False)):
        try:
            found = by_hand(case, SCORES["plain"], monkeypatch, order=order, change=MISTAKES[mistake], early=early)
            assert_equal(*found, EXACT)
        except (AssertionError, RuntimeError):
            return
    pytest.fail("nothing was seen")


@pytest.fixture(scope="module")
def compiled(fresh_caches: None) -> tuple[dict[str, Any], Any]:
    """The record of the kernel in ``treefx bench kernel``, and the kernel."""
    case = bench_kernel.Case(torch.bfloat16, 128, 128, 4)
    launches = bench_kernel._launches(case, "gluon", 90)
    (launch,) = (one for one in launches if one.kernel.__name__ == "backward_once")
    found = []

    def compile_launch(launch: Launch, arch: int) -> CompileReport:
        found.append(ahead_of_time.compile_kernel(launch, arch))
        return ahead_of_time._report(*found[0])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench_kernel, "compile_launch", compile_launch)
        record = bench_kernel._record(case, "gluon", launch, 90)
    ((_, kernel),) = found
    assert kernel.metadata.global_scratch_size == scratch_bytes(launch.kernel, has_low=False)
    return record, kernel


def test_what_a_logit_takes(compiled: tuple[dict[str, Any], Any]) -> None:
    """Over full tiles and under the mask, in both groups; exponentials overlap with products."""
    record, _ = compiled
    found = record["instructions_per_logit"]
    assert len(found) == 4 and 0 < max(found[::2]) <= 12.5 and max(found[1::2]) <= 15.5
    assert (record["tile"], record["overlap"]) == ("64x128 w4 s3", [32] * 4) and 0 < record["spill_bytes"] <= 256


def test_its_loops_add_without_reading_back(compiled: tuple[dict[str, Any], Any]) -> None:
    """Count each loop's instructions: 8 reductions per thread and tile, at most 5 reloads.

    A reduction has 16 bytes. No atomic returns the old value.
    """
    loops = names_in_loops(disassembled(compiled[-1].asm["cubin"]))
    assert len(loops) == 4
    for number, names in enumerate(loops):
        assert (names["REDG"], names["ATOMG"], names["HGMMA"], names["STSM"]) == (8, 0, 32, 4)
        assert names["LDL"] <= (12 if number % 2 else 5) and names["STL"] == 0


def test_the_guard_follows_its_slopes(compiled: tuple[dict[str, Any], Any]) -> None:
    """Detect a missing wait, arrival or fence, and products that never end.

    Each change is in the first loop of the first group.
    """
    ttgir, ptx = compiled[-1].asm["ttgir"], compiled[-1].asm["ptx"]
    assert races(ttgir) == [] and unmet_releases(ptx) == [] and unmet_stores(ptx) == []
    lines = ttgir.splitlines()
    loop = find(ttgir, "scf.for", after=find(ttgir, "default {"))
    stored = find(ttgir, "local_store", after=loop)
    fence = find(ttgir, "fence_async_shared", after=stored)
    arrival = find(ttgir, "arrive_barrier", after=fence)
    wait = find(ttgir, "wait_barrier", after=arrival)
    for missing in (arrival, wait):
        assert any("slopes_s is read before all groups have stored" in text for text in races(changed(ttgir, missing)))
    assert any("slopes_s is stored and read" in text for text in races(changed(ttgir, fence)))
    idle = ttgir
    for number in range(loop, find(ttgir, "scf.yield", after=wait)):
        if "warp_group_dot_wait" in lines[number]:
            idle = changed(idle, number, lines[number].split("{pendings")[0] + "{pendings = 9 : i32}")
    assert any("may be stored into while a product of it is under way" in text for text in races(idle))
