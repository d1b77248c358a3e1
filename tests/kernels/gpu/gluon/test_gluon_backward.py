"""The backward in Gluon: its arithmetic and its barriers by hand in float64, and its machine code."""

import itertools
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from tests.kernels.gpu.gluon.by_hand import ORDERS, run_by_hand
from tests.kernels.gpu.gluon.test_gluon import OF_SCORES
from tests.kernels.gpu.interpreted_cases import (
    BRANCH_AT_57,
    ODD_ROWS,
    SCORES,
    SMALL,
    Case,
    assert_equal,
    draw,
    expected,
    forest,
)
from tests.kernels.gpu.stages import compile_to
from tests.kernels.gpu.test_barriers import changed, find
from treefx.kernels.gpu.triton_tree import attention
from treefx.kernels.gpu.triton_tree.configs import Config
from treefx.kernels.gpu.triton_tree.launch import Attention, Launch
from treefx.kernels.gpu.triton_tree.small_launches import ROW_VECTORS, scratch_bytes
from treefx.kernels.score import Score
from treefx.tools.bench.attention import kernel as bench_kernel
from treefx.tools.bench.attention.kernel import run
from treefx.tools.kernels.barriers import races, unmet_releases

pytestmark = pytest.mark.usefixtures("fresh_caches")
IN_FULL, ROUNDED = 1e-10, 1e-6
"""What goes from launch to launch, and parts of lists, have 32 bits; a series stands for tanh."""


def by_hand(
    case: Case,
    score: Score,
    monkeypatch: pytest.MonkeyPatch,
    config: Config,
    *,
    order: Sequence[int] = ORDERS[0],
    change: tuple[str, str] | None = None,
    side_by_side: int = 3,
) -> tuple[list[Tensor], list[Tensor]]:
    """Return the kernels' and the right gradients of a case: of q, k, v and the boundary.

    By so few programs ``side_by_side`` that each of dq has several lists of tiles.
    """
    monkeypatch.setattr("treefx.kernels.gpu.triton_tree.launch.processors", lambda device: side_by_side)

    def carry_out(launch: Launch) -> None:
        text = None
        if change is not None and launch.kernel.__name__ != "prologue":
            file = sys.modules[launch.kernel.fn.__module__].__file__
            text = Path(str(file)).read_text(encoding="utf-8")
            if change[0] not in text:
                raise ValueError(f"the kernel must hold {change[0]!r}")
            text = text.replace(*change)
        for name in ROW_VECTORS:
            if isinstance(numbers := launch.arguments.get(name), Tensor):
                numbers.data = numbers.double()  # in full, as everything here: a device has 32 bits
        run_by_hand(launch, order=order, text=text)

    monkeypatch.setattr(Launch, "run", carry_out)
    out, lse, *wanted = expected(case, score)
    chosen = Attention(case.wide, score, "gluon", choose=lambda problem: config)
    given = case.grad, out.contiguous(), lse.contiguous()
    dq, pairs, _ = attention.backward_from(chosen, chosen.sources(), *given)
    got = [dq, *(tensor for pair in reversed(pairs) for tensor in pair)]
    return got, wanted[: len(got)]


@pytest.mark.parametrize("outside", [0, 70])
@pytest.mark.parametrize("name", OF_SCORES)
def test_scores(name: str, outside: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With keys from outside, some unseen, the second launch of dq goes on from the first.

    One program has all lists of a head: it goes on from another place for each.
    """
    case = draw(*SMALL, heads=(4, 1), batch=2, outside=outside, sinks=name in ("plain", "softcap"))
    got, wanted = by_hand(case, SCORES[name], monkeypatch, Config(16, 32, 4, 2), side_by_side=1)
    exact = ROUNDED if name == "softcap" else IN_FULL
    assert_equal(got[:1], wanted[:1], ROUNDED if outside else exact)
    assert_equal(got[1:], wanted[1:], exact)


@pytest.mark.parametrize(
    ("heads", "widths", "config", "order", "exact"),
    [
        ((7, 1), (24, 40), Config(32, 32, 4, 2), ORDERS[0], IN_FULL),
        ((2, 2), (80, 72), Config(16, 32, 4, 3), ORDERS[1], IN_FULL),
        ((4, 1), (16, 16), Config(64, 64, 4, 2), ORDERS[2], IN_FULL),
        ((24, 1), (8, 8), Config(16, 64, 4, 3), ORDERS[0], ROUNDED),
    ],
)
def test_shapes_and_orders(
    heads: tuple[int, int],
    widths: tuple[int, int],
    config: Config,
    order: tuple[int, int, int],
    exact: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Heads in pieces, of which the last overhangs; tiles that begin within a token; long lists, one that is cut."""
    case = draw(*BRANCH_AT_57, heads=heads, widths=widths, sinks=True)
    got, wanted = by_hand(case, SCORES["plain"], monkeypatch, config, order=order)
    assert_equal(got, wanted, exact)
    assert_equal(got[:1], wanted[:1], IN_FULL)


@pytest.mark.parametrize("name", ODD_ROWS)
@pytest.mark.parametrize("side_by_side", [1, 1000])
def test_odd_forests(name: str, side_by_side: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One program for all lists, and one for each."""
    case = draw(*forest(ODD_ROWS[name]), heads=(6, 2), sinks=True)
    got, wanted = by_hand(case, SCORES["plain"], monkeypatch, Config(16, 32, 4, 2), side_by_side=side_by_side)
    assert_equal(got, wanted, IN_FULL)


SETTLED = "dk_0, dv_0 = warpgroup_mma_wait(0, deps=[dk_0, dv_0, ])"
RELEASED = "mbarrier.arrive(empty.index(stage), count=1)"
OF_QUERIES, KEYS_FREE = "dq_0 = warpgroup_mma_wait(0, deps=[dq_0, ])", "mbarrier.arrive(k_empty.index(stage), count=1)"


def swapped(first: str, second: str, depth: int) -> tuple[str, str]:
    indented = "\n" + 4 * depth * " "
    return first + indented + second, second + indented + first


MISTAKES = {
    "rows are released before their products": swapped(SETTLED, RELEASED, 2),
    "slopes are used before their product": ("warpgroup_mma_wait(1, deps=[dp])", "warpgroup_mma_wait(2, deps=[dp])"),
    "no group waits for gradients": ("mbarrier.wait(grad_full.index(stage), phase)", "pass"),
    "rows are waited for by the wrong phase": ("(q_full.index(stage), phase)", "(q_full.index(stage), 1 - phase)"),
    "copies do not wait for an empty buffer": ("mbarrier.wait(empty.index(stage), ((turn // STAGES) & 1) ^ 1)", "pass"),
    "fewer bytes are expected": ("expect(grad_full.index(stage), BLOCK_M * 36)", "expect(grad_full.index(stage), 2)"),
    "one group empties for both": ("init(empty.index(number), count=2)", "init(empty.index(number), count=1)"),
    "no group waits for the tile's keys": ("mbarrier.wait(kv_full, 0)", "pass"),
    "partial tiles are left out": ("range(first_partial, last)", "range(last, last)"),
    "full tiles are left out": ("range(first, first_partial)", "range(first, first)"),
    "both groups have the first keys": ("WHO * KEYS", "0 * KEYS"),
    "keys are released before their product": swapped(OF_QUERIES, KEYS_FREE, 3),
    "no group waits for the gradients of queries": ("mbarrier.wait(grad_full, number & 1)", "pass"),
    "both groups have the first gradients": ("block * BLOCK_M + BLOCK_M // 2", "block * BLOCK_M"),
    "rows of the next list are copied over those in use": ("mbarrier.wait(rows_empty, (number & 1) ^ 1)", "pass"),
    "one group gives up the rows of both": ("init(rows_empty, count=2)", "init(rows_empty, count=1)"),
    "rows of the next list are not waited for": ("mbarrier.wait(q_full, number & 1)", "mbarrier.wait(q_full, 0)"),
    "tiles of the lists before are not counted": ("entry - first + done", "entry - first"),
    "the softmax is not differentiated": ("ds = slope * (dp - row_delta)", "ds = slope * dp"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_seen(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the result, or because groups wait for ever, in one of the orders at least."""
    case = draw(*BRANCH_AT_57, heads=(1, 1))
    for order in ORDERS:
        try:
            found = by_hand(
                case, SCORES["plain"], monkeypatch, Config(16, 32, 4, 2), order=order, change=MISTAKES[mistake]
            )
            assert_equal(*found, IN_FULL)
        except (AssertionError, RuntimeError):
            return
    pytest.fail("nothing was seen")


def test_what_a_logit_takes() -> None:
    """The forward too: over full tiles and under the mask, in both groups; exponentials overlap with products.

    ``test_gluon_once.py`` has the backward in one pass.
    """
    case = bench_kernel.Case(torch.bfloat16, 128, 128, 4)
    forward, keys, queries = itertools.islice(run(90, paths=("gluon",), cases=[case]), 3)
    kernels = ["forward", "backward_keys", "backward_queries"]
    assert [record["kernel"] for record in (forward, keys, queries)] == kernels
    for record, full, masked in ((forward, 8.5, 13), (keys, 9.5, 13), (queries, 7, 11)):
        found = record["instructions_per_logit"]
        assert len(found) == 4 and 0 < max(found[::2]) <= full and max(found[1::2]) <= masked
    assert (forward["tile"], forward["overlap"]) == ("128x128 w4 s2", [0, 66, 66, 0] * 2), "64 logits and 2 rows"
    assert (keys["tile"], keys["overlap"]) == ("64x128 w4 s3", [32] * 4)
    assert (queries["tile"], queries["overlap"]) == ("128x128 w4 s2", [64, 0] * 4)


@pytest.fixture(scope="module")
def launches(fresh_caches: None) -> dict[str, tuple[Launch, str, str]]:
    """The kernels of a small case with their TTGIR and PTX."""
    found = {}
    for launch in bench_kernel._launches(bench_kernel.Case(torch.bfloat16, 64, 64, 4), "gluon", 90):
        if launch.kernel.__name__ != "forward":
            compiled = compile_to("ptx", launch, 90)
            assert compiled.metadata["global_scratch_size"] == scratch_bytes(launch.kernel, has_low=False)
            found[launch.kernel.__name__] = launch, compiled.asm["ttgir"], compiled.asm["ptx"]
    return found


@pytest.mark.parametrize("name", ["backward_keys", "backward_queries"])
def test_the_guard_follows_its_barriers(name: str, launches: dict[str, tuple[Launch, str, str]]) -> None:
    """A release before the last wait, and that wait left out: each in the first group's first loop."""
    _, ttgir, ptx = launches[name]
    assert races(ttgir) == [] and unmet_releases(ptx) == []
    loop = find(ttgir, "scf.for", after=find(ttgir, "default {"))
    product = find(ttgir, "warp_group_dot ", "dot_op", after=loop)
    wait = find(ttgir, "warp_group_dot_wait", "pendings = 0", after=product)
    release = find(ttgir, "arrive_barrier", after=wait)
    lines = ttgir.splitlines()
    early = changed(changed(ttgir, release), wait, lines[release - 1], lines[release], lines[wait])
    assert any("is released while a product of it is under way" in text for text in races(early))
    idle = changed(ttgir, wait, lines[wait].replace("pendings = 0", "pendings = 3"))
    assert any("is released while a product of it is under way" in text for text in races(idle))
    rows = changed(ttgir, find(ttgir, "wait_barrier", after=loop))
    assert any("is read by ttng.warp_group_dot when not held" in text for text in races(rows))
