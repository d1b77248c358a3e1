"""The forward in Gluon: its arithmetic and its barriers by hand in float64, and its machine code.

No interpreter of Triton's runs Gluon, and no GPU is at hand: by_hand.py runs the generated text itself.
"""

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from tests.kernels.gpu.gluon.by_hand import ORDERS, Program, run_by_hand
from tests.kernels.gpu.interpreted_cases import (
    BRANCH_AT_57,
    DEPTH_K,
    DEPTH_Q,
    ODD_ROWS,
    SCALED,
    SCORES,
    SMALL,
    Case,
    assert_equal,
    const,
    draw,
    forest,
)
from tests.kernels.gpu.stages import compile_to
from tests.kernels.gpu.test_barriers import changed, find
from treefx.kernels import memory, reference
from treefx.kernels.gpu.triton_tree import attention
from treefx.kernels.gpu.triton_tree.configs import Config
from treefx.kernels.gpu.triton_tree.launch import Attention, Launch
from treefx.kernels.gpu.triton_tree.small_launches import scratch_bytes
from treefx.kernels.score import Score
from treefx.tools.bench.attention import kernel as bench_kernel
from treefx.tools.bench.attention.kernel import run
from treefx.tools.kernels.barriers import races, unmet_releases, unmet_stores
from treefx.tools.kernels.operands import beside_products, overwritten_operands

pytestmark = pytest.mark.usefixtures("fresh_caches")
COMPILED = (
    bench_kernel.Case(torch.float16, 80, 80),
    bench_kernel.Case(torch.bfloat16, 192, 128, 4),
    bench_kernel.Case(torch.bfloat16, 64, 64, 4, ("alibi", "boundary")),
)
"""Of the 35 that ``treefx bench kernel --full`` compiles: the other type, the widest heads, and all that two launches
and vectors of rows add. test_triton_ahead_of_time.py has heads of 96 and 128, and all features at once.
"""
OF_SCORES = [name for name in SCORES if name not in ("bias", "relative", "clamped", "keys of the query")]
"""Those that load nothing by query and key."""
_SEEN = ("where", ("ne", DEPTH_K, const(0)), const(1), const(0))
FAR = {
    "product": Score(SCALED, ("le", ("mul", DEPTH_Q, const(10**9)), ("mul", DEPTH_K, const(10**9)))),
    "constant": Score(SCALED, ("le", ("where", ("eq", DEPTH_K, const(1)), const(2**62), DEPTH_K), DEPTH_Q)),
    "cast": Score(
        SCALED,
        ("le", ("int", ("mul", ("float", DEPTH_K), const(1e9))), ("int", ("mul", ("float", DEPTH_Q), const(1e9)))),
    ),
}
"""Whole numbers of more than 32 bits: of the query's own depth, of all depths but 1, of floats."""
HALVES = ("int", ("div", DEPTH_K, const(2)))
"""A float is made whole, and is no larger than a position."""
OF_BLOOM = Score(("add", SCALED, ("mul", ("load", 3, ("head",)), ("mul", ("sub", DEPTH_K, const(1)), _SEEN))))
"""Places under a mask of 0 and 1."""
LATER = {"of the forest": Score(SCALED, ("le", DEPTH_K, DEPTH_Q)), "of a layer": SCORES["no product"]}
"""Scores that read whole numbers for what they are; a condition's belong to the forest."""


def by_hand(
    case: Case,
    score: Score,
    monkeypatch: pytest.MonkeyPatch,
    *,
    config: Config = Config(32, 16, 4, 2),
    order: Sequence[int] = ORDERS[0],
    change: tuple[str, str] | None = None,
    side_by_side: int = 3,
) -> list[Tensor]:
    """Return output and log-sum-exp of all keys of a case, of a kernel with a change in its text.

    By so few programs ``side_by_side`` that each has several lists of tiles.
    """
    monkeypatch.setattr("treefx.kernels.gpu.triton_tree.launch.processors", lambda device: side_by_side)

    def carry_out(launch: Launch) -> None:
        file = sys.modules[launch.kernel.fn.__module__].__file__
        text = Path(str(file)).read_text(encoding="utf-8")
        if change is not None:
            if change[0] not in text:
                raise ValueError(f"the kernel must hold {change[0]!r}")
            text = text.replace(*change)
        run_by_hand(launch, order=order, text=text)

    monkeypatch.setattr(Launch, "run", carry_out)
    chosen = Attention(case.wide, score, "gluon", choose=lambda problem: config)
    return list(attention.forward_from(chosen, chosen.sources()))


@pytest.mark.parametrize("outside", [0, 70])
@pytest.mark.parametrize("name", OF_SCORES)
def test_scores(name: str, outside: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With keys from outside, some unseen, the second launch goes on from the first's results.

    One program has all lists of a head: it goes on from another place for each.
    """
    case = draw(*SMALL, heads=(6, 2), batch=2, outside=outside, sinks=name in ("plain", "softcap"))
    got = by_hand(case, SCORES[name], monkeypatch, side_by_side=1)
    rounded = outside or name == "softcap"  # what goes from launch to launch has 32 bits; a series stands for tanh
    assert_equal(got, list(reference.forward(case.wide, SCORES[name])), 1e-6 if rounded else 1e-10)


@pytest.mark.parametrize(
    ("heads", "widths", "config", "order"),
    [
        ((7, 1), (24, 40), Config(32, 16, 4, 2), ORDERS[0]),
        ((5, 1), (16, 16), Config(64, 16, 4, 3), ORDERS[1]),
        ((3, 3), (80, 72), Config(16, 32, 4, 2), ORDERS[2]),
        ((24, 1), (8, 8), Config(16, 16, 4, 3), ORDERS[1]),
    ],
)
def test_shapes_and_orders(
    heads: tuple[int, int],
    widths: tuple[int, int],
    config: Config,
    order: tuple[int, int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Heads in pieces, of which the last overhangs; tiles that begin within a token; long lists, full and partial."""
    case = draw(*BRANCH_AT_57, heads=heads, widths=widths, sinks=True)
    got = by_hand(case, SCORES["plain"], monkeypatch, config=config, order=order)
    assert_equal(got, list(reference.forward(case.wide, SCORES["plain"])), 1e-10)


@pytest.mark.parametrize("sent", [False, True])
@pytest.mark.parametrize("name", FAR)
def test_whole_numbers_of_more_bits_would_be_wrong(name: str, sent: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values of a query or a key have 32 bits, and so have pairs of them; the first tokens would not show it.

    They are asserted where they are made; what a pair makes of them is refused by its score.
    """
    case = draw(*SMALL, heads=(2, 1))
    depth, *others = case.wide.buffers
    case = replace(case, wide=replace(case.wide, buffers=[depth := depth.long(), *others]))
    if sent:
        memory.remember(depth.clone(), depth)
    wanted = list(reference.forward(case.wide, FAR[name]))
    with pytest.raises((RuntimeError, AssertionError), match="must fit 32 bits"):
        by_hand(case, FAR[name], monkeypatch)
    asserting_nothing(monkeypatch)
    with pytest.raises(AssertionError):
        assert_equal(by_hand(case, FAR[name], monkeypatch), wanted, 1e-10)
    halves = Score(SCALED, ("le", HALVES, DEPTH_Q))
    scores = {name: SCORES[name] for name in OF_SCORES} | {"of bloom": OF_BLOOM, "halves": halves}
    codes = {other: Attention(case.narrow, score, "gluon").code for other, score in scores.items()}
    assert [other for other, code in codes.items() if code.leaves_32_bits] == ["powers"]


def asserting_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plant the mistake of not checking numbers of later batches."""
    monkeypatch.setattr(torch, "_assert_async", lambda *_: None)
    monkeypatch.setattr(Program, "tl_device_assert", lambda *_: None)


@pytest.mark.parametrize("sent", [False, True])
@pytest.mark.parametrize("name", LATER)
@pytest.mark.parametrize("last", [2**31 - 1, 2**31])
def test_later_numbers_of_more_bits_are_refused(
    last: int, name: str, sent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host does not synchronize to check them: the kernel of score values asserts that they fit."""
    case = draw(*SMALL, heads=(2, 1))
    depth, *others = case.wide.buffers
    depth = depth.long()
    depth[-1] = last
    case = replace(case, wide=replace(case.wide, buffers=[depth, *others]))
    if sent:
        memory.remember(depth.clone(), depth)
    wanted = list(reference.forward(case.wide, LATER[name]))
    if last < 2**31:
        assert_equal(by_hand(case, LATER[name], monkeypatch), wanted, 1e-10)
        return
    with pytest.raises((RuntimeError, AssertionError), match="must fit 32 bits"):
        by_hand(case, LATER[name], monkeypatch)
    asserting_nothing(monkeypatch)
    with pytest.raises(AssertionError):
        assert_equal(by_hand(case, LATER[name], monkeypatch), wanted, 1e-10)


@pytest.mark.parametrize("name", ODD_ROWS)
@pytest.mark.parametrize("side_by_side", [1, 1000])
def test_odd_forests(name: str, side_by_side: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One program for all lists, and one for each."""
    case = draw(*forest(ODD_ROWS[name]), heads=(6, 2), sinks=True)
    got = by_hand(case, SCORES["plain"], monkeypatch, side_by_side=side_by_side)
    assert_equal(got, list(reference.forward(case.wide, SCORES["plain"])), 1e-10)


@pytest.mark.parametrize("change", [None, ("(feature < 24)", "(feature < 32)")])
def test_queries_lie_anywhere(change: tuple[str, str] | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The heads of a token side by side, and behind each of them no numbers, of which zeros of keys make no zeros."""
    case = draw(*BRANCH_AT_57, heads=(6, 2), widths=(24, 16), batch=2)
    memory = torch.full((2, case.wide.q.shape[2] + 1, 7, 32), torch.nan, dtype=torch.float64)
    q = memory[:, 1:, :6, :24].transpose(1, 2)
    case = replace(case, wide=replace(case.wide, q=q.copy_(case.wide.q)))
    chosen = Attention(case.wide, SCORES["plain"], "gluon")
    assert chosen.forward(chosen.own_keys(), q, q).arguments["Q"] is q
    got = by_hand(case, SCORES["plain"], monkeypatch, change=change)
    wanted = list(reference.forward(case.wide, SCORES["plain"]))
    if change is None:
        assert_equal(got, wanted, 1e-10)
    else:
        assert got[0].isnan().any()


MISTAKES = {
    "keys are released before their product": (
        "dot = warpgroup_mma_wait(1, deps=[dot])",
        "mbarrier.arrive(k_empty.index(stage), count=1); dot = warpgroup_mma_wait(1, deps=[dot])",
    ),
    "the wait for keys ends no product": (
        "dot = warpgroup_mma_wait(1, deps=[dot])",
        "dot = warpgroup_mma_wait(2, deps=[dot])",
    ),
    "keys of a later tile are waited for by the wrong phase": (
        "mbarrier.wait(k_full.index((turn + 1) % STAGES), ((turn + 1) // STAGES) & 1",
        "mbarrier.wait(k_full.index((turn + 1) % STAGES), (turn // STAGES) & 1",
    ),
    "no group waits for values": ("mbarrier.wait(v_full.index(before)", "(v_full.index(before)"),
    "values are released before their product": (
        "mbarrier.wait(v_full.index(before), ((turn - 1) // STAGES) & 1)",
        "mbarrier.wait(v_full.index(before), ((turn - 1) // STAGES) & 1); mbarrier.arrive(v_empty.index(before), "
        "count=1)",
    ),
    "copies do not wait for an empty buffer": ("mbarrier.wait(v_empty.index(stage), phase)", "pass"),
    "fewer bytes are expected": (
        "mbarrier.expect(v_full.index(stage), BLOCK_N * 32)",
        "mbarrier.expect(v_full.index(stage), BLOCK_N * 30)",
    ),
    "one group empties for both": (
        "mbarrier.init(k_empty.index(number), count=2)",
        "mbarrier.init(k_empty.index(number), count=1)",
    ),
    "partial tiles are not masked": ("range(tl.maximum(first + 1, first_partial), last)", "range(last, last)"),
    "values are not rescaled": (
        "out_0 = out_0 * tl.convert_layout(rescale",
        "out_0 = out_0 + 0 * tl.convert_layout(rescale",
    ),
    "both groups have the first rows": ("WHO * ROWS", "0 * ROWS"),
    "products do not see the queries": ("q_0.store(queries_0)\n        fence_async_shared()", "q_0.store(queries_0)"),
    "the next list's first keys are not waited for": ("(entry + 1 < last) | more", "entry + 1 < last"),
    "tiles of the lists before are not counted": ("before_all = first - done", "before_all = first"),
    "the last values of a list are kept": (
        "mbarrier.arrive(v_empty.index(stage), count=1)\n        if GOES_ON",
        "if GOES_ON",
    ),
    "all heads read the first one's queries": ("head_number.to(tl.int64) * q_head", "0"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_seen(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the result, or because groups wait for ever, in one of the orders at least."""
    case = draw(*BRANCH_AT_57, heads=(2, 1))
    wanted = list(reference.forward(case.wide, SCORES["plain"]))
    seen = 0
    for order in ORDERS:
        try:
            assert_equal(
                by_hand(case, SCORES["plain"], monkeypatch, order=order, change=MISTAKES[mistake]), wanted, 1e-10
            )
        except (AssertionError, RuntimeError):
            seen += 1
    assert seen


@pytest.mark.parametrize("case", COMPILED, ids=str)
def test_compiled_within_bounds(case: bench_kernel.Case) -> None:
    """And what runs before them: of keys from outside once for them, and once for the own keys."""
    found = list(run(90, paths=("gluon",), cases=[case]))
    assert not any(record["problems"] for record in found)
    records = [record for record in found if record["kernel"] not in bench_kernel._WITHOUT_PRODUCTS]
    kernels = ["forward", "backward_keys", "backward_queries"] * (1 + ("boundary" in case.features))
    assert [record["kernel"] for record in records] == kernels
    for record in records:
        assert record["race_free"]
        bare = not case.features and record["kernel"] != "backward_keys"
        assert record["spill_bytes"] <= (12 if bare else 64)


@pytest.fixture(scope="module")
def texts(fresh_caches: None) -> tuple[str, str]:
    """The TTGIR and the PTX of a small kernel, which says of itself what memory its descriptors take."""
    launch = next(bench_kernel._launches(bench_kernel.Case(torch.bfloat16, 64, 64, 4), "gluon", 90))
    compiled = compile_to("ptx", launch, 90)
    assert compiled.metadata["global_scratch_size"] == scratch_bytes(launch.kernel, has_low=False)
    return compiled.asm["ttgir"], compiled.asm["ptx"]


def test_the_guard_follows_its_barriers(texts: tuple[str, str]) -> None:
    """A release before a wait, a wait that ends no product, a wait left out: each in one line of the first group."""
    ttgir, ptx = texts
    assert races(ttgir) == [] and unmet_releases(ptx) == []
    loop = find(ttgir, "scf.for", after=find(ttgir, "default {"))
    wait = find(ttgir, "warp_group_dot_wait", "pendings = 1", after=loop)
    release = find(ttgir, "arrive_barrier", after=wait)
    lines = ttgir.splitlines()
    early = changed(changed(ttgir, release), wait, lines[release - 1], lines[release], lines[wait])
    assert any("is released while a product of it is under way" in text for text in races(early))
    idle = changed(ttgir, wait, lines[wait].replace("pendings = 1", "pendings = 2"))
    assert any("is released while a product of it is under way" in text for text in races(idle))
    values = changed(ttgir, find(ttgir, "wait_barrier", after=loop))
    assert any("is read by ttng.warp_group_dot when not held" in text for text in races(values))
    tiles = find(ttgir, "scf.for", after=find(ttgir, "scf.for", after=find(ttgir, "partition1(")))
    full = changed(ttgir, find(ttgir, "wait_barrier", after=tiles))
    assert any("is read by ttng.warp_group_dot when not held" in text for text in races(full))


def test_the_guard_follows_the_queries(texts: tuple[str, str]) -> None:
    """Each group stores its own: the first one's fence left out, or the meeting of its warps after it."""
    ttgir, ptx = texts
    assert unmet_stores(ptx) == []
    (text,) = races(changed(ttgir, find(ttgir, "fence_async_shared", after=find(ttgir, "default {"))))
    assert text == "default: %first_q_0 is stored and read by ttng.warp_group_dot without a fence"
    fence = find(ptx, "fence.proxy.async", after=find(ptx, "st.shared", after=find(ptx, "setmaxnreg.dec")))
    (text,) = unmet_stores(changed(ptx, find(ptx, "bar.sync", after=fence)))
    assert "multiplies what not all warps of the group may have stored" in text


def test_a_wait_that_leaves_all_products_is_none() -> None:
    products = ["wgmma.mma_async a;", "wgmma.commit_group;"] * 2
    after = ["bar.sync 0;", "@p mbarrier.arrive.shared b;"]
    for left, missing in ((1, 0), (2, 1)):
        assert len(unmet_releases("\n".join([*products, f"wgmma.wait_group.sync.aligned {left};", *after]))) == missing


def test_operands_of_products_under_way() -> None:
    """Written before the wait, by a wide instruction too, or after it; and what begins meanwhile."""
    product = "/*0*/ HGMMA.64x64x16.F32.BF16 R8, R40, gdesc[UR4], R8, gsb0 ;"
    settled = "/*2*/ WARPGROUP.DEPBAR.LE gsb0, 0x0 ;"
    pack, wide = "/*1*/ F2FP.BF16 R43, R1, R2 ;", "/*1*/ @!P0 LDS.128 R38, [R0] ;"
    store, exponential = "/*1*/ STS [R43], R43 ;", "/*1*/ MUFU.EX2 R60, R61 ;"
    for line, count in ((pack, 1), (wide, 1), (store, 0), (exponential, 0)):
        assert len(overwritten_operands("\n".join([product, line, settled]))) == count
        assert overwritten_operands("\n".join([product, settled, line])) == []
    earlier = product.replace("R40", "UR40").replace("UR40, ", "")
    assert overwritten_operands("\n".join([product, earlier, settled.replace("0x0", "0x1"), pack])) == []
    assert len(overwritten_operands("\n".join([earlier, product, settled.replace("0x0", "0x1"), pack]))) == 1
    assert beside_products("\n".join([product, exponential, exponential, settled])) == (2,)
