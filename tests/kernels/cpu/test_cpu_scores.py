"""Scores on the CPU: masked rows as plain attention treats them, biases without masks, windows without waste."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from treefx.kernels import tree_attention
from treefx.kernels.common import Inputs
from treefx.kernels.cpu import eager_tiles, rectangles
from treefx.kernels.cpu import rectangles as tiles
from treefx.kernels.cpu.bias_gradients import bias_is_summable
from treefx.kernels.cpu.scored_tiles import is_separable, plan_scored_tiles
from treefx.kernels.ops import attend, attend_with_lse
from treefx.kernels.score import Expr, Score, make_score
from treefx.kernels.tiles.structure import count_tokens, find_structure

EndsOf = Callable[[list[int]], Tensor]
DOT: Expr = ("mul", ("dot",), ("const", 0.5))
DEPTH_DIFFERENCE: Expr = ("sub", ("load", 1, ("q",)), ("load", 1, ("k",)))


def forest(*nodes: tuple[int, int]) -> Tensor:
    """Return ``subtree_end`` of a forest given as (parent node, length) in packed order."""
    stops = torch.tensor([length for _, length in nodes]).cumsum(0).tolist()
    ends = list(stops)
    for node in reversed(range(len(nodes))):
        if nodes[node][0] >= 0:
            ends[nodes[node][0]] = max(ends[nodes[node][0]], ends[node])
    return torch.tensor(ends, dtype=torch.int32).repeat_interleave(torch.tensor([length for _, length in nodes]))


def tree_mask(ends: Tensor) -> Tensor:
    index = torch.arange(len(ends))
    return (index[None] <= index[:, None]) & (index[:, None] < ends[None])


def draw(tokens: int, dtype: torch.dtype = torch.float32, heads: int = 2) -> list[Tensor]:
    return [torch.randn(1, tokens, heads, 8, dtype=dtype).transpose(1, 2).requires_grad_() for _ in range(3)]


def plain(q: Tensor, k: Tensor, v: Tensor, ends: Tensor, keep: Tensor, number: float, cap: bool) -> Tensor:
    """Attend as a model does: one softmax over a score where masked keys count ``number``."""
    score = 0.5 * (q @ k.transpose(-1, -2))
    score = torch.tanh(score) if cap else score
    score = torch.where(keep, score, number).masked_fill(~tree_mask(ends), -torch.inf)
    blind = (score == -torch.inf).all(dim=-1, keepdim=True)
    return torch.softmax(score.masked_fill(blind, 0.0), dim=-1).masked_fill(blind, 0.0) @ v


@pytest.mark.parametrize("impl", ["reference", "cpu", "flex"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_queries_without_a_key_have_no_sum_of_weights(dtype: torch.dtype, impl: str) -> None:
    torch.manual_seed(0)
    ends = forest((-1, 9), (0, 140), (0, 5), (2, 130), (2, 3))
    visible = torch.rand(len(ends), len(ends)) < 0.1
    visible[20:23] = False
    inputs = [x.detach() for x in draw(len(ends), dtype)]
    _, lse = attend_with_lse(*inputs, ends, Score(DOT, ("load", 0, ("q",), ("k",))), [visible], impl=impl)
    blind = ~(visible & tree_mask(ends)).any(1)
    assert 3 <= int(blind.sum()) < len(ends)
    assert torch.equal(lse == -torch.inf, blind.expand_as(lse))


@pytest.mark.parametrize("cap", [False, True], ids=["linear", "softcap"])
@pytest.mark.parametrize("number", [torch.finfo(torch.float32).min, -65504.0, -torch.inf], ids=["min", "half", "inf"])
@pytest.mark.parametrize("impl", ["reference", "cpu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rows_whose_keys_are_all_masked(dtype: torch.dtype, impl: str, number: float, cap: bool) -> None:
    """A softmax over equal constants is uniform; over -inf alone it is NaN, for which tree attention gives 0."""
    torch.manual_seed(0)
    ends = forest((-1, 9), (0, 140), (0, 5), (2, 130), (2, 3))
    leaves = draw(len(ends), dtype)
    keep = torch.rand(len(ends)) < 0.5
    keep[:9] = keep[149:160] = False  # the root, and with it the first tokens of both branches, see masked keys alone
    value = ("tanh", DOT) if cap else DOT
    score = Score(("where", ("load", 0, ("k",)), value, ("const", number)))
    want = plain(*leaves, ends, keep, number, cap)
    got = attend(*leaves, ends, score, [keep], impl=impl)
    grad = torch.randn_like(want)
    pairs = zip([got, *torch.autograd.grad(got, leaves, grad)], [want, *torch.autograd.grad(want, leaves, grad)])
    tolerance = 1e-5 if dtype == torch.float32 else 1e-10
    for first, second in pairs:
        assert second.isfinite().all()
        torch.testing.assert_close(first, second, rtol=tolerance, atol=tolerance * max(1.0, second.abs().max().item()))
    assert (want[:, :, :9].abs().sum() > 0) == (number != -torch.inf)


@pytest.mark.parametrize("impl", ["reference", "cpu"])
def test_added_masks_of_minus_infinity_give_no_nan(impl: str) -> None:
    ends = forest((-1, 5), (0, 40), (0, 200))
    leaves = draw(len(ends))
    bias = torch.zeros(len(ends))
    bias[:30] = -torch.inf
    score = Score(("add", DOT, ("load", 0, ("k",))))
    out = attend(*leaves, ends, score, [bias], impl=impl)
    grads = torch.autograd.grad(out.sum(), leaves)
    assert all(tensor.isfinite().all() for tensor in (out, *grads))
    assert (out[:, :, :30] == 0).all() and (out[:, :, 45:] != 0).any()


@pytest.mark.parametrize("sink", [0.0, float(torch.finfo(torch.float32).min)])
def test_masked_rows_beside_a_sink_and_a_bias_with_gradient(sink: float) -> None:
    torch.manual_seed(0)
    ends = forest((-1, 6), (0, 30), (0, 150))
    leaves = [*draw(len(ends)), torch.full((2,), sink, requires_grad=True), torch.randn(2, requires_grad=True)]
    keep = torch.arange(len(ends)) > 20
    value = ("add", DOT, ("load", 1, ("head",)))
    score = Score(("where", ("load", 0, ("k",)), value, ("const", torch.finfo(torch.float32).min)))
    results = []
    for impl in ("reference", "cpu"):
        q, k, v, sinks, table = leaves
        out = attend(q, k, v, ends, score, [keep, table], sinks, impl=impl)
        results.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
    for got, want in zip(results[1], results[0], strict=True):
        assert want.isfinite().all()
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5 * max(1.0, want.abs().max().item()))


SEPARABLE: dict[str, tuple[Expr, bool]] = {
    "alibi": (("neg", ("mul", ("load", 0, ("head",)), DEPTH_DIFFERENCE)), True),
    "of the key": (("load", 0, ("head",), ("k",)), True),
    "of a constant factor": (("div", ("float", DEPTH_DIFFERENCE), ("const", 3.0)), True),
    "table of distances": (("load", 0, ("head",), DEPTH_DIFFERENCE), False),
    "square of the distance": (("mul", DEPTH_DIFFERENCE, DEPTH_DIFFERENCE), False),
    "by the query's factor": (("mul", ("load", 0, ("q",)), ("load", 1, ("k",))), False),
    "divided by the key": (("div", ("q",), ("k",)), False),
    "rounded": (("int", ("mul", ("const", 0.3), DEPTH_DIFFERENCE)), False),
    "chosen by both": (("where", ("lt", ("q",), ("k",)), ("q",), ("k",)), False),
    "absolute distance": (("abs", DEPTH_DIFFERENCE), False),
}


@pytest.mark.parametrize(("expr", "expected"), SEPARABLE.values(), ids=SEPARABLE.keys())
def test_separable_biases(expr: Expr, expected: bool) -> None:
    assert is_separable(expr) == expected


def depth_of(ends: Tensor) -> Tensor:
    return tree_mask(ends).sum(dim=1) - 1


def run_both(ends: Tensor, leaves: list[Tensor], score: Score, buffers: list[Tensor], tolerance: float = 1e-5) -> None:
    grad = torch.randn_like(leaves[0])
    results = []
    for impl in ("cpu", "reference"):
        out = attend(*leaves, ends, score, buffers, impl=impl)
        results.append([out, *torch.autograd.grad(out, leaves, grad)])
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance * max(1.0, want.abs().max().item()))


@pytest.mark.parametrize("steepest", [0.5, 3.0, 400.0])
def test_steep_alibi(steepest: float) -> None:
    """Slopes so steep that a difference of logits loses its digits take smaller tiles, then a whole mask."""
    torch.manual_seed(0)
    ends = forest((-1, 700), (0, 20), (1, 150), (0, 260), (0, 30), (4, 30), (4, 300))
    leaves = draw(len(ends), heads=4)
    slopes = torch.tensor([steepest, 0.1, 0.0, -0.01])
    depth = depth_of(ends)
    run_both(ends, leaves, make_score(scale=0.35, alibi=0, depth=1), [slopes, depth])
    run_both(ends, leaves, make_score(scale=0.35, alibi=0, depth=1, window=200), [slopes, depth])
    inputs = Inputs(*[leaf.detach() for leaf in leaves], ends, [slopes, depth])
    bias = SEPARABLE["alibi"][0]
    cut = list(plan_scored_tiles(inputs, find_structure(ends), bias, None))
    shared_rows = [tile for tile in cut if tile.mask is not None and tile.mask.shape[-2] == 1]
    assert bool(shared_rows) == (steepest < 400)


def learned(
    ends: Tensor, leaves: list[Tensor], slopes: Tensor, impl: str, score: Score, sinks: Tensor | None
) -> list[Tensor]:
    leaves = [*leaves, slopes, *([] if sinks is None else [sinks])]
    out = attend(*leaves[:3], ends, score, [slopes, depth_of(ends)], sinks, impl)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(0)).to(out.dtype)
    return [out, *torch.autograd.grad(out, leaves, grad)]


@pytest.mark.parametrize(
    ("dtype", "group", "with_sinks"),
    [
        (torch.float32, 1, False),
        (torch.float32, 7, True),
        (torch.float64, 1, True),
        (torch.float64, 7, False),
        (torch.bfloat16, 1, False),
        (torch.bfloat16, 7, True),
    ],
)
def test_learned_slopes_take_no_scores(
    dtype: torch.dtype, group: int, with_sinks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their gradient comes from the rectangles' backward, with a window and without, on trees longer than a tile."""
    monkeypatch.setattr(eager_tiles, "backward", None)
    torch.manual_seed(0)
    ends = forest((-1, 150), (0, 20), (1, 130), (0, 60), (0, 3), (-1, 50))
    heads = 2 * group
    q, k, v = (
        torch.randn(1, len(ends), h, width).to(dtype).transpose(1, 2).requires_grad_()
        for h, width in ((heads, 8), (2, 8), (2, 5))
    )
    slopes = (2.0 ** (-1.0 - torch.arange(heads))).to(dtype).requires_grad_()
    sinks = torch.randn(heads).to(dtype).requires_grad_() if with_sinks else None
    wide = [tensor.detach().double().requires_grad_() for tensor in (q, k, v, slopes)]
    wide_sinks = None if sinks is None else sinks.detach().double().requires_grad_()
    bound = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    for window in (None, 90):
        score = make_score(scale=0.35, alibi=0, depth=1, window=window)
        got = learned(ends, [q, k, v], slopes, "cpu", score, sinks)
        wanted = learned(ends, wide[:3], wide[3], "reference", score, wide_sinks)
        for first, second in zip(got, wanted, strict=True):
            assert (first.double() - second).abs().max() <= bound * max(1.0, second.abs().max().item())


def test_other_learned_biases_take_scores() -> None:
    """A table of distances is no sum of a term per query and a term per key; nor is a score without a product."""
    assert not bias_is_summable(1.0, SEPARABLE["table of distances"][0])
    assert bias_is_summable(1.0, SEPARABLE["alibi"][0]) and not bias_is_summable(0.0, SEPARABLE["alibi"][0])
    torch.manual_seed(0)
    ends = forest((-1, 60), (0, 40), (0, 50))
    table = torch.randn(2, 200, requires_grad=True)
    distances = Score(("add", DOT, ("load", 0, ("head",), DEPTH_DIFFERENCE)))
    alone = Score(("float", ("mul", ("load", 0, ("head",), ("const", 0)), ("k",))))
    for score in (distances, alone):
        leaves, results = [*draw(len(ends)), table], []
        for impl in ("cpu", "reference"):
            out = attend(*leaves[:3], ends, score, [table, depth_of(ends)], impl=impl)
            results.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
        for got, want in zip(*results, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5 * max(1.0, want.abs().max().item()))


def test_alibi_on_masked_keys() -> None:
    """A masking constant among the keys must not be mistaken for a large bias of the query."""
    torch.manual_seed(0)
    ends = forest((-1, 200), (0, 90), (0, 140))
    real = torch.arange(len(ends)) % 3 != 1
    alibi = ("sub", DOT, ("mul", ("const", 0.2), DEPTH_DIFFERENCE))
    added = ("where", ("load", 0, ("k",)), ("const", 0.0), ("const", torch.finfo(torch.float32).min))
    buffers = [real, depth_of(ends)]
    run_both(ends, draw(len(ends)), Score(("add", alibi, added)), buffers)
    run_both(ends, draw(len(ends)), Score(alibi, ("load", 0, ("k",))), buffers)


@pytest.fixture
def pairs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Collect the query-key pairs of every call of the flash kernel."""
    seen: list[int] = []
    flash: Any = rectangles.flash

    def counted(q: Tensor, k: Tensor, *args: Any, **kwargs: Any) -> Any:
        seen.append(q.shape[2] * k.shape[2])
        return flash(q, k, *args, **kwargs)

    monkeypatch.setattr(rectangles, "flash", counted)
    return seen


@pytest.mark.parametrize("window", [5, 100])
def test_window_visits_little_more_than_it_sees(window: int, pairs: list[int]) -> None:
    torch.manual_seed(0)
    ends = forest((-1, 20_000), (0, 300), (0, 301))
    q, k, v = (tensor.detach() for tensor in draw(len(ends), heads=1))
    out = tree_attention(q, k, v, ends, window=window)
    assert 0 < sum(pairs) < len(ends) * (window + 256 + 2 * 64)
    for first, query in ((20_300, 20_350), (0, 20_200)):  # in the second branch, and in the first
        row = [*range(20_000), *range(20_300 if first else 20_000, query + 1)][-window:]
        logits = q[0, 0, query] @ k[0, 0, row].T / 8**0.5
        torch.testing.assert_close(out[0, 0, query], torch.softmax(logits, 0) @ v[0, 0, row], rtol=1e-5, atol=1e-5)


def test_window_wider_than_the_trees_hides_nothing() -> None:
    ends = forest((-1, 600), (0, 300), (0, 300))
    q, k, v = (tensor.detach() for tensor in draw(len(ends)))
    wide = tree_attention(q, k, v, ends, window=10_000)
    assert all(tile.mask is None for tile in _window_tiles(q, k, v, ends, 10_000))
    torch.testing.assert_close(wide, tree_attention(q, k, v, ends), rtol=1e-5, atol=1e-5)


def _window_tiles(q: Tensor, k: Tensor, v: Tensor, ends: Tensor, window: int) -> list[Any]:
    score = make_score(scale=1.0, window=window, depth=0)
    inputs = Inputs(q, k, v, ends, [depth_of(ends)])
    cut = list(plan_scored_tiles(inputs, find_structure(ends), None, score.visible))
    assert sum(count_tokens(tile.keys) for tile in cut) > 0
    return cut


def test_chunked_attention_skips_whole_chunks(pairs: list[int]) -> None:
    ends = forest((-1, 4096), (0, 200), (0, 100))
    chunk = ("const", 512)
    same = ("eq", *[("floordiv", ("load", 0, (side,)), chunk) for side in ("q", "k")])
    buffers = [depth_of(ends)]
    run_both(ends, draw(len(ends), heads=1), Score(DOT, same), buffers)
    assert sum(pairs) < len(ends) * 1024


def test_layers_share_the_tiles_of_a_forest(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    original = tiles.tree_condition

    def counted(inputs: Inputs, group: Any, keys: Tensor) -> Tensor:
        made.append(len(keys))
        return original(inputs, group, keys)

    monkeypatch.setattr(tiles, "tree_condition", counted)
    ends = forest((-1, 31), *[(0, 3)] * 30)
    for _ in range(3):  # layers
        out = tree_attention(*draw(len(ends)), ends.clone())
        out.sum().backward()
    assert len(made) == 1
    tree_attention(*draw(len(ends) - 3), forest((-1, 31), *[(0, 3)] * 29))
    assert len(made) == 2
