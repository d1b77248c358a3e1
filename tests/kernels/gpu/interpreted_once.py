"""The backward in one pass, and in two for the same bits every time, in Triton's interpreter against float64.

Not collected by itself: test_triton_interpreter.py runs it in a process with TRITON_INTERPRET=1.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import pytest
import torch

from tests.kernels.gpu.interpreted_cases import (
    BRANCH_AT_27,
    BRANCH_AT_57,
    SCORES,
    SMALL,
    assert_equal,
    check,
    computed,
    draw,
    expected,
    forest,
)
from tests.kernels.gpu.planting import planted, template
from treefx.kernels import tree_attention
from treefx.kernels.gpu.triton_tree import attention, paths
from treefx.kernels.gpu.triton_tree.configs import Config
from treefx.kernels.gpu.triton_tree.launch import Attention, KeySource, Launch
from treefx.kernels.tiles import key_programs, tree_blocks

ONCE = ["prologue", "backward_once", "finish_queries", "repair_backward_queries"]
TWICE = ["prologue", "backward_keys", "backward_queries"]


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the kernels that ran."""
    names: list[str] = []
    run = Launch.run

    def watched(launch: Launch) -> None:
        names.append(launch.kernel.__name__)
        run(launch)

    monkeypatch.setattr(Launch, "run", watched)
    return names


@pytest.fixture
def once(monkeypatch: pytest.MonkeyPatch, launched: list[str]) -> Iterator[None]:
    """Every backward in one pass, however short its rows."""
    monkeypatch.setattr(paths, "in_one_pass", lambda attention: True)
    yield
    assert {"backward_once", "finish_queries"} < set(launched) and "backward_queries" not in launched


@pytest.mark.usefixtures("once")
@pytest.mark.parametrize("name", ["plain", "softcap", "alibi", "bias", "relative", "gated", "clamped", "chosen"])
def test_scores(name: str) -> None:
    """Those with a slope or a gradient each; those that are conditions alone are the same text in both backwards."""
    check(draw(*SMALL, batch=2, sinks=name in ("plain", "softcap")), SCORES[name])


@pytest.mark.usefixtures("once")
@pytest.mark.parametrize("heads", [(2, 2), (6, 2), (14, 2), (32, 2), (71, 1)])
def test_groups(heads: tuple[int, int]) -> None:
    check(draw(*SMALL, heads=heads), SCORES["window"])


@pytest.mark.usefixtures("once")
@pytest.mark.parametrize("widths", [(80, 80), (192, 128), (72, 100)])
def test_head_widths(widths: tuple[int, int]) -> None:
    check(draw(*SMALL, heads=(2, 1), widths=widths), SCORES["softcap"])


@pytest.mark.usefixtures("once")
@pytest.mark.parametrize("config", [Config(16, 16, 4, 1), Config(32, 64, 4, 1), Config(128, 32, 4, 1)])
def test_tile_sizes(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    """With full tiles and partial ones, and more rows in the last tile than there are."""
    monkeypatch.setattr(attention, "_interpreted_config", lambda problem: config)
    check(draw(*(BRANCH_AT_27 if config.block_m == 16 else BRANCH_AT_57), sinks=True), SCORES["plain"])


@pytest.mark.usefixtures("once")
@pytest.mark.parametrize("name", ["plain", "window", "bias"])
def test_boundary(name: str) -> None:
    """Both launches add to the same sums."""
    check(draw(*SMALL, outside=70, sinks=True), SCORES[name])


def test_keys_in_a_pool_and_no_keys() -> None:
    case = draw(*SMALL, outside=20)
    rows = torch.randperm(50, dtype=torch.int32)[:20]
    pools = [torch.full((1, 2, 50, 16), torch.nan) for _ in range(2)]
    runner = Attention(case.narrow, SCORES["window"], choose=attention._interpreted_config)
    gathered, own = runner.sources()
    for pool, keys in zip(pools, (gathered.k, gathered.v), strict=True):
        pool[:, :, rows.long()] = keys
    nobody = KeySource(own.k[:, :, :0], own.v[:, :, :0], replace(own.keys, high=own.keys.high[:0]))
    sources = [KeySource(*pools, gathered.keys, rows), own, nobody]
    out, lse = attention.forward_from(runner, sources[:2])
    runner = replace(runner, once=True)
    dq, pairs, _ = attention.backward_from(runner, sources, case.grad.float(), out, lse)
    _, _, wanted, dk, dv, dbk, dbv, *_ = expected(case, SCORES["window"])
    assert_equal([dq, *pairs[0], *pairs[1]], [wanted, dbk, dbv, dk, dv])
    dq, ((dk, _),), _ = attention.backward_from(runner, [nobody], case.grad.float(), out, lse)
    assert not dq.any() and dk.shape[2] == 0


@pytest.fixture
def short_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every list of more than one tile is cut."""
    monkeypatch.setattr(attention, "_interpreted_config", lambda problem: Config(16, 16, 4, 1))
    monkeypatch.setattr(key_programs, "_SHORTEST", 1)
    monkeypatch.setattr(key_programs, "_EVEN", 1 << 20)
    monkeypatch.setattr(tree_blocks, "_recent", [])


@pytest.mark.usefixtures("once", "short_lists")
def test_long_lists_are_cut_into_parts(launched: list[str]) -> None:
    check(draw(*forest([[*range(30)], [*range(20), *range(50, 63)]]), heads=(6, 2), batch=2), SCORES["softcap"])
    assert "sum_parts" in launched


@pytest.fixture
def other_order(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Makes the programs of every backward kernel come in the opposite order, which a device may choose."""

    def turn() -> None:
        run = Launch.run

        def turned(launch: Launch) -> None:
            names = ("order", "start", "middle", "stop", "slot") if "stop" in launch.arguments else ("order",)
            flipped = {name: launch.arguments[name].flip(0) for name in names if name in launch.arguments}
            run(replace(launch, arguments={**launch.arguments, **flipped}))

        monkeypatch.setattr(Launch, "run", turned)
        tree_blocks.forget_blocks()  # or what was launched before would be repeated

    return turn


@pytest.mark.parametrize("in_one_pass", [False, True])
def test_the_order_of_programs(
    in_one_pass: bool, other_order: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In two passes it changes no bit; in one the bits of dq, and nothing else: so this test can tell."""
    monkeypatch.setattr(paths, "in_one_pass", lambda attention: in_one_pass)
    monkeypatch.setattr(attention, "_interpreted_config", lambda problem: Config(16, 16, 4, 1))
    case = draw(*BRANCH_AT_27, heads=(2, 1), sinks=True)
    first = computed(case, SCORES["plain"])
    again = computed(case, SCORES["plain"])
    other_order()
    turned = computed(case, SCORES["plain"])
    same = [torch.equal(*pair) for pair in zip(first, turned, strict=True)]
    assert same == [number != 2 or not in_one_pass for number in range(len(same))]
    assert all(torch.equal(*pair) for pair in zip(first, again, strict=True))
    assert_equal(turned, expected(case, SCORES["plain"]))


def with_nan_behind(x: torch.Tensor) -> torch.Tensor:
    """Return the rows as a part of longer ones."""
    room = x.new_full((*x.shape[:2], x.shape[2] + 64, x.shape[3]), torch.nan)
    room[:, :, : x.shape[2]] = x
    return room[:, :, : x.shape[2]]


UNBOUNDED: dict[str, tuple[str, str, tuple[int, ...]]] = {
    "rows": ('"tl.minimum(row, queries * GROUP - 1)" if masked', '"row" if masked', (3, 4)),
    "keys": ("existing = tl.minimum(key, keys - 1)", "existing = key", (0, 2)),
}


@pytest.mark.parametrize("in_one_pass", [False, True])
@pytest.mark.parametrize("unbounded", [None, *UNBOUNDED])
def test_nothing_behind_the_last_one_is_read(
    in_one_pass: bool, unbounded: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bounds of in-place reads; without one, NaN times a weight of zero is NaN.

    The kernels would repair that NaN: the mistake switches the repair off.
    """
    monkeypatch.setattr(paths, "in_one_pass", lambda attention: in_one_pass)
    case = draw(*SMALL, heads=(2, 2), batch=2)
    wanted = expected(case, SCORES["window"])
    case.grad = with_nan_behind(case.grad.float())
    narrow = case.narrow
    q, k, v = (with_nan_behind(x) for x in (narrow.q, narrow.k, narrow.v))
    case.narrow = replace(narrow, q=q, k=k, v=v)
    if unbounded is None:
        assert_equal(computed(case, SCORES["window"]), wanted)
        return
    old, new, spoiled = UNBOUNDED[unbounded]
    assert template("plain").count(old) == 1
    repair = "if odd > 0:"
    assert repair in template("plain")
    with planted("plain", template("plain").replace(old, new).replace(repair, "if odd > 2**20:")):
        got = computed(case, SCORES["window"])
    assert all(got[number].isnan().any() for number in spoiled)


def leaves() -> list[torch.Tensor]:
    case = draw(*SMALL)
    return [tensor.requires_grad_() for tensor in (case.narrow.q, case.narrow.k, case.narrow.v)]


@pytest.mark.parametrize(
    ("everywhere", "here", "path", "wanted"),
    [
        (False, False, None, ONCE),
        (False, True, None, TWICE),
        (True, False, None, TWICE),
        (False, False, "plain", ONCE),
        (False, True, "plain", TWICE),
    ],
)
def test_who_chooses(
    everywhere: bool,
    here: bool,
    path: str | None,
    wanted: list[str],
    launched: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The switch of torch and the argument, whether the plain form is asked for or not."""
    if path:
        monkeypatch.setenv("TREEFX_KERNEL_PATH", path)
    monkeypatch.setattr(paths, "ONE_PASS_KEYS", 40)
    given = leaves()
    out = tree_attention(*given, SMALL[0], impl="triton", deterministic=here)
    torch.use_deterministic_algorithms(everywhere)
    try:
        grads = torch.autograd.grad(out, given, torch.ones_like(out))
    finally:
        torch.use_deterministic_algorithms(False)
    assert launched == ["forward", *wanted] and all(grad.isfinite().all() for grad in grads)


def test_short_rows_take_two_passes(launched: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles count whole: 19 tokens of 8 heads are 152 rows, which three tiles of 64 by 64 hold."""
    for least, wanted in ((80, ONCE), (81, TWICE)):
        launched.clear()
        tree_blocks.forget_blocks()  # or what was launched before would be repeated
        monkeypatch.setattr(paths, "ONE_PASS_KEYS", least)
        computed(draw(*SMALL, heads=(8, 1)), SCORES["plain"])
        assert launched == ["forward", *wanted]


def _never_zeroed(monkeypatch: pytest.MonkeyPatch) -> None:
    made = attention.Attention.prologue

    def prologue(*args: object) -> object:
        launch, packed, in_place = made(*args)  # type: ignore[arg-type]
        packed["SumsQ"].fill_(1.0)
        return replace(launch, arguments={**launch.arguments, "SumsQ": None}), packed, in_place

    monkeypatch.setattr(attention.Attention, "prologue", prologue)


def _without_factor(monkeypatch: pytest.MonkeyPatch) -> None:
    finish = attention.launch_finish
    monkeypatch.setattr(attention, "launch_finish", lambda sums, dq, factor, heads: finish(sums, dq, 1.0, heads))


IN_PLACES: dict[str, tuple[str, str]] = {
    "members of a group in one row": (
        "add_rows(SumsQ, block.to(tl.int64) *",
        "add_rows(SumsQ, block.to(tl.int64) // GROUP *",
    ),
    "all heads in the first": ("SumsQ += tl.program_id(1)", "SumsQ += 0 * tl.program_id(1)"),
    "once for full tiles": ("{{ keys_tile(False, queries_too)", "{{ keys_tile(False, False)"),
    "before delta is taken off": ("tl.trans(ds.to(", "tl.trans((slope * dp).to("),
}


def _plant(name: str) -> AbstractContextManager[None]:
    if name not in IN_PLACES:
        return nullcontext()
    old, new = IN_PLACES[name]
    assert template("plain").count(old) == 1
    return planted("plain", template("plain").replace(old, new))


@pytest.mark.usefixtures("once")
@pytest.mark.parametrize("name", ["right", "never zeroed", "without its factor", *IN_PLACES])
def test_mistakes_are_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In dq alone; the same case without a mistake is right."""
    monkeypatch.setattr(attention, "_interpreted_config", lambda problem: Config(32, 16, 4, 1))
    case = draw(*BRANCH_AT_27, heads=(4, 2), sinks=True)
    if name == "never zeroed":
        _never_zeroed(monkeypatch)
    if name == "without its factor":
        _without_factor(monkeypatch)
    with _plant(name):
        got, wanted = computed(case, SCORES["plain"]), expected(case, SCORES["plain"])
    dq, wanted_dq = got.pop(2), wanted.pop(2)
    assert_equal(got, wanted)
    if name == "right":
        assert_equal([dq], [wanted_dq])
        return
    with pytest.raises(AssertionError):
        assert_equal([dq], [wanted_dq])
